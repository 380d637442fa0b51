//! Router of a mixture of experts on a GPU (`op/router.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::{Router, RouterBackward, RouterChoose, RouterWeights, Scoring};
use isobit_numerics::lanes::LANES;

impl Run<RouterChoose<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RouterChoose<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        choose(self, op.indices, op.logits, op.bias, &op.p);
    }
}

impl Run<RouterWeights<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RouterWeights<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        weights(self, op.weights, op.logits, op.indices, &op.p);
    }
}

impl Run<RouterBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RouterBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        backward(self, op.dlogits, op.dweights, op.logits, op.indices, &op.p);
    }
}

static ROUTER: Program = program!("router");

/// Tokens of a group: each has a work item per lane.
const TOKENS: usize = GROUP / LANES;

fn check(logits: &GpuBuffer<f32>, of_slots: usize, p: &Router) {
    p.check();
    assert_eq!([logits.len(), of_slots], [p.tokens * p.experts, p.tokens * p.chosen], "router");
}

/// How logits become weights, as `gpu/router.cl` numbers it.
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

pub(super) fn choose(
    gpu: &Gpu,
    choices: &mut GpuBuffer<u32>,
    logits: &GpuBuffer<f32>,
    bias: Option<&GpuBuffer<f32>>,
    p: &Router,
) {
    check(logits, choices.len(), p);
    assert!(bias.is_none() || p.scoring == Scoring::Sigmoid, "only sigmoid scores have a bias");
    assert!(bias.is_none_or(|bias| bias.len() == p.experts), "a bias for every expert");
    let [experts, chosen, all, kept] = [p.experts, p.chosen, p.groups, p.kept_groups].map(dimension);
    let flags = [p.scoring == Scoring::Sigmoid, bias.is_some()].map(u32::from);
    let bias = bias.unwrap_or(logits);
    let arguments = arguments![choices, logits, bias, p.tokens, experts, chosen, flags[0], flags[1], all, kept];
    gpu.launch(&ROUTER, "router_choose", groups(p), arguments);
}

pub(super) fn weights(
    gpu: &Gpu,
    weights: &mut GpuBuffer<f32>,
    logits: &GpuBuffer<f32>,
    choices: &GpuBuffer<u32>,
    p: &Router,
) {
    check(logits, weights.len(), p);
    assert_eq!(choices.len(), weights.len(), "router");
    let [experts, chosen] = [p.experts, p.chosen].map(dimension);
    let arguments = arguments![weights, logits, choices, p.tokens, experts, chosen, mode(p), p.scale];
    gpu.launch(&ROUTER, "router_weights", groups(p), arguments);
}

pub(super) fn backward(
    gpu: &Gpu,
    dlogits: &mut GpuBuffer<f32>,
    dweights: &GpuBuffer<f32>,
    logits: &GpuBuffer<f32>,
    choices: &GpuBuffer<u32>,
    p: &Router,
) {
    check(logits, dweights.len(), p);
    assert_eq!((choices.len(), dlogits.len()), (dweights.len(), logits.len()), "router");
    let [experts, chosen] = [p.experts, p.chosen].map(dimension);
    let arguments = arguments![dlogits, dweights, logits, choices, p.tokens, experts, chosen, mode(p), p.scale];
    gpu.launch(&ROUTER, "router_backward", groups(p), arguments);
}
