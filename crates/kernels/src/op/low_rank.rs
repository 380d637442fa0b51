//! Low-rank products (`docs/numerics.md`, "Low-rank products"): float32 products with a rank of at
//! most 64 on one side.
//!
//! A factor `M` maps a long axis (`width`) to a short one (`rank`). With `x[t, width]` and
//! `u[t, rank]`:
//! - contract `u[t, j] = Σ_l x[t, l]·M[j, l]`: a lane sum of fused multiply-adds over `l`;
//! - expand `y[t, l] = fma(alpha, Σ_j u[t, j]·M[j, l], y[t, l])`: the sum is an FMA chain from zero
//!   in ascending `j`;
//! - outer `dM[j, l] += Σ_t (alpha·u[t, j])·x[t, l]`: a sum over tokens; `alpha·u` is rounded
//!   first.

use crate::backend::{F32, Length, Memory, Workspaces};
use crate::op::{Op, Output, lengths};

/// Largest rank of a low-rank product.
pub const RANK_MAX: usize = 64;

/// A product or a group of products with one shape of factor: tokens `segments[e]..segments[e+1]`
/// use factor `e`. A plain product has the single segment `[0, tokens]`; expert adapters have one
/// each, possibly empty. Factors are stored consecutively.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LowRank<'a> {
    pub segments: &'a [usize],
    pub rank: usize,
    pub width: usize,
    pub layout: FactorLayout,
    /// Scale of `expand` and `outer`; `contract` ignores it.
    pub alpha: f32,
}

/// Memory layout of a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FactorLayout {
    /// `[rank, width]`, like LoRA's A.
    RankMajor,
    /// `[width, rank]`, like LoRA's B.
    WidthMajor,
}

impl LowRank<'_> {
    pub fn factors(&self) -> usize {
        self.segments.len() - 1
    }

    pub fn tokens(&self) -> usize {
        self.segments[self.factors()]
    }

    /// Elements of one factor.
    pub fn factor_length(&self) -> usize {
        self.rank * self.width
    }

    /// Index of factor element `(j, l)`.
    #[inline(always)]
    pub fn at(&self, j: usize, l: usize) -> usize {
        match self.layout {
            FactorLayout::RankMajor => j * self.width + l,
            FactorLayout::WidthMajor => l * self.rank + j,
        }
    }

    pub(crate) fn multiply_adds(&self) -> usize {
        self.tokens() * self.rank * self.width
    }

    /// Tokens, rank, width.
    pub(crate) fn size(&self) -> [usize; 3] {
        [self.tokens(), self.rank, self.width]
    }

    /// Panics unless the parameters are allowed and `u`, `x` and the factors have these lengths.
    pub(crate) fn check_lengths(&self, op: &'static str, [u, x, factor]: [usize; 3]) {
        self.check();
        let (tokens, factors) = (self.tokens(), self.factors() * self.factor_length());
        lengths(op, &[("u", u, tokens * self.rank), ("x", x, tokens * self.width), ("factor", factor, factors)]);
    }

    /// Panics unless the rank is allowed and the segments ascend from 0.
    pub fn check(&self) {
        assert!((1..=RANK_MAX).contains(&self.rank), "rank {} is outside 1..={RANK_MAX}", self.rank);
        super::check_segments(self.segments);
    }

    /// Blocks of a sum over tokens, each with its factor. `row_starts` includes the segment
    /// boundaries.
    pub fn blocks(&self, row_starts: &[usize]) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
        assert_eq!(row_starts.last(), Some(&self.tokens()), "rows of data end with the tokens");
        let mut factor = 0;
        super::token_blocks(row_starts, super::TOKEN_BLOCK).map(move |block| {
            while self.segments[factor + 1] <= block.start {
                factor += 1;
            }
            assert!(block.end <= self.segments[factor + 1], "row starts include the segment borders");
            (factor, block)
        })
    }
}

/// `u = x Mᵀ` for one input and one or more factors, so a device can read the input once.
pub struct LowRankContract<'a, M: Memory> {
    pub parts: Vec<Contraction<'a, M>>,
    pub x: &'a F32<M>,
}

