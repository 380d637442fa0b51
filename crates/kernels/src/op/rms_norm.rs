//! RMS norm (`docs/numerics.md`, "RMS norm").
//!
//! Forward, per token: `ss` = lane sum of `fma(x, x, ·)`; `inv = 1 / sqrt(ss / f32(width) + eps)`,
//! each step rounded; `y = (x·inv)·w`, with `w = 1 + weight` when zero-centred. `inv` is kept for
//! the backward pass.
//!
//! Backward: `n = x·inv`, `g = dy·w`, `c = (lane sum of fma(g, n, ·)) / f32(width)`,
//! `dx = fma(−n, c, g)·inv`, added to `dx` when accumulating; `dweight` accumulates the sum over
//! tokens of `dy·n` (product rounded, then added).

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, end, lengths};

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
        let p = &self.p;
        let length = p.tokens * p.width;
        lengths(
            Self::NAME,
            &[
                ("y", self.y.len(), length),
                ("inverse", self.inverse.len(), p.tokens),
                ("x", self.x.len(), length),
                ("weight", self.weight.len(), p.width),
            ],
        );
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
        let p = &self.p;
        let length = p.tokens * p.width;
        lengths(
            Self::NAME,
            &[
                ("dx", self.dx.len(), length),
                ("dy", self.dy.len(), length),
                ("x", self.x.len(), length),
                ("inverse", self.inverse.len(), p.tokens),
                ("weight", self.weight.len(), p.width),
            ],
        );
        if let Some(dweight) = &self.dweight {
            lengths(Self::NAME, &[("dweight", dweight.len(), p.width), ("row_starts", end(self.row_starts), p.tokens)]);
        }
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        let mut outputs = vec![Output::F32(self.dx)];
        outputs.extend(self.dweight.as_deref_mut().map(Output::F32));
        outputs
    }
}
