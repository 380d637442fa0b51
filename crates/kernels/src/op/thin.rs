//! Thin products (`docs/numerics.md`, "Thin products"): float32 products with a rank of at most 64 on one side.
//!
//! A factor `M` joins a long axis (`width`) to a short one (`rank`). With `x[t, width]` and `u[t, rank]`:
//! - contract `u[t, j] = Σ_l x[t, l]·M[j, l]`: a lane sum of fused multiply-adds over `l`;
//! - expand `y[t, l] = fma(alpha, Σ_j u[t, j]·M[j, l], y[t, l])`: the sum is an FMA chain from zero in ascending `j`;
//! - outer `dM[j, l] += Σ_t (alpha·u[t, j])·x[t, l]`: a sum over tokens; `alpha·u` is rounded first.

/// Largest rank of a thin product.
pub const RANK_MAX: usize = 64;

/// A product or a group of products with one shape of factor: tokens `segments[e]..segments[e+1]` meet factor `e`. A plain product has
/// the single segment `[0, tokens]`; adapters of experts have one each, empty ones allowed. Factors lie one after another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thin<'a> {
    pub segments: &'a [usize],
    pub rank: usize,
    pub width: usize,
    pub layout: Layout,
    /// Scale of `expand` and `outer`; `contract` ignores it.
    pub alpha: f32,
}

/// How a factor lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `[rank, width]`, as LoRA's A.
    RankMajor,
    /// `[width, rank]`, as LoRA's B.
    WidthMajor,
}

impl Thin<'_> {
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

    /// Where factor element `(j, l)` lies.
    #[inline(always)]
    pub fn at(&self, j: usize, l: usize) -> usize {
        match self.layout {
            Layout::RankMajor => j * self.width + l,
            Layout::WidthMajor => l * self.rank + j,
        }
    }

    /// Ends the program unless the rank is allowed and the segments ascend from 0.
    pub fn check(&self) {
        assert!((1..=RANK_MAX).contains(&self.rank), "rank {} is outside 1..={RANK_MAX}", self.rank);
        let ascend = self.segments.first() == Some(&0) && self.segments.is_sorted();
        assert!(ascend && self.segments.len() > 1, "segments ascend from 0");
    }

    /// Blocks of a sum over tokens, each with its factor. `row_starts` has its ends at segment borders too.
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
