//! Product with 4-bit weights: both forms and profiles, group sizes, channel orders, scale formats,
//! experts.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use half::f16;
use isobit_kernels::Backend;
use isobit_kernels::op::product4::E2M1;
use isobit_kernels::op::{
    Product, Product4Forward, Product4GradInput, Product4Rows, Quantized, QuantizedShape, Scales, SliceShape,
};
use isobit_kernels::tensor::QuantizedWeight;
use isobit_numerics::slices::Profile;
use std::convert::Infallible;

/// A quantised weight in host memory, as a loader would have read it.
pub struct HostWeight {
    pub n: usize,
    pub k: usize,
    pub group_size: usize,
    pub words: Vec<i32>,
    pub zeros: Vec<u8>,
    pub scales: Vec<f32>,
    /// The same numbers, if float16 holds them.
    pub narrow: Option<Vec<f16>>,
    pub group_of: Vec<u32>,
}

impl HostWeight {
    /// Random integers and zero points; scales of about 0.01 to 0.04, or according to `kind`. A
    /// group size of 0 is one group.
    pub fn new(random: &mut Random, n: usize, k: usize, group_size: usize, shuffled: bool, kind: Distribution) -> Self {
        let group_size = if group_size == 0 { k.max(1) } else { group_size };
        let groups = k.div_ceil(group_size);
        let words = (0..k / 8 * n).map(|_| random.word() as i32).collect();
        let zeros = (0..groups * n).map(|_| random.below(17) as u8).collect();
        let plain = |random: &mut Random| f16::from_f32(0.01 + 0.03 * random.uniform()).to_f32();
        let scales: Vec<f32> = match kind {
            Distribution::Plain => (0..groups * n).map(|_| plain(random)).collect(),
            _ => random.f32s(kind, groups * n),
        };
        let narrow = (kind == Distribution::Plain).then(|| scales.iter().map(|&scale| f16::from_f32(scale)).collect());
        let mut group_of: Vec<u32> = (0..k).map(|channel| (channel / group_size) as u32).collect();
        if shuffled {
            for last in (1..k).rev() {
                group_of.swap(last, random.below(last + 1));
            }
        }
        Self { n, k, group_size, words, zeros, scales, narrow, group_of }
    }

    pub fn view(&self) -> Quantized<'_> {
        let scales = self.narrow.as_ref().map_or(Scales::F32(&self.scales), |narrow| Scales::F16(narrow));
        let (words, zeros, group_of) = (&self.words[..], &self.zeros[..], &self.group_of[..]);
        Quantized { n: self.n, k: self.k, group_size: self.group_size, words, zeros, scales, group_of }
    }
}

/// The weights in a backend's layout.
pub fn packed<B: Backend>(b: &B, weights: &[Quantized]) -> QuantizedWeight<B> {
    let made = b.quantized_weight(QuantizedShape::of(weights), |e| Ok::<_, Infallible>(weights[e]));
    made.unwrap_or_else(|never| match never {})
}

#[derive(Debug)]
struct Product4Case {
    segments: Vec<usize>,
    n: usize,
    k: usize,
    /// 0: one group.
    group_size: usize,
    /// Channels are not ordered by group.
    shuffled: bool,
    profile: Profile,
    kind: Distribution,
    scale_kind: Distribution,
}

/// A product of `m` rows and its gradient, for counts.
pub fn product(m: usize, [n, k]: [usize; 2], group_size: usize, profile: Profile) -> impl Case {
    let (kind, scale_kind) = (Distribution::Plain, Distribution::Plain);
    Product4Case { segments: vec![0, m], n, k, group_size, shuffled: false, profile, kind, scale_kind }
}

impl Case for Product4Case {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        self.run_with(b, None)
    }
}

/// The same with one zero point for all, a symmetric file, or with floats.
#[derive(Debug)]
struct Symmetric4Case {
    of: Product4Case,
    zero: u8,
}

impl Case for Symmetric4Case {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        self.of.run_with(b, Some(self.zero))
    }
}

