//! Groups the pairs of a router by expert (`op/grouping.rs`) in two passes on one thread: a few
//! integers per token.

use super::CpuMemory;
use crate::backend::{Checked, Run};
use crate::buffer::Workspace;
use crate::op::GroupRows;
use crate::{Buffer, Cpu};

/// The next row of each expert.
pub(super) fn workspace(experts: usize) -> usize {
    Workspace::bytes::<u32>(experts)
}

impl Run<GroupRows<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut GroupRows<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        let GroupRows { tokens, places, counts, indices, row_starts, slots, experts } = op;
        let (slots, experts) = (*slots, *experts);
        counts.fill(0);
        for (counts, row) in counts.chunks_exact_mut(experts).zip(row_starts.windows(2)) {
            for &expert in &indices[row[0] * slots..row[1] * slots] {
                counts[expert as usize] += 1;
            }
        }
        let next = Workspace::new(workspace).take::<u32>(experts);
        let mut first = 0;
        for (expert, next) in next.iter_mut().enumerate() {
            *next = first;
            first += counts.chunks_exact(experts).map(|row| row[expert]).sum::<u32>();
        }
        let pairs = indices.chunks_exact(slots.max(1)).zip(places.chunks_exact_mut(slots.max(1)));
        for (token, (indices, places)) in pairs.enumerate() {
            for (&expert, place) in indices.iter().zip(places) {
                *place = next[expert as usize];
                tokens[*place as usize] = token as u32;
                next[expert as usize] += 1;
            }
        }
    }
}
