//! Bias, the definition (`docs/numerics.md`, "Bias").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::Run;
use crate::op::{BiasBackward, BiasForward, TOKEN_BLOCK, token_blocks};

impl Run<BiasForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut BiasForward<'_, ReferenceMemory>, _: &mut Buffer<u8>) {
        forward(op.y, op.bias);
    }
}

impl Run<BiasBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut BiasBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>) {
        backward(op.dbias, op.dy, op.row_starts);
    }
}

pub(super) fn forward(y: &mut [f32], bias: &[f32]) {
    for (index, y) in y.iter_mut().enumerate() {
        *y += bias[index % bias.len()];
    }
}

pub(super) fn backward(dbias: &mut [f32], dy: &[f32], row_starts: &[usize]) {
    let width = dbias.len();
    for block in token_blocks(row_starts, TOKEN_BLOCK) {
        for n in 0..width {
            let mut acc = 0.0;
            for t in block.clone() {
                acc += dy[t * width + n];
            }
            dbias[n] += acc;
        }
    }
}
