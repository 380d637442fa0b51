//! L2 norm (`docs/numerics.md`, "L2 norm") of queries and keys of the gated delta rule. What is a token here is one head of a token.
//!
//! Forward: `inv = rsqrt(S + eps)` with `S` the lane sum of `fma(x, x, ·)`, three roundings (addition, root, division);
//! `y = (x·inv)·factor`. `inv` is kept. Backward: `n = x·inv`, `g = dy·factor`, `C` = lane sum of `fma(g, n, ·)`,
//! `dx = fma(−n, C, g)·inv`.

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct L2Norm {
    /// Heads of all tokens.
    pub tokens: usize,
    pub width: usize,
    pub eps: f32,
    /// `1/√width` for queries, 1 for keys.
    pub factor: f32,
}
