//! Sum of squares (`op/sum_squares.rs`): parallel over the blocks of level 0; each further level is
//! 4,096 times smaller.

use super::CpuMemory;
use super::path::{Path, multiversion};
use crate::backend::{Checked, Run};
use crate::op::SumSquares;
use crate::op::sum_squares::BLOCK;
use crate::{Buffer, Cpu};
use isobit_numerics::lanes;

impl Run<SumSquares<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut SumSquares<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        for (sum, x) in op.sums.iter_mut().zip(op.tensors) {
            *sum = tensor(self, x);
        }
    }
}

fn tensor(cpu: &Cpu, x: &[f32]) -> f32 {
    // BOUND: three levels, 2³⁶ elements.
    let mut second = [0.0; BLOCK];
    let mut second_count = 0;
    for (total, x) in second.iter_mut().zip(x.chunks(BLOCK * BLOCK)) {
        let mut first = [0.0; BLOCK];
        let first = &mut first[..x.len().div_ceil(BLOCK)];
        cpu.pool.run_rows(first, 1, |range, first| {
            squares(cpu.path, first, &x[range.start * BLOCK..(range.end * BLOCK).min(x.len())]);
        });
        *total = level_sum(cpu.path, first);
        second_count += 1;
    }
    level_sum(cpu.path, &second[..second_count])
}

/// A single value is returned unchanged.
fn level_sum(path: Path, level: &[f32]) -> f32 {
    match level {
        [] => 0.0,
        [one] => *one,
        many => sum(path, many),
    }
}

multiversion! {
    fn squares<F>(out: &mut [f32], x: &[f32]) {
        for (out, block) in out.iter_mut().zip(x.chunks(BLOCK)) {
            *out = lanes::dot::<F>(block, block);
        }
    }
}

multiversion! {
    fn sum<_F>(x: &[f32]) -> f32 {
        lanes::sum(x)
    }
}
