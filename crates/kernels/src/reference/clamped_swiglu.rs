//! Clamped SwiGLU, the definition (`docs/numerics.md`, "Clamped SwiGLU").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{ClampedSwigluBackward, ClampedSwigluForward};
use isobit_numerics::SoftFma;

impl Run<ClampedSwigluForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut ClampedSwigluForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        for index in 0..op.h.len() {
            op.h[index] = op.p.apply::<SoftFma>(op.both[2 * index], op.both[2 * index + 1]);
        }
    }
}

impl Run<ClampedSwigluBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut ClampedSwigluBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        for index in 0..op.dh.len() {
            let (gate, up) = (op.both[2 * index], op.both[2 * index + 1]);
            let (dgate, dup) = op.p.gradients::<SoftFma>(op.dh[index], gate, up);
            op.dboth[2 * index] = dgate;
            op.dboth[2 * index + 1] = dup;
        }
    }
}
