//! Bias, the definition (`docs/numerics.md`, "Bias").

use crate::op::{TOKEN_BLOCK, token_blocks};

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
