//! GeGLU (`docs/numerics.md`, "GeGLU"): the gated activation of MLPs that use GELU, element by
//! element.
//!
//! Forward: `h = gelu(gate)·up`. Backward: `dup = dh·gelu(gate)`,
//! `dgate = (dh·up)·gelu_grad(gate)`. Each product is rounded; `gelu` and `gelu_grad` are
//! recomputed in the backward pass.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, lengths};

/// `h = gelu(gate)·up`.
pub struct GegluForward<'a, M: Memory> {
    pub h: &'a mut F32<M>,
    pub gate: &'a F32<M>,
    pub up: &'a F32<M>,
}

impl<M: Memory> Op<M> for GegluForward<'_, M> {
    const NAME: &'static str = "geglu_forward";

    fn check(&self) {
        let length = self.h.len();
        lengths(Self::NAME, &[("gate", self.gate.len(), length), ("up", self.up.len(), length)]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.h)]
    }
}

/// Gradients of both factors.
pub struct GegluBackward<'a, M: Memory> {
    pub dgate: &'a mut F32<M>,
    pub dup: &'a mut F32<M>,
    pub dh: &'a F32<M>,
    pub gate: &'a F32<M>,
    pub up: &'a F32<M>,
}

impl<M: Memory> Op<M> for GegluBackward<'_, M> {
    const NAME: &'static str = "geglu_backward";

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
