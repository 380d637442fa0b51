//! Load balancing of a router on a GPU (`op/balance.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::{GpuBuffer, Parts};
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{BalanceBackward, BalanceForward, TOKEN_BLOCK, token_blocks};
use isobit_numerics::lanes::LANES;

pub(super) static BALANCE: Program = program!("balance");

/// Tokens per group: each has a work item per lane.
const TOKENS: usize = GROUP / LANES;

/// Sums of all blocks of tokens.
pub(super) fn workspace(gpu: &Gpu, row_starts: &[usize], experts: usize) -> usize {
    gpu.part::<f32>(token_blocks(row_starts, TOKEN_BLOCK).count() * experts)
}

impl Run<BalanceForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut BalanceForward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        let firsts = Self::row_blocks(op.row_starts);
        let count = firsts[firsts.len() - 1];
        let block_sums = Parts::new(self, workspace).take::<f32>(count * op.experts);
        let (blocks, firsts) = (self.token_blocks(op.row_starts), self.offsets(&firsts));
        let width = dimension(op.experts);
        self.launch(&BALANCE, "balance_blocks", Groups::each(count), arguments![block_sums, op.logits, &blocks, width]);
        let arguments = arguments![&*op.sums, block_sums, &firsts, op.sums.len(), width];
        self.launch(&BALANCE, "balance_rows", Groups::over(op.sums.len()), arguments);
    }
}

impl Run<BalanceBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut BalanceBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let tokens = op.row_starts[op.row_starts.len() - 1];
        let (starts, experts) = (self.offsets(op.row_starts), dimension(op.experts));
        let arguments = arguments![&*op.dlogits, op.share, op.logits, &starts, tokens, experts];
        self.launch(&BALANCE, "balance_backward", Groups::each(tokens.div_ceil(TOKENS)), arguments);
    }
}
