//! Bias (`op/bias.rs`). Forward goes by tokens; backward by columns, so that no two threads share a sum.

use super::CpuMemory;
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::Run;
use crate::op::{BiasBackward, BiasForward, TOKEN_BLOCK, token_blocks};
use crate::{Buffer, Cpu};
use std::ops::Range;

impl Run<BiasForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut BiasForward<'_, CpuMemory>, _: &mut Buffer<u8>) {
        forward(self, op.y, op.bias);
    }
}

impl Run<BiasBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut BiasBackward<'_, CpuMemory>, _: &mut Buffer<u8>) {
        backward(self, op.dbias, op.dy, op.row_starts);
    }
}

/// Columns summed together: their running sums stay in the first-level cache.
pub(super) const COLUMNS: usize = 512;
/// Columns that one thread gets at least, for whole cache lines.
pub(super) const COLUMN_GRAIN: usize = 32;

pub(super) fn forward(cpu: &Cpu, y: &mut [f32], bias: &[f32]) {
    cpu.pool.run_rows(y, bias.len(), |_, y| add_rows(cpu.path, y, bias));
}

pub(super) fn backward(cpu: &Cpu, dbias: &mut [f32], dy: &[f32], row_starts: &[usize]) {
    let width = dbias.len();
    assert_eq!(dy.len(), row_starts[row_starts.len() - 1] * width, "gradients of all tokens");
    let dbias = SharedMut::new(dbias);
    cpu.pool.run_ranges(width, COLUMN_GRAIN, |columns| {
        for first in columns.clone().step_by(COLUMNS) {
            let here = first..(first + COLUMNS).min(columns.end);
            // SAFETY: columns of different threads do not overlap.
            let dbias = unsafe { dbias.slice(here.clone()) };
            for block in token_blocks(row_starts, TOKEN_BLOCK) {
                add_block(cpu.path, dbias, dy, width, block, here.start);
            }
        }
    });
}

multiversion! {
    fn add_rows<_F>(y: &mut [f32], bias: &[f32]) {
        for row in y.chunks_exact_mut(bias.len()) {
            for (y, bias) in row.iter_mut().zip(bias) {
                *y += bias;
            }
        }
    }
}

multiversion! {
    fn add_block<_F>(dbias: &mut [f32], dy: &[f32], width: usize, block: Range<usize>, first: usize) {
        let mut sums = [0.0f32; COLUMNS];
        let sums = &mut sums[..dbias.len()];
        let row = |t: usize| &dy[t * width + first..][..dbias.len()];
        let mut t = block.start;
        // ORDER: ascending tokens; four at a time only so that the sums are loaded and stored once for all of them.
        while t + 4 <= block.end {
            let rows = row(t).iter().zip(row(t + 1)).zip(row(t + 2)).zip(row(t + 3));
            for (sum, (((a, b), c), d)) in sums.iter_mut().zip(rows) {
                *sum = (((*sum + a) + b) + c) + d;
            }
            t += 4;
        }
        for t in t..block.end {
            for (sum, dy) in sums.iter_mut().zip(row(t)) {
                *sum += dy;
            }
        }
        for (dbias, sum) in dbias.iter_mut().zip(sums) {
            *dbias += *sum;
        }
    }
}
