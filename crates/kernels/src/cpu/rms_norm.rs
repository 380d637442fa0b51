//! RMS norm (`op/rms_norm.rs`). Parallel over tokens for `y` and `dx`, over columns for `dweight`:
//! two passes over the gradient instead of partial sums in memory.

use super::CpuMemory;
use super::bias::{COLUMNS, ColumnBlock, sum_columns};
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::{Checked, Run};
use crate::op::{RmsNorm, RmsNormBackward, RmsNormForward};
use crate::{Buffer, Cpu};
use isobit_numerics::Fma;
use isobit_numerics::lanes::{self, LANES, tree_sum};

impl Run<RmsNormForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut RmsNormForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let RmsNormForward { y, inverse, x, weight, p } = op;
        let inverse = SharedMut::new(inverse);
        self.pool.run_rows(y, p.width, |tokens, y| {
            // SAFETY: tokens of different threads do not overlap.
            let inverse = unsafe { inverse.slice(tokens.clone()) };
            let x = &x[tokens.start * p.width..tokens.end * p.width];
            if p.zero_centred {
                forward_rows::<true>(self.path, y, inverse, x, weight, p);
            } else {
                forward_rows::<false>(self.path, y, inverse, x, weight, p);
            }
        });
    }
}

impl Run<RmsNormBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut RmsNormBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let RmsNormBackward { dx, dweight, dy, x, inverse, weight, p, row_starts } = op;
        self.pool.run_rows(dx, p.width, |tokens, dx| {
            let here = tokens.start * p.width..tokens.end * p.width;
            let (dy, x, inverse) = (&dy[here.clone()], &x[here], &inverse[tokens]);
            if p.zero_centred {
                backward_rows::<true>(self.path, dx, dy, x, inverse, weight, p);
            } else {
                backward_rows::<false>(self.path, dx, dy, x, inverse, weight, p);
            }
        });
        if let Some(dweight) = dweight {
            let add = |sums: &mut [f32], block: &ColumnBlock| weight_block(self.path, sums, dy, x, inverse, block);
            sum_columns(self, dweight, row_starts, add);
        }
    }
}

#[inline(always)]
fn factor<const ZERO_CENTRED: bool>(weight: f32) -> f32 {
    if ZERO_CENTRED { 1.0 + weight } else { weight }
}

multiversion! {
    fn forward_rows<F, const ZERO_CENTRED: bool>(
        y: &mut [f32],
        inverse: &mut [f32],
        x: &[f32],
        weight: &[f32],
        p: &RmsNorm,
    ) {
        let rows = y.chunks_exact_mut(p.width).zip(x.chunks_exact(p.width));
        for ((y, x), inverse) in rows.zip(inverse) {
            let mean = lanes::dot::<F>(x, x) / p.width as f32;
            let inv = 1.0 / (mean + p.eps).sqrt();
            *inverse = inv;
            for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                *y = (x * inv) * factor::<ZERO_CENTRED>(*weight);
            }
        }
    }
}

multiversion! {
    fn backward_rows<F, const ZERO_CENTRED: bool>(
        dx: &mut [f32],
        dy: &[f32],
        x: &[f32],
        inverse: &[f32],
        weight: &[f32],
        p: &RmsNorm,
    ) {
        let rows = dx.chunks_exact_mut(p.width).zip(dy.chunks_exact(p.width)).zip(x.chunks_exact(p.width));
        for (((dx, dy), x), inverse) in rows.zip(inverse) {
            let inv = *inverse;
            let mean = grad_dot::<F, ZERO_CENTRED>(dy, x, weight, inv) / p.width as f32;
            let each = dx.iter_mut().zip(dy).zip(x).zip(weight);
            let value = |dy: f32, x: f32, weight: f32| {
                F::fma(-(x * inv), mean, dy * factor::<ZERO_CENTRED>(weight)) * inv
            };
            if p.accumulate {
                each.for_each(|(((dx, dy), x), weight)| *dx += value(*dy, *x, *weight));
            } else {
                each.for_each(|(((dx, dy), x), weight)| *dx = value(*dy, *x, *weight));
            }
        }
    }
}

/// Lane sum of `fma(dy·w, x·inv, ·)`.
#[inline(always)]
fn grad_dot<F: Fma, const ZERO_CENTRED: bool>(dy: &[f32], x: &[f32], weight: &[f32], inv: f32) -> f32 {
    let mut acc = [0.0; LANES];
    let step = |acc: f32, dy: f32, x: f32, weight: f32| F::fma(dy * factor::<ZERO_CENTRED>(weight), x * inv, acc);
    let (dy_blocks, dy_tail) = dy.as_chunks::<LANES>();
    let (x_blocks, x_tail) = x.as_chunks::<LANES>();
    let (weight_blocks, weight_tail) = weight.as_chunks::<LANES>();
    for ((dy, x), weight) in dy_blocks.iter().zip(x_blocks).zip(weight_blocks) {
        for lane in 0..LANES {
            acc[lane] = step(acc[lane], dy[lane], x[lane], weight[lane]);
        }
    }
    for (((acc, dy), x), weight) in acc.iter_mut().zip(dy_tail).zip(x_tail).zip(weight_tail) {
        *acc = step(*acc, *dy, *x, *weight);
    }
    tree_sum(acc)
}

multiversion! {
    fn weight_block<_F>(dweight: &mut [f32], dy: &[f32], x: &[f32], inverse: &[f32], block: &ColumnBlock) {
        let mut sums = [0.0f32; COLUMNS];
        let sums = &mut sums[..dweight.len()];
        for t in block.tokens.clone() {
            let (at, inv) = (t * block.width + block.first, inverse[t]);
            for ((sum, dy), x) in sums.iter_mut().zip(&dy[at..][..dweight.len()]).zip(&x[at..][..dweight.len()]) {
                *sum += dy * (x * inv);
            }
        }
        for (dweight, sum) in dweight.iter_mut().zip(sums) {
            *dweight += *sum;
        }
    }
}
