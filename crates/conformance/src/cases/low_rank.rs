//! Low-rank products: contract, expand and outer, both layouts, ranks around the tile sizes, rows
//! of data with empty ones; one factor and many.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{
    Contraction, FactorLayout, LowRank, LowRankContract, LowRankExpand, LowRankOuter, OuterProduct,
};

#[derive(Debug)]
struct LowRankCase {
    row_starts: Vec<usize>,
    rank: usize,
    width: usize,
    layout: FactorLayout,
    alpha: f32,
    kind: Distribution,
}

impl Case for LowRankCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let (rank, width) = (self.rank, self.width);
        let tokens = self.row_starts[self.row_starts.len() - 1];
        let p = LowRank { segments: &[0, tokens], rank, width, layout: self.layout, alpha: self.alpha };
        forms(b, &p, &self.row_starts, self.kind)
    }
}

/// Experts: one segment and one factor each.
#[derive(Debug)]
struct GroupedLowRankCase {
    segments: Vec<usize>,
    row_starts: Vec<usize>,
    rank: usize,
    width: usize,
    layout: FactorLayout,
    alpha: f32,
    kind: Distribution,
}

impl Case for GroupedLowRankCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let Self { rank, width, layout, alpha, .. } = *self;
        let p = LowRank { segments: &self.segments, rank, width, layout, alpha };
        forms(b, &p, &self.row_starts, self.kind)
    }
}

fn forms<B: Backend>(b: &B, p: &LowRank, row_starts: &[usize], kind: Distribution) -> Vec<Output> {
    let (tokens, factors) = (p.tokens(), p.factors() * p.factor_length());
    let mut random = Random::new(tokens as u64);
    let x = b.upload(&random.f32s(kind, tokens * p.width));
    let u = b.upload(&random.f32s(kind, tokens * p.rank));
    let factor = b.upload(&random.f32s(kind, factors));
    let mut contracted = poisoned(b, tokens * p.rank);
    b.run(LowRankContract::one(&mut contracted, &x, &factor, *p));
    let (mut again, mut third) = (poisoned(b, tokens * p.rank), poisoned(b, tokens * p.rank));
    let parts = [&mut again, &mut third].map(|u| Contraction { u, factor: &factor, p: *p });
    b.run(LowRankContract { parts: parts.into(), x: &x });
    let alone = Output::download(b, "u", &contracted);
    for one_of_several in [&again, &third] {
        assert_eq!(alone, Output::download(b, "u", one_of_several), "one factor and several");
    }
    let mut y = b.upload(&random.f32s(Distribution::Plain, tokens * p.width));
    b.run(LowRankExpand { y: &mut y, u: &u, factor: &factor, p: *p });
    let old = random.f32s(Distribution::Plain, factors);
    let [mut dfactor, mut again, mut third] = [(); 3].map(|()| b.upload(&old));
    let product = |dfactor| OuterProduct { dfactor, u: &u, x: &x, p: *p };
    b.run(LowRankOuter { parts: vec![product(&mut dfactor)], row_starts });
    b.run(LowRankOuter { parts: [&mut again, &mut third].map(product).into(), row_starts });
    let alone_outer = Output::download(b, "dfactor", &dfactor);
    for one_of_several in [&again, &third] {
        assert_eq!(alone_outer, Output::download(b, "dfactor", one_of_several), "one factor and several");
    }
    vec![alone, Output::download(b, "y", &y), alone_outer]
}

/// Whole groups of ranks and aligned widths, with few and with many tokens: several factors share a
/// pass over `x`.
pub(super) fn visit_aligned(visitor: &mut impl Visitor) {
    for layout in [FactorLayout::RankMajor, FactorLayout::WidthMajor] {
        for (tokens, rank, width) in [(37, 24, 516), (9, 8, 1028), (4100, 8, 132), (4099, 16, 260), (4097, 24, 128)] {
            let (row_starts, kind) = (vec![0, tokens / 3, tokens], Distribution::Outliers);
            visitor.case(&LowRankCase { row_starts, rank, width, layout, alpha: 0.37, kind });
        }
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for layout in [FactorLayout::RankMajor, FactorLayout::WidthMajor] {
        let case = |row_starts: &[usize], rank, width, kind| LowRankCase {
            row_starts: row_starts.to_vec(),
            rank,
            width,
            layout,
            alpha: 0.37,
            kind,
        };
        visitor.case(&case(&[0, 1], 1, 1, Distribution::Plain));
        visitor.case(&case(&[0, 7], 3, 33, Distribution::Plain));
        visitor.case(&case(&[0, 0, 2, 2, 29], 8, 65, Distribution::Outliers));
        visitor.case(&case(&[0, 13], 16, 128, Distribution::Plain));
        visitor.case(&case(&[0, 5, 5], 17, 131, Distribution::Outliers));
        visitor.case(&case(&[0, 3], 64, 193, Distribution::Plain));
        visitor.case(&case(&[0, 129, 387], 5, 37, Distribution::Outliers));
        // Several tokens per work item, more columns than are staged at once, more blocks than are
        // kept at once.
        visitor.case(&case(&[0, 4099], 8, 35, Distribution::Plain));
        visitor.case(&case(&[0, 3, 21], 12, 619, Distribution::Outliers));
        let short_rows: Vec<usize> = (0..=150).map(|row| row * 3 / 2).collect();
        visitor.case(&case(&short_rows, 8, 33, Distribution::Plain));
        for kind in Distribution::ALL {
            visitor.case(&case(&[0, 4, 11], 9, 71, kind));
        }
        let grouped = |segments: &[usize], row_starts: &[usize], rank, width, kind| GroupedLowRankCase {
            segments: segments.to_vec(),
            row_starts: row_starts.to_vec(),
            rank,
            width,
            layout,
            alpha: 0.37,
            kind,
        };
        visitor.case(&grouped(&[0, 0, 0], &[0], 4, 9, Distribution::Plain));
        visitor.case(&grouped(&[0, 5, 5, 22, 39, 39], &[0, 2, 5, 11, 22, 39], 8, 65, Distribution::Outliers));
        visitor.case(&grouped(
            &[0, 0, 1, 150, 151, 151, 290],
            &[0, 1, 150, 151, 160, 290],
            17,
            131,
            Distribution::Plain,
        ));
        // Many factors, some without tokens.
        let many: Vec<usize> = (0..=64).map(|e| e * e / 50).collect();
        for kind in Distribution::ALL {
            visitor.case(&grouped(&many, &many, 5, 40, kind));
        }
    }
}
