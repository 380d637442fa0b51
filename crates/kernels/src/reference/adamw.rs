//! AdamW, the definition (`docs/numerics.md`, "AdamW").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::Run;
use crate::op::AdamWUpdate;
use isobit_numerics::SoftFma;
use isobit_numerics::adamw::{self, Coefficients};

impl Run<AdamWUpdate<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut AdamWUpdate<'_, ReferenceMemory>, _: &mut Buffer<u8>) {
        update(op.parameter, op.m, op.v, op.gradient, &op.c);
    }
}

pub(super) fn update(parameter: &mut [f32], m: &mut [f32], v: &mut [f32], gradient: &[f32], c: &Coefficients) {
    for i in 0..parameter.len() {
        (parameter[i], m[i], v[i]) = adamw::update::<SoftFma>(parameter[i], m[i], v[i], gradient[i], c);
    }
}