/// A factor and its output.
pub struct Contraction<'a, M: Memory> {
    pub u: &'a mut F32<M>,
    pub factor: &'a F32<M>,
    pub p: LowRank<'a>,
}

impl<'a, M: Memory> LowRankContract<'a, M> {
    /// With a single factor.
    pub fn one(u: &'a mut F32<M>, x: &'a F32<M>, factor: &'a F32<M>, p: LowRank<'a>) -> Self {
        Self { parts: vec![Contraction { u, factor, p }], x }
    }
}

impl<M: Memory> Op<M> for LowRankContract<'_, M> {
    const NAME: &'static str = "low_rank_contract";

    fn check(&self) {
        for Contraction { u, factor, p } in &self.parts {
            p.check_lengths(Self::NAME, [u.len(), self.x.len(), factor.len()]);
        }
    }

    fn multiply_adds(&self) -> usize {
        self.parts.iter().map(|part| part.p.multiply_adds()).sum()
    }

    /// Tokens, ranks of all factors, width.
    fn size(&self) -> [usize; 3] {
        let ranks = self.parts.iter().map(|part| part.p.rank).sum();
        self.parts.first().map_or([0; 3], |part| [part.p.tokens(), ranks, part.p.width])
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        self.parts.iter().map(|part| of.low_rank(&part.p)).max().unwrap_or(0)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        self.parts.iter_mut().map(|part| Output::F32(&mut *part.u)).collect()
    }
}

/// `y += alpha·u M`.
pub struct LowRankExpand<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub u: &'a F32<M>,
    pub factor: &'a F32<M>,
    pub p: LowRank<'a>,
}

impl<M: Memory> Op<M> for LowRankExpand<'_, M> {
    const NAME: &'static str = "low_rank_expand";

    fn check(&self) {
        self.p.check_lengths(Self::NAME, [self.u.len(), self.y.len(), self.factor.len()]);
    }

    fn multiply_adds(&self) -> usize {
        self.p.multiply_adds()
    }

    fn size(&self) -> [usize; 3] {
        self.p.size()
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.low_rank(&self.p)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}

/// `dM += (alpha·u)ᵀ x` for one or more factors, so a device can take small ones together.
pub struct LowRankOuter<'a, M: Memory> {
    pub parts: Vec<OuterProduct<'a, M>>,
    /// As in `product_grad_weight`.
    pub row_starts: &'a [usize],
}

/// The gradient of a factor, and what it is of.
pub struct OuterProduct<'a, M: Memory> {
    pub dfactor: &'a mut F32<M>,
    pub u: &'a F32<M>,
    pub x: &'a F32<M>,
    pub p: LowRank<'a>,
}

impl<'a, M: Memory> LowRankOuter<'a, M> {
    /// With a single factor.
    pub fn one(dfactor: &'a mut F32<M>, u: &'a F32<M>, x: &'a F32<M>, p: LowRank<'a>, row_starts: &'a [usize]) -> Self {
        Self { parts: vec![OuterProduct { dfactor, u, x, p }], row_starts }
    }
}

impl<M: Memory> Op<M> for LowRankOuter<'_, M> {
    const NAME: &'static str = "low_rank_outer";

    fn check(&self) {
        for OuterProduct { dfactor, u, x, p } in &self.parts {
            p.check_lengths(Self::NAME, [u.len(), x.len(), dfactor.len()]);
        }
    }

    fn multiply_adds(&self) -> usize {
        self.parts.iter().map(|part| part.p.multiply_adds()).sum()
    }

    /// Tokens, rank and width of the first.
    fn size(&self) -> [usize; 3] {
        self.parts.first().map_or([0; 3], |part| part.p.size())
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.low_rank_outer(&self.parts.iter().map(|part| part.p).collect::<Vec<_>>())
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        self.parts.iter_mut().map(|part| Output::F32(&mut *part.dfactor)).collect()
    }
}
