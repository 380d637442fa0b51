//! Bias (`op/bias.rs`). Forward is parallel over tokens, backward over columns, so no two threads
//! share a sum.

use super::CpuMemory;
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::{Checked, Run};
use crate::op::{BiasBackward, BiasForward, TOKEN_BLOCK, token_blocks};
use crate::{Buffer, Cpu};
use std::ops::Range;

/// Columns summed together: their running sums stay in the L1 cache.
pub(super) const COLUMNS: usize = 512;
/// Minimum columns per thread, for whole cache lines.
pub(super) const COLUMN_GRAIN: usize = 32;

impl Run<BiasForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut BiasForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let BiasForward { y, bias } = op;
        self.pool.run_rows(y, bias.len(), |_, y| add_rows(self.path, y, bias));
    }
}

impl Run<BiasBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut BiasBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let BiasBackward { dbias, dy, row_starts } = op;
        sum_columns(self, dbias, row_starts, |dbias, block| add_block(self.path, dbias, dy, block));
    }
}

/// Columns of a matrix over one block of tokens: from `first`, one per sum.
pub(super) struct ColumnBlock {
    pub(super) tokens: Range<usize>,
    pub(super) first: usize,
    /// Columns of the whole matrix.
    pub(super) width: usize,
}

/// Adds each column's sum, one token block at a time; parallel over columns.
pub(super) fn sum_columns(
    cpu: &Cpu,
    sums: &mut [f32],
    row_starts: &[usize],
    add: impl Fn(&mut [f32], &ColumnBlock) + Sync,
) {
    let width = sums.len();
    let sums = SharedMut::new(sums);
    cpu.pool.run_ranges(width, COLUMN_GRAIN, |columns| {
        for first in columns.clone().step_by(COLUMNS) {
            // SAFETY: columns of different threads do not overlap.
            let sums = unsafe { sums.slice(first..(first + COLUMNS).min(columns.end)) };
            for tokens in token_blocks(row_starts, TOKEN_BLOCK) {
                add(sums, &ColumnBlock { tokens, first, width });
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
    fn add_block<_F>(dbias: &mut [f32], dy: &[f32], block: &ColumnBlock) {
        let mut sums = [0.0f32; COLUMNS];
        let sums = &mut sums[..dbias.len()];
        let row = |t: usize| &dy[t * block.width + block.first..][..dbias.len()];
        let mut t = block.tokens.start;
        // ORDER: ascending tokens; four at a time only so that the sums are loaded and stored once
        // for all of them.
        while t + 4 <= block.tokens.end {
            let rows = row(t).iter().zip(row(t + 1)).zip(row(t + 2)).zip(row(t + 3));
            for (sum, (((a, b), c), d)) in sums.iter_mut().zip(rows) {
                *sum = (((*sum + a) + b) + c) + d;
            }
            t += 4;
        }
        for t in t..block.tokens.end {
            for (sum, dy) in sums.iter_mut().zip(row(t)) {
                *sum += dy;
            }
        }
        for (dbias, sum) in dbias.iter_mut().zip(sums) {
            *dbias += *sum;
        }
    }
}
