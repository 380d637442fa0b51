//! Thin products (`docs/numerics.md`, "Thin products"): float32 products with a rank of at most 64 on one side.
//!
//! A factor `M` joins a long axis (`width`) to a short one (`rank`). With `x[t, width]` and `u[t, rank]`:
//! - contract `u[t, j] = Σ_l x[t, l]·M[j, l]`: a lane sum of fused multiply-adds over `l`;
//! - expand `y[t, l] = fma(alpha, Σ_j u[t, j]·M[j, l], y[t, l])`: the sum is an FMA chain from zero in ascending `j`;
//! - outer `dM[j, l] += Σ_t (alpha·u[t, j])·x[t, l]`: a sum over tokens; `alpha·u` is rounded first.

/// Largest rank of a thin product.
pub const RANK_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thin {
    pub tokens: usize,
    pub rank: usize,
    pub width: usize,
    pub layout: Layout,
    /// Scale of `expand` and `outer`; `contract` ignores it.
    pub alpha: f32,
}

/// How the factor lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `[rank, width]`, as LoRA's A.
    RankMajor,
    /// `[width, rank]`, as LoRA's B.
    WidthMajor,
}

impl Thin {
    /// Where factor element `(j, l)` lies.
    #[inline(always)]
    pub fn at(&self, j: usize, l: usize) -> usize {
        match self.layout {
            Layout::RankMajor => j * self.width + l,
            Layout::WidthMajor => l * self.rank + j,
        }
    }
}
