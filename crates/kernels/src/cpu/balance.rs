//! Load balancing of a router (`op/balance.rs`). Any thread may sum a block of tokens; the blocks
//! are then added in order.

use super::CpuMemory;
use super::path::multiversion;
use super::router::softmax_scale;
use crate::backend::{Checked, Run};
use crate::buffer::Workspace;
use crate::op::router::EXPERTS_MAX;
use crate::op::{BalanceBackward, BalanceForward, TOKEN_BLOCK, token_blocks};
use crate::{Buffer, Cpu};
use isobit_numerics::elementary::exp;
use isobit_numerics::lanes;

/// The sums of all token blocks.
pub(super) fn workspace(row_starts: &[usize], experts: usize) -> usize {
    Workspace::bytes::<f32>(token_blocks(row_starts, TOKEN_BLOCK).count() * experts)
}

impl Run<BalanceForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut BalanceForward<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        let BalanceForward { sums, logits, row_starts, .. } = op;
        let experts = op.experts;
        let count = token_blocks(row_starts, TOKEN_BLOCK).count();
        let block_sums = Workspace::new(workspace).take::<f32>(count * experts);
        self.pool.run_rows(block_sums, experts, |range, block_sums| {
            let blocks = token_blocks(row_starts, TOKEN_BLOCK).skip(range.start);
            for (sums, block) in block_sums.chunks_exact_mut(experts).zip(blocks) {
                sum_block(self.path, sums, &logits[block.start * experts..block.end * experts]);
            }
        });
        sums.fill(0.0);
        let mut blocks = block_sums.chunks_exact(experts);
        for (sums, row) in sums.chunks_exact_mut(experts).zip(row_starts.windows(2)) {
            // ORDER: ascending blocks.
            for block in blocks.by_ref().take(token_blocks(row, TOKEN_BLOCK).count()) {
                for (sum, block) in sums.iter_mut().zip(block) {
                    *sum += block;
                }
            }
        }
    }
}

multiversion! {
    fn sum_block<F>(sums: &mut [f32], logits: &[f32]) {
        sums.fill(0.0);
        // ORDER: ascending tokens.
        for z in logits.chunks_exact(sums.len()) {
            let (most, total) = softmax_scale::<F>(z);
            for (sum, z) in sums.iter_mut().zip(z) {
                *sum += exp::<F>(z - most) / total;
            }
        }
    }
}

impl Run<BalanceBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut BalanceBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let BalanceBackward { dlogits, share, logits, row_starts, .. } = op;
        let experts = op.experts;
        self.pool.run_rows(dlogits, experts, |tokens, dlogits| {
            for (row, starts) in row_starts.windows(2).enumerate() {
                let here = starts[0].max(tokens.start)..starts[1].min(tokens.end);
                if !here.is_empty() {
                    let share = &share[row * experts..][..experts];
                    let dz = &mut dlogits[(here.start - tokens.start) * experts..(here.end - tokens.start) * experts];
                    backward_rows(self.path, dz, share, &logits[here.start * experts..here.end * experts]);
                }
            }
        });
    }
}

multiversion! {
    fn backward_rows<F>(dlogits: &mut [f32], share: &[f32], logits: &[f32]) {
        let experts = share.len();
        let mut scratch = [0.0; EXPERTS_MAX];
        let probabilities = &mut scratch[..experts];
        for (dz, z) in dlogits.chunks_exact_mut(experts).zip(logits.chunks_exact(experts)) {
            let (most, sum) = softmax_scale::<F>(z);
            for (probability, z) in probabilities.iter_mut().zip(z) {
                *probability = exp::<F>(z - most) / sum;
            }
            let mean = lanes::dot::<F>(probabilities, share);
            for ((dz, probability), share) in dz.iter_mut().zip(&*probabilities).zip(share) {
                *dz = F::fma(*probability, share - mean, *dz);
            }
        }
    }
}
