//! Load balancing of a router on a GPU (`op/balance.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::{GpuBuffer, Parts};
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::{BalanceBackward, BalanceForward, TOKEN_BLOCK, token_blocks};
use isobit_numerics::lanes::LANES;

impl Run<BalanceForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut BalanceForward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>) {
        forward(self, op.sums, op.logits, op.row_starts, op.experts, workspace);
    }
}

impl Run<BalanceBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut BalanceBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        backward(self, op.dlogits, op.share, op.logits, op.row_starts, op.experts);
    }
}

static BALANCE: Program = program!("balance");

/// Tokens of a group: each has a work item per lane.
const TOKENS: usize = GROUP / LANES;

/// Sums of all blocks of tokens.
pub(super) fn workspace(gpu: &Gpu, row_starts: &[usize], experts: usize) -> usize {
    gpu.part::<f32>(token_blocks(row_starts, TOKEN_BLOCK).count() * experts)
}

pub(super) fn forward(
    gpu: &Gpu,
    sums: &mut GpuBuffer<f32>,
    logits: &GpuBuffer<f32>,
    row_starts: &[usize],
    experts: usize,
    workspace: &mut GpuBuffer<u8>,
) {
    let mut firsts = vec![0];
    for row in row_starts.windows(2) {
        firsts.push(firsts[firsts.len() - 1] + token_blocks(row, TOKEN_BLOCK).count());
    }
    let count = firsts[firsts.len() - 1];
    let block_sums = Parts::new(gpu, workspace).take::<f32>(count * experts);
    let (blocks, firsts) = (gpu.token_blocks(row_starts), gpu.offsets(&firsts));
    let width = dimension(experts);
    gpu.launch(&BALANCE, "balance_blocks", Groups::each(count), arguments![block_sums, logits, &blocks, width]);
    let arguments = arguments![&mut *sums, block_sums, &firsts, sums.len(), width];
    gpu.launch(&BALANCE, "balance_rows", Groups::over(sums.len()), arguments);
}

pub(super) fn backward(
    gpu: &Gpu,
    dlogits: &mut GpuBuffer<f32>,
    share: &GpuBuffer<f32>,
    logits: &GpuBuffer<f32>,
    row_starts: &[usize],
    experts: usize,
) {
    assert_eq!(dlogits.len(), logits.len(), "load balance");
    let tokens = row_starts[row_starts.len() - 1];
    let arguments = arguments![dlogits, share, logits, &gpu.offsets(row_starts), tokens, dimension(experts)];
    gpu.launch(&BALANCE, "balance_backward", Groups::each(tokens.div_ceil(TOKENS)), arguments);
}
