//! RMS norm (`docs/numerics.md`, "RMS norm").
//!
//! Forward, per token: `ss` = lane sum of `fma(x, x, ·)`; `inv = 1 / sqrt(ss / f32(width) + eps)`,
//! each step rounded; `y = (x·inv)·w`, with `w = 1 + weight` when zero-centred. `inv` is kept for
//! the backward pass.
//!
//! Backward: `n = x·inv`, `g = dy·w`, `c = (lane sum of fma(g, n, ·)) / f32(width)`,
//! `dx = fma(−n, c, g)·inv`, added to `dx` when accumulating; `dweight` accumulates the sum over
//! tokens of `dy·n` (product rounded, then added).

use crate::backend::{F32, Length, Memory, Workspaces};
use crate::op::{Op, Output, norm_lengths, norm_weight_gradient};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    pub tokens: usize,
    pub width: usize,
    pub eps: f32,
    pub zero_centred: bool,
    /// Backward only: add to `dx`.
    pub accumulate: bool,
}

/// `y = (x·inverse)·weight`.
pub struct RmsNormForward<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    /// One per token, for the backward pass.
    pub inverse: &'a mut F32<M>,
    pub x: &'a F32<M>,
    pub weight: &'a F32<M>,
    pub p: RmsNorm,
}

impl<M: Memory> Op<M> for RmsNormForward<'_, M> {
    const NAME: &'static str = "rms_norm_forward";

    fn check(&self) {
        let shape = (self.p.tokens, self.p.width);
        let whole = [("y", self.y.len()), ("x", self.x.len())];
        norm_lengths(Self::NAME, shape, &whole, self.inverse.len(), self.weight.len());
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y), Output::Kept(self.inverse)]
    }
}

/// `dx`, and `dweight` if requested.
pub struct RmsNormBackward<'a, M: Memory> {
    pub dx: &'a mut F32<M>,
    pub dweight: Option<&'a mut F32<M>>,
    pub dy: &'a F32<M>,
    pub x: &'a F32<M>,
    pub inverse: &'a F32<M>,
    pub weight: &'a F32<M>,
    pub p: RmsNorm,
    pub row_starts: &'a [usize],
}

impl<M: Memory> Op<M> for RmsNormBackward<'_, M> {
    const NAME: &'static str = "rms_norm_backward";

    fn check(&self) {
        let shape = (self.p.tokens, self.p.width);
        let whole = [("dx", self.dx.len()), ("dy", self.dy.len()), ("x", self.x.len())];
        norm_lengths(Self::NAME, shape, &whole, self.inverse.len(), self.weight.len());
        let dweight = self.dweight.as_ref().map(|dweight| dweight.len());
        norm_weight_gradient(Self::NAME, shape, dweight, self.row_starts);
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        self.dweight.as_ref().map_or(0, |_| of.token_sums(self.row_starts, self.p.width))
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        let mut outputs = vec![Output::F32(self.dx)];
        outputs.extend(self.dweight.as_deref_mut().map(Output::F32));
        outputs
    }
}
