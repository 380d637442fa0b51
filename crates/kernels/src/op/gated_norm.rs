//! Gated RMS norm (`docs/numerics.md`, "Gated norm") behind the gated delta rule. What is a token here is one head of a token; the
//! weight is shared by the heads, and rows of data count heads as well (row starts times the number of heads).
//!
//! Forward: `inv = 1 / sqrt(S / f32(width) + eps)`, `S` the lane sum of `fma(h, h, ·)`; `y = (weight·(h·inv))·silu(z)`. `inv` is kept.
//!
//! Backward: `n = h·inv`, `d = dy·silu(z)`, `g = d·weight`, `c = (lane sum of fma(g, n, ·)) / f32(width)`; `dh = fma(−n, c, g)·inv`;
//! `dz = (dy·(weight·n))·silu_grad(z)`; `dweight` gets the sum over tokens (heads) of `d·n`, the product rounded, then added.

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedNorm {
    /// Heads of all tokens.
    pub tokens: usize,
    pub width: usize,
    pub eps: f32,
}