impl Product4Case {
    fn run_with<B: Backend>(&self, b: &B, zero: Option<u8>) -> Vec<Output> {
        let (count, m) = (self.segments.len() - 1, self.segments[self.segments.len() - 1]);
        let mut random = Random::new(m as u64 + 4);
        let mut host: Vec<_> = (0..count)
            .map(|_| HostWeight::new(&mut random, self.n, self.k, self.group_size, self.shuffled, self.scale_kind))
            .collect();
        for weight in &mut host {
            weight.zeros.iter_mut().for_each(|own| *own = zero.unwrap_or(*own));
        }
        let weights: Vec<_> = host.iter().map(HostWeight::view).collect();
        let x = b.upload(&random.f32s(self.kind, m * self.k));
        let dy = b.upload(&random.f32s(self.kind, m * self.n));
        let old = random.f32s(Distribution::Plain, m * self.k);
        let w = packed(b, &weights);
        let p = Product { segments: &self.segments, n: self.n, k: self.k, profile: self.profile, accumulate: false };
        let mut rows = b.rows(SliceShape { rows: m, width: self.k, profile: self.profile });
        b.run(Product4Rows { rows: &mut rows, x: &x, w: &w, p });
        let (mut y, mut dx) = (poisoned(b, m * self.n), poisoned(b, m * self.k));
        b.run(Product4Forward { y: &mut y, x: &rows, w: &w, p });
        b.run(Product4GradInput { dx: &mut dx, dy: &dy, w: &w, p });
        let mut added = b.upload(&old);
        b.run(Product4GradInput { dx: &mut added, dy: &dy, w: &w, p: Product { accumulate: true, ..p } });
        vec![
            Output::download(b, "y", &y),
            Output::download(b, "dx", &dx),
            Output::download(b, "dx accumulated", &added),
        ]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    let dense = |m: usize, n: usize, k: usize, group_size, shuffled, profile, kind| Product4Case {
        segments: vec![0, m],
        n,
        k,
        group_size,
        shuffled,
        profile,
        kind,
        scale_kind: Distribution::Plain,
    };
    for profile in Profile::ALL {
        visitor.case(&dense(1, 1, 8, 0, false, profile, Distribution::Plain));
        visitor.case(&dense(3, 17, 64, 32, false, profile, Distribution::Plain));
        visitor.case(&dense(33, 31, 640, 128, false, profile, Distribution::Outliers));
        visitor.case(&dense(37, 67, 1032, 0, false, profile, Distribution::Outliers));
        visitor.case(&dense(7, 515, 256, 64, true, profile, Distribution::Plain));
        visitor.case(&dense(525, 19, 128, 32, true, profile, Distribution::Outliers));
        // Groups that straddle chunks and tiles, and a shorter last group.
        visitor.case(&dense(9, 33, 1104, 200, false, profile, Distribution::Plain));
        visitor.case(&dense(9, 1030, 584, 24, true, profile, Distribution::Outliers));
        visitor.case(&dense(70, 80, 72, 8, true, profile, Distribution::Plain));
        for kind in [Distribution::Edges, Distribution::Zeros] {
            visitor.case(&dense(13, 29, 72, 24, false, profile, kind));
        }
        for scale_kind in [Distribution::Outliers, Distribution::Edges, Distribution::Zeros] {
            visitor.case(&Product4Case { scale_kind, ..dense(13, 40, 136, 64, true, profile, Distribution::Plain) });
        }
        // Experts: several segments, some empty, each weight with its own channel order.
        visitor.case(&Product4Case {
            segments: vec![0, 5, 5, 22, 101, 101],
            ..dense(0, 33, 192, 64, true, profile, Distribution::Outliers)
        });
        visitor.case(&Product4Case {
            segments: vec![0, 2, 2, 40],
            ..dense(0, 65, 144, 128, false, profile, Distribution::Plain)
        });
        let experts = Product4Case {
            segments: vec![0, 3, 3, 41],
            ..dense(0, 37, 160, 64, true, profile, Distribution::Outliers)
        };
        visitor.case(&Symmetric4Case { of: experts, zero: 8 });
        visitor.case(&Symmetric4Case { of: dense(35, 530, 136, 32, false, profile, Distribution::Plain), zero: 16 });
        // Floats of four bits, with scales of both formats.
        visitor.case(&Symmetric4Case { of: dense(35, 530, 160, 32, false, profile, Distribution::Plain), zero: E2M1 });
        visitor
            .case(&Symmetric4Case { of: dense(3, 21, 1064, 24, false, profile, Distribution::Outliers), zero: E2M1 });
        let experts = Product4Case {
            segments: vec![0, 3, 3, 75],
            scale_kind: Distribution::Outliers,
            ..dense(0, 66, 96, 32, false, profile, Distribution::Plain)
        };
        visitor.case(&Symmetric4Case { of: experts, zero: E2M1 });
    }
}
