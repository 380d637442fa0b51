//! RMS norm on a GPU (`op/rms_norm.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::{RmsNorm, RmsNormBackward, RmsNormForward};
use isobit_numerics::lanes::LANES;

impl Run<RmsNormForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RmsNormForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        forward(self, op.y, op.inverse, op.x, op.weight, &op.p);
    }
}

impl Run<RmsNormBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RmsNormBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        backward(self, op.dx, op.dweight.as_deref_mut(), op.dy, op.x, op.inverse, op.weight, &op.p, op.row_starts);
    }
}

static RMS_NORM: Program = program!("rms_norm");

/// Tokens per group: each has a work item per lane.
const TOKENS: usize = GROUP / LANES;

fn width(p: &RmsNorm) -> u32 {
    u32::try_from(p.width).expect("a width below 2³²")
}

pub(super) fn forward(
    gpu: &Gpu,
    y: &mut GpuBuffer<f32>,
    inverse: &mut GpuBuffer<f32>,
    x: &GpuBuffer<f32>,
    weight: &GpuBuffer<f32>,
    p: &RmsNorm,
) {
    let length = p.tokens * p.width;
    assert_eq!([y.len(), x.len(), inverse.len(), weight.len()], [length, length, p.tokens, p.width], "norm");
    let arguments = arguments![y, inverse, x, weight, p.tokens, width(p), u32::from(p.zero_centred), p.eps];
    gpu.launch(&RMS_NORM, "rms_norm_forward", Groups::each(p.tokens.div_ceil(TOKENS)), arguments);
}

pub(super) fn backward(
    gpu: &Gpu,
    dx: &mut GpuBuffer<f32>,
    dweight: Option<&mut GpuBuffer<f32>>,
    dy: &GpuBuffer<f32>,
    x: &GpuBuffer<f32>,
    inverse: &GpuBuffer<f32>,
    weight: &GpuBuffer<f32>,
    p: &RmsNorm,
    row_starts: &[usize],
) {
    let length = p.tokens * p.width;
    assert_eq!([dx.len(), dy.len(), x.len()], [length; 3], "norm");
    assert_eq!([inverse.len(), weight.len()], [p.tokens, p.width], "norm");
    let flags = [p.zero_centred, p.accumulate].map(u32::from);
    let arguments = arguments![dx, dy, x, inverse, weight, p.tokens, width(p), flags[0], flags[1]];
    gpu.launch(&RMS_NORM, "rms_norm_backward", Groups::each(p.tokens.div_ceil(TOKENS)), arguments);
    let Some(dweight) = dweight else { return };
    assert_eq!((dweight.len(), row_starts[row_starts.len() - 1]), (p.width, p.tokens), "norm");
    let blocks = gpu.token_blocks(row_starts);
    let count = u32::try_from(blocks.len() / 2).expect("blocks are fewer than tokens");
    let arguments = arguments![dweight, dy, x, inverse, &blocks, count, width(p)];
    gpu.launch(&RMS_NORM, "rms_norm_grad_weight", Groups::each(p.width.div_ceil(LANES)), arguments);
}
