//! Rotary embedding on a GPU, in place.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::{Rope, RopeBackward, RopeForward};

impl Run<RopeForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RopeForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        forward(self, op.x, op.cos, op.sin, op.positions, &op.p);
    }
}

impl Run<RopeBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RopeBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        backward(self, op.dx, op.cos, op.sin, op.positions, &op.p);
    }
}

static ROPE: Program = program!("rope");

pub(super) fn forward(
    gpu: &Gpu,
    x: &mut GpuBuffer<f32>,
    cos: &GpuBuffer<f32>,
    sin: &GpuBuffer<f32>,
    positions: &GpuBuffer<u32>,
    p: &Rope,
) {
    rotate(gpu, "rope_forward", x, cos, sin, positions, p);
}

pub(super) fn backward(
    gpu: &Gpu,
    dx: &mut GpuBuffer<f32>,
    cos: &GpuBuffer<f32>,
    sin: &GpuBuffer<f32>,
    positions: &GpuBuffer<u32>,
    p: &Rope,
) {
    rotate(gpu, "rope_backward", dx, cos, sin, positions, p);
}

fn rotate(
    gpu: &Gpu,
    kernel: &'static str,
    x: &mut GpuBuffer<f32>,
    cos: &GpuBuffer<f32>,
    sin: &GpuBuffer<f32>,
    positions: &GpuBuffer<u32>,
    p: &Rope,
) {
    p.check();
    assert_eq!((x.len(), positions.len()), (p.tokens * p.heads * p.head_width, p.tokens), "heads of all tokens");
    let pairs = p.rotary_width / 2;
    if pairs == 0 {
        return;
    }
    assert!(cos.len() == sin.len() && cos.len().is_multiple_of(pairs), "tables of whole positions");
    let [step, distance] = p.steps();
    let tiles = (p.heads * pairs).div_ceil(GROUP);
    let arguments = arguments![
        x,
        cos,
        sin,
        positions,
        dimension(cos.len() / pairs),
        dimension(p.heads),
        dimension(p.head_width),
        dimension(pairs),
        dimension(p.offset),
        dimension(step),
        dimension(distance),
        dimension(tiles),
    ];
    gpu.launch(&ROPE, kernel, Groups::each(p.tokens * tiles), arguments);
}
