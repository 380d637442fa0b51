//! RMS norm, the definition (`docs/numerics.md`, "RMS norm").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{RmsNorm, RmsNormBackward, RmsNormForward, TOKEN_BLOCK, token_blocks};
use isobit_numerics::fma::fma;
use isobit_numerics::lanes::{LANES, for_lanes, tree_sum};

fn factor(weight: f32, p: &RmsNorm) -> f32 {
    if p.zero_centred { 1.0 + weight } else { weight }
}

impl Run<RmsNormForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut RmsNormForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let RmsNormForward { y, inverse, x, weight, p } = op;
        for t in 0..p.tokens {
            let x = &x[t * p.width..][..p.width];
            let mut acc = [0.0; LANES];
            for_lanes(&mut acc, p.width, |acc, c| fma(x[c], x[c], acc));
            let mean = tree_sum(acc) / p.width as f32;
            inverse[t] = 1.0 / (mean + p.eps).sqrt();
            for c in 0..p.width {
                y[t * p.width + c] = (x[c] * inverse[t]) * factor(weight[c], p);
            }
        }
    }
}

impl Run<RmsNormBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut RmsNormBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let RmsNormBackward { dx, dweight, dy, x, inverse, weight, p, row_starts } = op;
        for t in 0..p.tokens {
            let at = t * p.width;
            let normal = |c: usize| x[at + c] * inverse[t];
            let grad = |c: usize| dy[at + c] * factor(weight[c], p);
            let mut acc = [0.0; LANES];
            for_lanes(&mut acc, p.width, |acc, c| fma(grad(c), normal(c), acc));
            let mean = tree_sum(acc) / p.width as f32;
            for c in 0..p.width {
                let value = fma(-normal(c), mean, grad(c)) * inverse[t];
                let dx = &mut dx[at + c];
                *dx = if p.accumulate { *dx + value } else { value };
            }
        }
        let Some(dweight) = dweight else { return };
        for block in token_blocks(row_starts, TOKEN_BLOCK) {
            for c in 0..p.width {
                let mut acc = 0.0;
                for t in block.clone() {
                    acc += dy[t * p.width + c] * (x[t * p.width + c] * inverse[t]);
                }
                dweight[c] += acc;
            }
        }
    }
}
