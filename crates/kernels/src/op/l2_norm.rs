//! L2 norm (`docs/numerics.md`, "L2 norm") of queries and keys of the gated delta rule. Here a
//! "token" is one head of a token.
//!
//! Forward: `inv = rsqrt(S + eps)` with `S` the lane sum of `fma(x, x, ·)`, three roundings
//! (addition, root, division); `y = (x·inv)·factor`. `inv` is kept. Backward: `n = x·inv`,
//! `g = dy·factor`, `C` = lane sum of `fma(g, n, ·)`, `dx = fma(−n, C, g)·inv`.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, lengths};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct L2Norm {
    /// Heads of all tokens.
    pub tokens: usize,
    pub width: usize,
    pub eps: f32,
    /// `1/√width` for queries, 1 for keys.
    pub factor: f32,
}

/// `y = (x·inverse)·factor`.
pub struct L2NormForward<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    /// One per token, for the backward pass.
    pub inverse: &'a mut F32<M>,
    pub x: &'a F32<M>,
    pub p: L2Norm,
}

impl<M: Memory> Op<M> for L2NormForward<'_, M> {
    const NAME: &'static str = "l2_norm_forward";

    fn check(&self) {
        let p = &self.p;
        let length = p.tokens * p.width;
        lengths(
            Self::NAME,
            &[("y", self.y.len(), length), ("inverse", self.inverse.len(), p.tokens), ("x", self.x.len(), length)],
        );
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y), Output::Kept(self.inverse)]
    }
}

/// `dx`.
pub struct L2NormBackward<'a, M: Memory> {
    pub dx: &'a mut F32<M>,
    pub dy: &'a F32<M>,
    pub x: &'a F32<M>,
    pub inverse: &'a F32<M>,
    pub p: L2Norm,
}

impl<M: Memory> Op<M> for L2NormBackward<'_, M> {
    const NAME: &'static str = "l2_norm_backward";

    fn check(&self) {
        let p = &self.p;
        let length = p.tokens * p.width;
        lengths(
            Self::NAME,
            &[
                ("dx", self.dx.len(), length),
                ("dy", self.dy.len(), length),
                ("x", self.x.len(), length),
                ("inverse", self.inverse.len(), p.tokens),
            ],
        );
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dx)]
    }
}
