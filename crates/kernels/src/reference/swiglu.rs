//! SwiGLU, the definition (`docs/numerics.md`, "SwiGLU").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{SwigluBackward, SwigluForward, SwigluPairsBackward, SwigluPairsForward};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::{silu, silu_grad};

impl Run<SwigluForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut SwigluForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        forward(op.h, op.gate, op.up);
    }
}

impl Run<SwigluBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut SwigluBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        backward(op.dgate, op.dup, op.dh, op.gate, op.up);
    }
}

fn forward(h: &mut [f32], gate: &[f32], up: &[f32]) {
    for index in 0..h.len() {
        h[index] = silu::<SoftFma>(gate[index]) * up[index];
    }
}

fn backward(dgate: &mut [f32], dup: &mut [f32], dh: &[f32], gate: &[f32], up: &[f32]) {
    for index in 0..dh.len() {
        dup[index] = dh[index] * silu::<SoftFma>(gate[index]);
        dgate[index] = (dh[index] * up[index]) * silu_grad::<SoftFma>(gate[index]);
    }
}

impl Run<SwigluPairsForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut SwigluPairsForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let SwigluPairsForward { h, both, .. } = op;
        let width = op.width;
        for (row, h) in h.chunks_exact_mut(width.max(1)).enumerate() {
            let (gate, up) = both[2 * row * width..][..2 * width].split_at(width);
            forward(h, gate, up);
        }
    }
}

impl Run<SwigluPairsBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut SwigluPairsBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let SwigluPairsBackward { dboth, dh, both, .. } = op;
        let width = op.width;
        for (row, dboth) in dboth.chunks_exact_mut(2 * width.max(1)).enumerate() {
            let (dgate, dup) = dboth.split_at_mut(width);
            let (gate, up) = both[2 * row * width..][..2 * width].split_at(width);
            backward(dgate, dup, &dh[row * width..][..width], gate, up);
        }
    }
}
