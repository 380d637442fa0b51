//! GeGLU, the definition (`docs/numerics.md`, "GeGLU").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{GegluBackward, GegluForward};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::{gelu, gelu_grad};

impl Run<GegluForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut GegluForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        for index in 0..op.h.len() {
            op.h[index] = gelu::<SoftFma>(op.gate[index]) * op.up[index];
        }
    }
}

impl Run<GegluBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut GegluBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        for index in 0..op.dh.len() {
            let (dh, gate) = (op.dh[index], op.gate[index]);
            op.dup[index] = dh * gelu::<SoftFma>(gate);
            op.dgate[index] = (dh * op.up[index]) * gelu_grad::<SoftFma>(gate);
        }
    }
}
