//! AdamW (`docs/numerics.md`, "AdamW"): `isobit_numerics::adamw::update` for every element, in
//! place.
//!
//! No element depends on another, so any partition of the tensors gives the same bits. One op
//! updates all tensors of a step: a device may need a single launch for them.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, lengths};
use isobit_numerics::adamw::Coefficients;

/// One update of parameters and their moments.
pub struct AdamWUpdate<'a, M: Memory> {
    pub tensors: Vec<AdamWTensor<'a, M>>,
}

/// One parameter with its moments and its gradient.
pub struct AdamWTensor<'a, M: Memory> {
    pub parameter: &'a mut F32<M>,
    pub m: &'a mut F32<M>,
    pub v: &'a mut F32<M>,
    pub gradient: &'a F32<M>,
    pub coefficients: Coefficients,
}

impl<M: Memory> Op<M> for AdamWUpdate<'_, M> {
    const NAME: &'static str = "adamw";

    fn check(&self) {
        for AdamWTensor { parameter, m, v, gradient, .. } in &self.tensors {
            let length = parameter.len();
            lengths(
                Self::NAME,
                &[("m", m.len(), length), ("v", v.len(), length), ("gradient", gradient.len(), length)],
            );
        }
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        let tensors = self.tensors.iter_mut();
        tensors.flat_map(|of| [Output::F32(of.parameter), Output::F32(of.m), Output::F32(of.v)]).collect()
    }
}
