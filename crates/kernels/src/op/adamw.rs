//! AdamW (`docs/numerics.md`, "AdamW"): `isobit_numerics::adamw::update` for every element, in place.
//!
//! No element depends on another, so any partition of the tensor gives the same bits.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, lengths};
use isobit_numerics::adamw::Coefficients;

/// One update of a parameter and its moments.
pub struct AdamWUpdate<'a, M: Memory> {
    pub parameter: &'a mut F32<M>,
    pub m: &'a mut F32<M>,
    pub v: &'a mut F32<M>,
    pub gradient: &'a F32<M>,
    pub c: Coefficients,
}

impl<M: Memory> Op<M> for AdamWUpdate<'_, M> {
    const NAME: &'static str = "adamw";

    fn check(&self) {
        let length = self.parameter.len();
        lengths(
            Self::NAME,
            &[("m", self.m.len(), length), ("v", self.v.len(), length), ("gradient", self.gradient.len(), length)],
        );
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.parameter), Output::F32(self.m), Output::F32(self.v)]
    }
}
