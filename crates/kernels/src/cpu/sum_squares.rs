//! Sum of squares (`op/sum_squares.rs`): threads share the blocks of level 0; further levels are 4,096 times smaller each.

use super::path::multiversion;
use crate::Cpu;
use crate::op::sum_squares::BLOCK;
use isobit_numerics::lanes;

pub(super) fn apply(cpu: &Cpu, x: &[f32]) -> f32 {
    let mut level = vec![0.0; x.len().div_ceil(BLOCK)];
    cpu.pool.run_rows(&mut level, 1, |range, level| {
        squares(cpu.path, level, &x[range.start * BLOCK..(range.end * BLOCK).min(x.len())]);
    });
    let mut count = level.len();
    while count > 1 {
        let blocks = count.div_ceil(BLOCK);
        for block in 0..blocks {
            // In place: block `b` lies at or after element `b`.
            level[block] = sum(cpu.path, &level[block * BLOCK..((block + 1) * BLOCK).min(count)]);
        }
        count = blocks;
    }
    level.first().copied().unwrap_or(0.0)
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
