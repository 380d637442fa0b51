//! Elementary functions, the definition (`docs/numerics.md`, "Elementary functions").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::Run;
use crate::op::Elementary;
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::Function;

impl Run<Elementary<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut Elementary<'_, ReferenceMemory>, _: &mut Buffer<u8>) {
        apply(op.y, op.x, op.function);
    }
}

pub(super) fn apply(y: &mut [f32], x: &[f32], function: Function) {
    for index in 0..y.len() {
        y[index] = function.apply::<SoftFma>(x[index]);
    }
}
