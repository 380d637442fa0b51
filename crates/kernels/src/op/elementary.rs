//! Elementary functions as an op (`docs/numerics.md`, "Elementary functions"): `y = f(x)`, element
//! by element.
//!
//! The op exists so that `doctor` and the conformance suite can sweep a device's functions; in
//! training, models use the fused ops.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, lengths};
use isobit_numerics::elementary::Function;

/// `y = function(x)`.
pub struct Elementary<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub x: &'a F32<M>,
    pub function: Function,
}

impl<M: Memory> Op<M> for Elementary<'_, M> {
    const NAME: &'static str = "elementary";

    fn check(&self) {
        lengths(Self::NAME, &[("x", self.x.len(), self.y.len())]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}
