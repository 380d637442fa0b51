//! L2 norm on a GPU (`op/l2_norm.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::{L2Norm, L2NormBackward, L2NormForward};
use isobit_numerics::lanes::LANES;

impl Run<L2NormForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut L2NormForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        forward(self, op.y, op.inverse, op.x, &op.p);
    }
}

impl Run<L2NormBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut L2NormBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        backward(self, op.dx, op.dy, op.x, op.inverse, &op.p);
    }
}

static L2_NORM: Program = program!("l2_norm");

/// Eight tokens per group, each with a work item per lane.
fn groups(p: &L2Norm) -> Groups {
    Groups::each(p.tokens.div_ceil(GROUP / LANES))
}

pub(super) fn forward(gpu: &Gpu, y: &mut GpuBuffer<f32>, inverse: &mut GpuBuffer<f32>, x: &GpuBuffer<f32>, p: &L2Norm) {
    let length = p.tokens * p.width;
    assert_eq!([y.len(), x.len(), inverse.len()], [length, length, p.tokens], "norm");
    let arguments = arguments![y, inverse, x, p.tokens, dimension(p.width), p.eps, p.factor];
    gpu.launch(&L2_NORM, "l2_norm_forward", groups(p), arguments);
}

pub(super) fn backward(
    gpu: &Gpu,
    dx: &mut GpuBuffer<f32>,
    dy: &GpuBuffer<f32>,
    x: &GpuBuffer<f32>,
    inverse: &GpuBuffer<f32>,
    p: &L2Norm,
) {
    let length = p.tokens * p.width;
    assert_eq!([dx.len(), dy.len(), x.len(), inverse.len()], [length, length, length, p.tokens], "norm");
    let arguments = arguments![dx, dy, x, inverse, p.tokens, dimension(p.width), p.factor];
    gpu.launch(&L2_NORM, "l2_norm_backward", groups(p), arguments);
}
