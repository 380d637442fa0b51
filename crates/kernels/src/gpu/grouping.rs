//! Groups the pairs of a router by expert on a GPU (`op/grouping.rs`): counts of blocks of tokens,
//! where each expert's rows begin, and the places of all pairs.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments, dimension};
use super::memory::{GpuBuffer, Parts};
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{GroupRows, TOKEN_BLOCK, token_blocks};

pub(super) static GROUPING: Program = program!("grouping");

/// Counts and offsets of all blocks of tokens, and the first row of each expert.
pub(super) fn workspace(gpu: &Gpu, row_starts: &[usize], experts: usize) -> usize {
    let blocks = token_blocks(row_starts, TOKEN_BLOCK).count();
    2 * gpu.part::<u32>(blocks * experts) + gpu.part::<u32>(experts)
}

impl Run<GroupRows<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut GroupRows<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        let firsts = Self::row_blocks(op.row_starts);
        let (count, rows) = (firsts[firsts.len() - 1], firsts.len() - 1);
        let mut parts = Parts::new(self, workspace);
        let [counts, offsets] = [(); 2].map(|()| parts.take::<u32>(count * op.experts));
        let starts = parts.take::<u32>(op.experts);
        let (blocks, firsts) = (self.token_blocks(op.row_starts), self.offsets(&firsts));
        let [slots, experts] = [op.slots, op.experts].map(dimension);
        let per_block = Groups::each(count);
        let arguments = arguments![counts, op.indices, &blocks, slots, experts];
        self.launch(&GROUPING, "grouping_count", per_block, arguments);
        let arguments = arguments![&*op.counts, offsets, starts, counts, &firsts, dimension(rows), experts];
        self.launch(&GROUPING, "grouping_starts", Groups::each(1), arguments);
        let arguments = arguments![&*op.tokens, &*op.places, op.indices, &blocks, offsets, starts, slots, experts];
        self.launch(&GROUPING, "grouping_place", per_block, arguments);
    }
}
