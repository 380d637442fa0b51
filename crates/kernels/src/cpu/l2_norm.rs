//! L2 norm (`op/l2_norm.rs`); parallel over the heads of all tokens.

use super::CpuMemory;
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::{Checked, Run};
use crate::op::{L2Norm, L2NormBackward, L2NormForward};
use crate::{Buffer, Cpu};
use isobit_numerics::Fma;
use isobit_numerics::elementary::rsqrt;
use isobit_numerics::lanes::{self, LANES, tree_sum};

impl Run<L2NormForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut L2NormForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let L2NormForward { y, inverse, x, p } = op;
        let inverse = SharedMut::new(inverse);
        self.pool.run_rows(y, p.width, |tokens, y| {
            // SAFETY: tokens of different threads do not overlap.
            let inverse = unsafe { inverse.slice(tokens.clone()) };
            forward_rows(self.path, y, inverse, &x[tokens.start * p.width..tokens.end * p.width], p);
        });
    }
}

impl Run<L2NormBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut L2NormBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let L2NormBackward { dx, dy, x, inverse, p } = op;
        self.pool.run_rows(dx, p.width, |tokens, dx| {
            let here = tokens.start * p.width..tokens.end * p.width;
            backward_rows(self.path, dx, &dy[here.clone()], &x[here], &inverse[tokens], p);
        });
    }
}

multiversion! {
    fn forward_rows<F>(y: &mut [f32], inverse: &mut [f32], x: &[f32], p: &L2Norm) {
        let rows = y.chunks_exact_mut(p.width).zip(x.chunks_exact(p.width));
        for ((y, x), inverse) in rows.zip(inverse) {
            let inv = rsqrt(lanes::dot::<F>(x, x) + p.eps);
            *inverse = inv;
            for (y, x) in y.iter_mut().zip(x) {
                *y = (x * inv) * p.factor;
            }
        }
    }
}

multiversion! {
    fn backward_rows<F>(dx: &mut [f32], dy: &[f32], x: &[f32], inverse: &[f32], p: &L2Norm) {
        let rows = dx.chunks_exact_mut(p.width).zip(dy.chunks_exact(p.width)).zip(x.chunks_exact(p.width));
        for (((dx, dy), x), inverse) in rows.zip(inverse) {
            let inv = *inverse;
            let sum = grad_dot::<F>(dy, x, p.factor, inv);
            for ((dx, dy), x) in dx.iter_mut().zip(dy).zip(x) {
                *dx = F::fma(-(x * inv), sum, dy * p.factor) * inv;
            }
        }
    }
}

/// Lane sum of `fma(dy·factor, x·inv, ·)`.
#[inline(always)]
fn grad_dot<F: Fma>(dy: &[f32], x: &[f32], factor: f32, inv: f32) -> f32 {
    let mut acc = [0.0; LANES];
    let (dy_blocks, dy_tail) = dy.as_chunks::<LANES>();
    let (x_blocks, x_tail) = x.as_chunks::<LANES>();
    for (dy, x) in dy_blocks.iter().zip(x_blocks) {
        for lane in 0..LANES {
            acc[lane] = F::fma(dy[lane] * factor, x[lane] * inv, acc[lane]);
        }
    }
    for ((acc, dy), x) in acc.iter_mut().zip(dy_tail).zip(x_tail) {
        *acc = F::fma(dy * factor, x * inv, *acc);
    }
    tree_sum(acc)
}
