//! Gated norm, the definition (`docs/numerics.md`, "Gated norm").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{GatedNormBackward, GatedNormForward, TOKEN_BLOCK, token_blocks};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::{silu, silu_grad};
use isobit_numerics::fma::fma;
use isobit_numerics::lanes::{LANES, dot, for_lanes, tree_sum};

impl Run<GatedNormForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut GatedNormForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let GatedNormForward { y, inverse, h, z, weight, p } = op;
        for t in 0..p.tokens {
            let at = t * p.width;
            let row = &h[at..][..p.width];
            let mean = dot::<SoftFma>(row, row) / p.width as f32;
            inverse[t] = 1.0 / (mean + p.eps).sqrt();
            for c in 0..p.width {
                y[at + c] = (weight[c] * (row[c] * inverse[t])) * silu::<SoftFma>(z[at + c]);
            }
        }
    }
}

impl Run<GatedNormBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut GatedNormBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let GatedNormBackward { dh, dz, dweight, dy, h, z, inverse, weight, p, row_starts } = op;
        let normal = |t: usize, c: usize| h[t * p.width + c] * inverse[t];
        let gated = |t: usize, c: usize| dy[t * p.width + c] * silu::<SoftFma>(z[t * p.width + c]);
        for t in 0..p.tokens {
            let grad = |c: usize| gated(t, c) * weight[c];
            let mut acc = [0.0; LANES];
            for_lanes(&mut acc, p.width, |acc, c| fma(grad(c), normal(t, c), acc));
            let mean = tree_sum(acc) / p.width as f32;
            for c in 0..p.width {
                let at = t * p.width + c;
                dh[at] = fma(-normal(t, c), mean, grad(c)) * inverse[t];
                dz[at] = (dy[at] * (weight[c] * normal(t, c))) * silu_grad::<SoftFma>(z[at]);
            }
        }
        let Some(dweight) = dweight else { return };
        for block in token_blocks(row_starts, TOKEN_BLOCK) {
            for c in 0..p.width {
                let mut acc = 0.0;
                for t in block.clone() {
                    acc += gated(t, c) * normal(t, c);
                }
                dweight[c] += acc;
            }
        }
    }
}
