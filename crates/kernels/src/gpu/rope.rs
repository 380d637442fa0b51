//! Rotary embedding on a GPU, in place.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{Rope, RopeBackward, RopeForward};

pub(super) static ROPE: Program = program!("rope");

impl Run<RopeForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RopeForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        rotate(self, "rope_forward", op.x, op.cos, op.sin, op.positions, &op.p);
    }
}

impl Run<RopeBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RopeBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        rotate(self, "rope_backward", op.dx, op.cos, op.sin, op.positions, &op.p);
    }
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
    let pairs = p.rotary_width / 2;
    if pairs == 0 {
        return;
    }
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
