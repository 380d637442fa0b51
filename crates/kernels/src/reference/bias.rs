//! Bias, the definition (`docs/numerics.md`, "Bias").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{BiasBackward, BiasForward, TOKEN_BLOCK, token_blocks};

impl Run<BiasForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut BiasForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let BiasForward { y, bias } = op;
        for (index, y) in y.iter_mut().enumerate() {
            *y += bias[index % bias.len()];
        }
    }
}

impl Run<BiasBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut BiasBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let BiasBackward { dbias, dy, row_starts } = op;
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
}
