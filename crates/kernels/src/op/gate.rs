//! Sigmoid gates (`docs/numerics.md`, "Gates"): elementwise for attention outputs, one per token
//! for a shared expert.
//!
//! Forward: `y = x·s` with `s = sigmoid(g)`. Backward: `dx = dy·s` and `dg = (dy·x)·(s·(1 − s))`;
//! with one gate per token `dg = D·(s·(1 − s))`, where `D` is the lane sum over the width of
//! `fma(dy, x, ·)`. Every operation is rounded; `s` is recomputed in the backward pass.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, lengths};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gate {
    pub tokens: usize,
    pub width: usize,
    /// `g` is `[tokens]` instead of `[tokens, width]`.
    pub per_token: bool,
}

impl Gate {
    /// Elements of `g`.
    pub fn gates(&self) -> usize {
        if self.per_token { self.tokens } else { self.tokens * self.width }
    }
}

/// `y = x·sigmoid(g)`.
pub struct GateForward<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub x: &'a F32<M>,
    pub g: &'a F32<M>,
    pub p: Gate,
}

impl<M: Memory> Op<M> for GateForward<'_, M> {
    const NAME: &'static str = "gate_forward";

    fn check(&self) {
        let p = &self.p;
        let (length, gates) = (p.tokens * p.width, p.gates());
        lengths(Self::NAME, &[("y", self.y.len(), length), ("x", self.x.len(), length), ("g", self.g.len(), gates)]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}

/// Gradients of `x` and `g`.
pub struct GateBackward<'a, M: Memory> {
    pub dx: &'a mut F32<M>,
    pub dg: &'a mut F32<M>,
    pub dy: &'a F32<M>,
    pub x: &'a F32<M>,
    pub g: &'a F32<M>,
    pub p: Gate,
}

impl<M: Memory> Op<M> for GateBackward<'_, M> {
    const NAME: &'static str = "gate_backward";

    fn check(&self) {
        let p = &self.p;
        let (length, gates) = (p.tokens * p.width, p.gates());
        lengths(
            Self::NAME,
            &[
                ("dx", self.dx.len(), length),
                ("dg", self.dg.len(), gates),
                ("dy", self.dy.len(), length),
                ("x", self.x.len(), length),
                ("g", self.g.len(), gates),
            ],
        );
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dx), Output::F32(self.dg)]
    }
}
