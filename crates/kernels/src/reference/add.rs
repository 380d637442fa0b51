//! Sum of two tensors, the definition (`docs/numerics.md`, "Residual").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::Add;

impl Run<Add<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut Add<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        for index in 0..op.y.len() {
            op.y[index] = op.a[index] + op.b[index];
        }
    }
}
