//! Load balancing of a router, the definition (`docs/numerics.md`, "Load balance").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{BalanceBackward, BalanceForward, TOKEN_BLOCK, token_blocks};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::exp;
use isobit_numerics::fma::fma;
use isobit_numerics::lanes::{self, LANES, for_lanes, tree_sum};

/// One token's probabilities over all experts.
pub(super) fn softmax(z: &[f32]) -> Vec<f32> {
    let most = z.iter().fold(f32::NEG_INFINITY, |most, &z| lanes::max(z, most));
    let powers: Vec<f32> = z.iter().map(|z| exp::<SoftFma>(z - most)).collect();
    let sum = lanes::sum(&powers);
    powers.iter().map(|power| power / sum).collect()
}

impl Run<BalanceForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut BalanceForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let BalanceForward { sums, logits, row_starts, .. } = op;
        let experts = op.experts;
        sums.fill(0.0);
        for (sums, row) in sums.chunks_exact_mut(experts).zip(row_starts.windows(2)) {
            for block in token_blocks(row, TOKEN_BLOCK) {
                let mut acc = vec![0.0; experts];
                for t in block {
                    for (acc, probability) in acc.iter_mut().zip(softmax(&logits[t * experts..][..experts])) {
                        *acc += probability;
                    }
                }
                for (sum, acc) in sums.iter_mut().zip(acc) {
                    *sum += acc;
                }
            }
        }
    }
}

impl Run<BalanceBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut BalanceBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let BalanceBackward { dlogits, share, logits, row_starts, .. } = op;
        let experts = op.experts;
        for (share, row) in share.chunks_exact(experts).zip(row_starts.windows(2)) {
            for t in row[0]..row[1] {
                let probabilities = softmax(&logits[t * experts..][..experts]);
                let mut acc = [0.0; LANES];
                for_lanes(&mut acc, experts, |acc, e| fma(probabilities[e], share[e], acc));
                let mean = tree_sum(acc);
                for e in 0..experts {
                    let dz = &mut dlogits[t * experts + e];
                    *dz = fma(probabilities[e], share[e] - mean, *dz);
                }
            }
        }
    }
}
