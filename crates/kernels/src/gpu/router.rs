//! Router of a mixture of experts on a GPU (`op/router.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{Router, RouterBackward, RouterChoose, RouterWeights, Scoring};
use isobit_numerics::lanes::LANES;

pub(super) static ROUTER: Program = program!("router");

/// Tokens per group: each has a work item per lane.
const TOKENS: usize = GROUP / LANES;

/// How logits become weights, as numbered in `gpu/router.cl`.
fn mode(p: &Router) -> u32 {
    match (p.scoring, p.renormalise) {
        (Scoring::Softmax, true) => 0,
        (Scoring::Softmax, false) => 1,
        (Scoring::Sigmoid, true) => 2,
        (Scoring::Sigmoid, false) => 3,
    }
}

fn groups(p: &Router) -> Groups {
    Groups::each(p.tokens.div_ceil(TOKENS))
}

impl Run<RouterChoose<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RouterChoose<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let [experts, chosen, all, kept] = [p.experts, p.chosen, p.groups, p.kept_groups].map(dimension);
        let [sigmoid, biased] = [p.scoring == Scoring::Sigmoid, op.bias.is_some()].map(u32::from);
        let (logits, bias) = (op.logits, op.bias.unwrap_or(op.logits));
        let arguments = arguments![&*op.indices, logits, bias, p.tokens, experts, chosen, sigmoid, biased, all, kept];
        self.launch(&ROUTER, "router_choose", groups(p), arguments);
    }
}

impl Run<RouterWeights<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RouterWeights<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let [experts, chosen] = [p.experts, p.chosen].map(dimension);
        let arguments = arguments![&*op.weights, op.logits, op.indices, p.tokens, experts, chosen, mode(p), p.scale];
        self.launch(&ROUTER, "router_weights", groups(p), arguments);
    }
}

impl Run<RouterBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RouterBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let [experts, chosen] = [p.experts, p.chosen].map(dimension);
        let (dweights, logits, indices) = (op.dweights, op.logits, op.indices);
        let arguments =
            arguments![&*op.dlogits, dweights, logits, indices, p.tokens, experts, chosen, mode(p), p.scale];
        self.launch(&ROUTER, "router_backward", groups(p), arguments);
    }
}
