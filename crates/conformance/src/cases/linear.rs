//! Linear layers: slicing and contraction of the input; product, bias and adapter, forward and
//! input gradient; weights kept sliced and sliced on the fly.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::op::slices::sliced_weight;
use isobit_kernels::op::{
    Contraction, FactorLayout, LinearForward, LinearGradInput, LinearInput, LowRank, LowRankGradient, LowRankTerm,
    Product, SliceShape,
};
use isobit_kernels::{Backend, Matrix, StoredMatrix};
use isobit_numerics::slices::Profile;

/// A linear layer in one call: product, bias and adapter, forward and backward.
#[derive(Debug)]
struct LinearCase {
    rows: usize,
    n: usize,
    k: usize,
    rank: usize,
    bias: bool,
    profile: Profile,
    kind: Distribution,
}

impl Case for LinearCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let &Self { rows: m, n, k, rank, bias, profile, kind } = self;
        let mut random = Random::new(3);
        let mut numbers = |kind, length| random.f32s(kind, length);
        let (w, x, dy) = (numbers(kind, n * k), numbers(kind, m * k), numbers(kind, m * n));
        let (w, x, dy) = (b.upload(&w), b.upload(&x), b.upload(&dy));
        let bias = bias.then(|| b.upload(&numbers(kind, n)));
        let old = numbers(Distribution::Plain, m * k);
        let mut made = |kind, length| b.upload(&numbers(kind, length));
        let (u, up, down) = (made(kind, m * rank), made(kind, n * rank), made(kind, rank * k));
        let segments = [0, m];
        let p = Product { segments: &segments, n, k, profile, accumulate: false };
        let expand = LowRank { segments: &segments, rank, width: n, layout: FactorLayout::WidthMajor, alpha: 0.75 };
        let back = LowRank { width: k, layout: FactorLayout::RankMajor, ..expand };
        let term = (rank > 0).then_some(LowRankTerm { u: &u, factor: &up, p: expand });
        let mut sliced = b.rows(SliceShape { rows: m, width: k, profile });
        let [mut of_x, mut again, mut third] = [(); 3].map(|()| poisoned(b, m * rank));
        for together in [vec![&mut of_x], vec![&mut again, &mut third]] {
            let parts = together.into_iter().filter(|_| rank > 0).map(|u| Contraction { u, factor: &down, p: back });
            b.run(LinearInput { rows: &mut sliced, x: &x, parts: parts.collect() });
        }
        let of_x = Output::download(b, "u", &of_x);
        for one_of_several in [&again, &third] {
            assert_eq!(of_x, Output::download(b, "u", one_of_several), "one factor and several");
        }
        let form = |w: Matrix<B::Memory>| {
            let mut y = poisoned(b, m * n);
            b.run(LinearForward { y: &mut y, x: &sliced, w, p, bias: bias.as_ref(), adapter: term });
            let (mut dx, mut sum) = (poisoned(b, m * k), b.upload(&old));
            let [mut low, mut low_again] = [(); 2].map(|()| poisoned(b, m * rank));
            for (dx, low, accumulate) in [(&mut dx, &mut low, false), (&mut sum, &mut low_again, true)] {
                let adapter =
                    (rank > 0).then_some(LowRankGradient { low, contract: (&up, expand), expand: (&down, back) });
                b.run(LinearGradInput { dx, dy: &dy, w, p: Product { accumulate, ..p }, adapter });
            }
            let outputs = [("y", y), ("dx", dx), ("dx accumulated", sum), ("low", low), ("low again", low_again)];
            outputs.map(|(name, of)| Output::download(b, name, &of)).to_vec()
        };
        let stored = StoredMatrix::F32(&w);
        let mut outputs = form(Matrix::Stored(stored));
        let kept = sliced_weight(b, stored, 1, SliceShape { rows: n, width: k, profile });
        assert_eq!(form(Matrix::Sliced(&kept)), outputs, "kept slices give what slices on the fly give");
        outputs.push(of_x);
        outputs
    }
}

/// More tiles than a device has multiprocessors, so that each computes several: contractions of one
/// block and of several chunks, more ranks than are staged at once.
pub(super) fn visit_many_tiles(visitor: &mut impl Visitor) {
    for (rows, n, k, rank, bias) in [(3, 8600, 650, 8, true), (300, 4400, 20, 17, false)] {
        visitor.case(&LinearCase { rows, n, k, rank, bias, profile: Profile::X2, kind: Distribution::Outliers });
    }
}

/// Whole groups of ranks, aligned widths and many tokens: slicing and contraction share a read.
pub(super) fn visit_aligned(visitor: &mut impl Visitor) {
    for profile in Profile::ALL {
        for (rows, n, k, rank) in [(4097, 8, 516, 8), (4099, 1300, 12, 16), (4098, 4, 260, 24)] {
            let kind = Distribution::Outliers;
            visitor.case(&LinearCase { rows, n, k, rank, bias: false, profile, kind });
        }
    }
    let (rows, profile) = (4096, Profile::X2);
    for kind in Distribution::ALL {
        visitor.case(&LinearCase { rows, n: 36, k: 40, rank: 8, bias: true, profile, kind });
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for profile in Profile::ALL {
        for (rows, n, k, rank, bias) in [
            (1, 1, 1, 1, true),
            (37, 67, 513, 8, true),
            (70, 33, 1031, 3, false),
            (525, 96, 64, 0, true),
            (33, 1027, 160, 64, true),
            (16, 32, 512, 16, false),
            // Enough rows for every thread to get some.
            (1800, 64, 72, 8, true),
        ] {
            visitor.case(&LinearCase { rows, n, k, rank, bias, profile, kind: Distribution::Outliers });
        }
        for kind in Distribution::ALL {
            visitor.case(&LinearCase { rows: 13, n: 64, k: 71, rank: 4, bias: true, profile, kind });
        }
    }
}
