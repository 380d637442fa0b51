//! Multiplication by a number, the definition (`docs/numerics.md`, "Residual").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::Scale;

impl Run<Scale<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut Scale<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        for x in op.tensors.iter_mut().flat_map(|tensor| tensor.iter_mut()) {
            *x *= op.factor;
        }
    }
}
