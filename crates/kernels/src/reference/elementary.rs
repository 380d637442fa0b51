//! Elementary functions, the definition (`docs/numerics.md`, "Elementary functions").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::Elementary;
use isobit_numerics::SoftFma;

impl Run<Elementary<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut Elementary<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let Elementary { y, x, .. } = op;
        let function = op.function;
        for index in 0..y.len() {
            y[index] = function.apply::<SoftFma>(x[index]);
        }
    }
}
