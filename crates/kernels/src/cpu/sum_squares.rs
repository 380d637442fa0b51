//! Sum of squares (`op/sum_squares.rs`): threads share the blocks of level 0; further levels are 4,096 times smaller each.

use super::path::{Path, multiversion};
use crate::Cpu;
use crate::op::sum_squares::BLOCK;
use isobit_numerics::lanes;

pub(super) fn apply(cpu: &Cpu, x: &[f32]) -> f32 {
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
    assert!(x.len() <= BLOCK * BLOCK * BLOCK, "a tensor has at most 2³⁶ elements");
    level_sum(cpu.path, &second[..second_count])
}

/// One value stays as it is.
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
