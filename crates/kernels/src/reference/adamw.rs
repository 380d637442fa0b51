//! AdamW, the definition (`docs/numerics.md`, "AdamW").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{AdamWTensor, AdamWUpdate};
use isobit_numerics::SoftFma;
use isobit_numerics::adamw;

impl Run<AdamWUpdate<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut AdamWUpdate<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        for AdamWTensor { parameter, m, v, gradient, coefficients } in &mut op.tensors {
            for i in 0..parameter.len() {
                (parameter[i], m[i], v[i]) =
                    adamw::update::<SoftFma>(parameter[i], m[i], v[i], gradient[i], coefficients);
            }
        }
    }
}
