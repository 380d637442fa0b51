//! Embedding (`op/embedding.rs`). Backward stably sorts the tokens by id, then gathers: no scatter,
//! no atomics.
//!
//! Threads split the columns and, if those are few, also the runs of equal ids; each column of a
//! table row has one owner.

use super::CpuMemory;
use super::cast::{from_bf16, from_f16};
use super::path::multiversion;
use super::pool::{SharedMut, share};
use crate::backend::{Checked, Run};
use crate::buffer::Workspace;
use crate::op::{EmbeddingBackward, EmbeddingForward};
use crate::{Buffer, Cpu, StoredMatrix};

/// Minimum columns per thread.
const COLUMN_GRAIN: usize = 64;
/// Bits of an id per pass of the sort.
const RADIX_BITS: usize = 11;
const BUCKETS: usize = 1 << RADIX_BITS;

impl Run<EmbeddingForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut EmbeddingForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let EmbeddingForward { y, ids, .. } = op;
        let (table, width) = (op.table, op.width);
        self.pool.run_rows(y, width, |tokens, y| {
            for (y, &id) in y.chunks_exact_mut(width).zip(&ids[tokens]) {
                let at = id as usize * width..(id as usize + 1) * width;
                match table {
                    StoredMatrix::F32(table) => y.copy_from_slice(&table[at]),
                    StoredMatrix::Bf16(table) => from_bf16(self.path, y, &table[at]),
                    StoredMatrix::F16(table) => from_f16(self.path, y, &table[at]),
                }
            }
        });
    }
}

/// Two token orders, between which the sort alternates.
pub(super) fn workspace(_cpu: &Cpu, tokens: usize) -> usize {
    2 * Workspace::bytes::<u32>(tokens)
}

impl Run<EmbeddingBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut EmbeddingBackward<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        let EmbeddingBackward { dtable, dy, ids, .. } = op;
        let width = op.width;
        if dy.is_empty() {
            return;
        }
        let mut workspace = Workspace::new(workspace);
        let (order, other) = (workspace.take::<u32>(ids.len()), workspace.take::<u32>(ids.len()));
        let order: &[u32] = sort_by_id(order, other, ids);
        let dtable = SharedMut::new(dtable);
        let column_groups = (width / COLUMN_GRAIN).clamp(1, self.threads());
        let token_groups = self.threads() / column_groups;
        self.pool.run(|worker| {
            if worker >= column_groups * token_groups {
                return;
            }
            let columns = share(width, 1, column_groups, worker % column_groups);
            let tokens = share(order.len(), 1, token_groups, worker / column_groups);
            let starts_run = |index: usize| index == 0 || ids[order[index] as usize] != ids[order[index - 1] as usize];
            // A run of equal ids belongs to the thread that has its first token.
            let whole_runs = |index: usize| (index..order.len()).find(|&at| starts_run(at)).unwrap_or(order.len());
            for &t in &order[whole_runs(tokens.start)..whole_runs(tokens.end)] {
                let (at, from) = (ids[t as usize] as usize * width, t as usize * width);
                // SAFETY: other threads have other columns or other ids.
                let row = unsafe { dtable.slice(at + columns.start..at + columns.end) };
                add(self.path, row, &dy[from + columns.start..from + columns.end]);
            }
        });
    }
}

multiversion! {
    fn add<_F>(y: &mut [f32], x: &[f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y += x;
        }
    }
}

/// Tokens in order of (id, token): a stable radix sort.
fn sort_by_id<'a>(mut order: &'a mut [u32], mut other: &'a mut [u32], ids: &[u32]) -> &'a mut [u32] {
    assert!(u32::try_from(ids.len()).is_ok(), "token indices fit 32 bits");
    for (token, order) in order.iter_mut().enumerate() {
        *order = token as u32;
    }
    let largest = ids.iter().copied().max().unwrap_or(0);
    let mut shift = 0;
    while shift < 32 && largest >> shift > 0 {
        let bucket = |token: u32| (ids[token as usize] >> shift) as usize % BUCKETS;
        let mut next = [0u32; BUCKETS];
        for &token in order.iter() {
            next[bucket(token)] += 1;
        }
        let mut start = 0;
        for next in &mut next {
            start += std::mem::replace(next, start);
        }
        for &token in order.iter() {
            let next = &mut next[bucket(token)];
            other[*next as usize] = token;
            *next += 1;
        }
        std::mem::swap(&mut order, &mut other);
        shift += RADIX_BITS;
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sort_is_stable_over_all_bits() {
        let ids: Vec<u32> = (0..5000u32).map(|t| t.wrapping_mul(0x9e37_79b9) % 7 * 0x2493_1101).collect();
        let (mut a, mut b) = (vec![0; ids.len()], vec![0; ids.len()]);
        let mut want: Vec<u32> = (0..5000).collect();
        want.sort_by_key(|&t| ids[t as usize]);
        assert_eq!(sort_by_id(&mut a, &mut b, &ids), want);
    }
}
