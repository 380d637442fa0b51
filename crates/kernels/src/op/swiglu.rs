//! SwiGLU (`docs/numerics.md`, "SwiGLU"): the gated activation of feed-forward layers, element by
//! element.
//!
//! Forward: `h = silu(gate)·up`. Backward: `dup = dh·silu(gate)`,
//! `dgate = (dh·up)·silu_grad(gate)`. Each product is rounded; `silu` and `silu_grad` are the
//! elementary functions and are recomputed in the backward pass.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, lengths};

/// `h = silu(gate)·up`.
pub struct SwigluForward<'a, M: Memory> {
    pub h: &'a mut F32<M>,
    pub gate: &'a F32<M>,
    pub up: &'a F32<M>,
}

impl<M: Memory> Op<M> for SwigluForward<'_, M> {
    const NAME: &'static str = "swiglu_forward";

    fn check(&self) {
        let length = self.h.len();
        lengths(Self::NAME, &[("gate", self.gate.len(), length), ("up", self.up.len(), length)]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.h)]
    }
}

/// Gradients of both factors.
pub struct SwigluBackward<'a, M: Memory> {
    pub dgate: &'a mut F32<M>,
    pub dup: &'a mut F32<M>,
    pub dh: &'a F32<M>,
    pub gate: &'a F32<M>,
    pub up: &'a F32<M>,
}

impl<M: Memory> Op<M> for SwigluBackward<'_, M> {
    const NAME: &'static str = "swiglu_backward";

    fn check(&self) {
        let length = self.dh.len();
        lengths(
            Self::NAME,
            &[
                ("dgate", self.dgate.len(), length),
                ("dup", self.dup.len(), length),
                ("gate", self.gate.len(), length),
                ("up", self.up.len(), length),
            ],
        );
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dgate), Output::F32(self.dup)]
    }
}

/// `swiglu_forward` of gate and up side by side: `both` is `[rows, 2·width]`, gate before up.
pub struct SwigluPairsForward<'a, M: Memory> {
    pub h: &'a mut F32<M>,
    pub both: &'a F32<M>,
    pub width: usize,
}

impl<M: Memory> Op<M> for SwigluPairsForward<'_, M> {
    const NAME: &'static str = "swiglu_pairs_forward";

    fn check(&self) {
        lengths(Self::NAME, &[("both", self.both.len(), 2 * self.h.len())]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.h)]
    }
}

/// `swiglu_backward` of `both`, laid out as in [`SwigluPairsForward`].
pub struct SwigluPairsBackward<'a, M: Memory> {
    pub dboth: &'a mut F32<M>,
    pub dh: &'a F32<M>,
    pub both: &'a F32<M>,
    pub width: usize,
}

impl<M: Memory> Op<M> for SwigluPairsBackward<'_, M> {
    const NAME: &'static str = "swiglu_pairs_backward";

    fn check(&self) {
        let length = 2 * self.dh.len();
        lengths(Self::NAME, &[("dboth", self.dboth.len(), length), ("both", self.both.len(), length)]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dboth)]
    }
}
