//! Multiplication by a number (`docs/numerics.md`, "Residual"): `x = x·factor`, element by element, one rounding. It
//! also serves gradient clipping.

use crate::backend::{F32, Memory};
use crate::op::{Op, Output};

/// `x = x·factor`.
pub struct Scale<'a, M: Memory> {
    pub x: &'a mut F32<M>,
    pub factor: f32,
}

impl<M: Memory> Op<M> for Scale<'_, M> {
    const NAME: &'static str = "scale";

    fn check(&self) {}

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.x)]
    }
}
