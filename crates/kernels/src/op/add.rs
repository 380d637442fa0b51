//! Sum of two tensors (`docs/numerics.md`, "Residual"): `y = a + b`, element by element, one
//! rounding.
//!
//! The gradient of both operands is `dy` itself, so there is no backward op.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, lengths};

/// `y = a + b`; the gradient of both is `dy`.
pub struct Add<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub a: &'a F32<M>,
    pub b: &'a F32<M>,
}

impl<M: Memory> Op<M> for Add<'_, M> {
    const NAME: &'static str = "add";

    fn check(&self) {
        let length = self.y.len();
        lengths(Self::NAME, &[("a", self.a.len(), length), ("b", self.b.len(), length)]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}
