//! Multiplication by a number (`docs/numerics.md`, "Residual"): `x = x·factor`, element by element,
//! one rounding. Used to clip the gradients of all tensors at once.

use crate::backend::{F32, Memory};
use crate::op::{Op, Output};

/// `x = x·factor` for every tensor.
pub struct Scale<'a, M: Memory> {
    pub tensors: Vec<&'a mut F32<M>>,
    pub factor: f32,
}

impl<M: Memory> Op<M> for Scale<'_, M> {
    const NAME: &'static str = "scale";

    fn check(&self) {}

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        self.tensors.iter_mut().map(|x| Output::F32(&mut **x)).collect()
    }
}
