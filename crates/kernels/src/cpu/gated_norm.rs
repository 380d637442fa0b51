//! Gated norm (`op/gated_norm.rs`). Parallel over the heads of all tokens for activations, over
//! columns for `dweight`.

use super::CpuMemory;
use super::bias::{COLUMNS, ColumnBlock, sum_columns};
use super::elements::map;
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::{Checked, Run};
use crate::op::{GatedNorm, GatedNormBackward, GatedNormForward};
use crate::{Buffer, Cpu};
use isobit_numerics::Fma;
use isobit_numerics::elementary::{silu, silu_grad};
use isobit_numerics::lanes::{self, LANES, tree_sum};

impl Run<GatedNormForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut GatedNormForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let GatedNormForward { y, inverse, h, z, weight, p } = op;
        let inverse = SharedMut::new(inverse);
        self.pool.run_rows(y, p.width, |tokens, y| {
            let here = tokens.start * p.width..tokens.end * p.width;
            // SAFETY: tokens of different threads do not overlap.
            let inverse = unsafe { inverse.slice(tokens) };
            forward_rows(self.path, y, inverse, &h[here.clone()], &z[here], weight, p);
        });
    }
}

impl Run<GatedNormBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut GatedNormBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let GatedNormBackward { dh, dz, dweight, dy, h, z, inverse, weight, p, row_starts } = op;
        let dz = SharedMut::new(dz);
        self.pool.run_rows(dh, p.width, |tokens, dh| {
            let here = tokens.start * p.width..tokens.end * p.width;
            // SAFETY: tokens of different threads do not overlap.
            let dz = unsafe { dz.slice(here.clone()) };
            let (dy, h, z) = (&dy[here.clone()], &h[here.clone()], &z[here]);
            backward_rows(self.path, dh, dz, dy, (h, z), &inverse[tokens], weight);
        });
        if let Some(dweight) = dweight {
            let add = |sums: &mut [f32], block: &ColumnBlock| weight_block(self.path, sums, dy, (h, z), inverse, block);
            sum_columns(self, dweight, row_starts, add);
        }
    }
}

multiversion! {
    fn forward_rows<F>(y: &mut [f32], inverse: &mut [f32], h: &[f32], z: &[f32], weight: &[f32], p: &GatedNorm) {
        let rows = y.chunks_exact_mut(p.width).zip(h.chunks_exact(p.width)).zip(z.chunks_exact(p.width));
        for (((y, h), z), inverse) in rows.zip(inverse) {
            let mean = lanes::dot::<F>(h, h) / p.width as f32;
            let inv = 1.0 / (mean + p.eps).sqrt();
            *inverse = inv;
            map(y, [h, z, weight], |[h, z, weight]| (weight * (h * inv)) * silu::<F>(z));
        }
    }
}

multiversion! {
    fn backward_rows<F>(
        dh: &mut [f32],
        dz: &mut [f32],
        dy: &[f32],
        hz: (&[f32], &[f32]),
        inverse: &[f32],
        weight: &[f32],
    ) {
        let width = weight.len();
        for (index, inverse) in inverse.iter().enumerate() {
            let (row, inv) = (index * width..(index + 1) * width, *inverse);
            let (dh, dz) = (&mut dh[row.clone()], &mut dz[row.clone()]);
            let (dy, h, z) = (&dy[row.clone()], &hz.0[row.clone()], &hz.1[row]);
            map(dz, [dy, h, z, weight], |[dy, h, z, weight]| (dy * (weight * (h * inv))) * silu_grad::<F>(z));
            // `dh` holds the gradient of the norm's output until its mean is known.
            map(dh, [dy, z, weight], |[dy, z, weight]| (dy * silu::<F>(z)) * weight);
            let mean = normal_dot::<F>(dh, h, inv) / width as f32;
            for (dh, h) in dh.iter_mut().zip(h) {
                *dh = F::fma(-(h * inv), mean, *dh) * inv;
            }
        }
    }
}

/// Lane sum of `fma(g, h·inv, ·)`.
#[inline(always)]
fn normal_dot<F: Fma>(g: &[f32], h: &[f32], inv: f32) -> f32 {
    let mut acc = [0.0; LANES];
    let (g_blocks, g_tail) = g.as_chunks::<LANES>();
    let (h_blocks, h_tail) = h.as_chunks::<LANES>();
    for (g, h) in g_blocks.iter().zip(h_blocks) {
        for lane in 0..LANES {
            acc[lane] = F::fma(g[lane], h[lane] * inv, acc[lane]);
        }
    }
    for ((acc, g), h) in acc.iter_mut().zip(g_tail).zip(h_tail) {
        *acc = F::fma(*g, h * inv, *acc);
    }
    tree_sum(acc)
}

multiversion! {
    fn weight_block<F>(
        dweight: &mut [f32],
        dy: &[f32],
        hz: (&[f32], &[f32]),
        inverse: &[f32],
        block: &ColumnBlock,
    ) {
        let (mut sums, mut terms) = ([0.0f32; COLUMNS], [0.0f32; COLUMNS]);
        let (sums, terms) = (&mut sums[..dweight.len()], &mut terms[..dweight.len()]);
        for t in block.tokens.clone() {
            let (at, inv) = (t * block.width + block.first, inverse[t]);
            let here = at..at + dweight.len();
            let inputs = [&dy[here.clone()], &hz.0[here.clone()], &hz.1[here]];
            map(terms, inputs, |[dy, h, z]| (dy * silu::<F>(z)) * (h * inv));
            for (sum, term) in sums.iter_mut().zip(&*terms) {
                *sum += term;
            }
        }
        for (dweight, sum) in dweight.iter_mut().zip(sums) {
            *dweight += *sum;
        }
    }
}
