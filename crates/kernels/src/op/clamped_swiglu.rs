//! Clamped SwiGLU (`docs/numerics.md`, "Clamped SwiGLU"): the gated activation of gpt-oss' experts,
//! element by element. Gate and up alternate in `both`: element `i` of `h` has its gate at `2i` and
//! its up at `2i + 1`.
//!
//! Forward, with `g = min(gate, limit)`, `u = up` limited to `±limit` and `v = alpha·g`:
//! `h = (u + 1)·(g·sigmoid(v))`. Backward, with `s = sigmoid(v)`: `dup = dh·(g·s)`,
//! `dgate = (dh·(u + 1))·fma(v, s·sigmoid(−v), s)`; where a number was limited, its gradient is
//! `+0`. Each operation is rounded; everything is computed again in the backward pass.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, lengths};
use isobit_numerics::elementary::ClampedSwiglu;

/// `h` of the pairs of gate and up.
pub struct ClampedSwigluForward<'a, M: Memory> {
    pub h: &'a mut F32<M>,
    pub both: &'a F32<M>,
    pub p: ClampedSwiglu,
}

impl<M: Memory> Op<M> for ClampedSwigluForward<'_, M> {
    const NAME: &'static str = "clamped_swiglu_forward";

    fn check(&self) {
        check(self.p);
        lengths(Self::NAME, &[("both", self.both.len(), 2 * self.h.len())]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.h)]
    }
}

/// The gradient of `both`, laid out like it.
pub struct ClampedSwigluBackward<'a, M: Memory> {
    pub dboth: &'a mut F32<M>,
    pub dh: &'a F32<M>,
    pub both: &'a F32<M>,
    pub p: ClampedSwiglu,
}

impl<M: Memory> Op<M> for ClampedSwigluBackward<'_, M> {
    const NAME: &'static str = "clamped_swiglu_backward";

    fn check(&self) {
        check(self.p);
        let length = 2 * self.dh.len();
        lengths(Self::NAME, &[("dboth", self.dboth.len(), length), ("both", self.both.len(), length)]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dboth)]
    }
}

fn check(p: ClampedSwiglu) {
    assert!(p.limit > 0.0 && p.alpha.is_finite(), "a limit above zero and a finite factor, not {p:?}");
}
