//! RMS norm (`docs/numerics.md`, "RMS norm").
//!
//! Forward, per token: `ss` = lane sum of `fma(x, x, ·)`; `inv = 1 / sqrt(ss / f32(width) + eps)`, each step rounded;
//! `y = (x·inv)·w`, with `w = 1 + weight` when zero-centred. `inv` is kept for the backward pass.
//!
//! Backward: `n = x·inv`, `g = dy·w`, `c = (lane sum of fma(g, n, ·)) / f32(width)`, `dx = fma(−n, c, g)·inv`, added to `dx`
//! when accumulating; `dweight` gets the sum over tokens of `dy·n` (product rounded, then added).

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    pub tokens: usize,
    pub width: usize,
    pub eps: f32,
    pub zero_centred: bool,
    /// Backward only: add to what `dx` holds.
    pub accumulate: bool,
}
