//! SwiGLU on a GPU.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{SwigluBackward, SwigluForward, SwigluPairsBackward, SwigluPairsForward};

impl Run<SwigluForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut SwigluForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        forward(self, op.h, op.gate, op.up);
    }
}

impl Run<SwigluBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut SwigluBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        backward(self, op.dgate, op.dup, op.dh, op.gate, op.up);
    }
}

impl Run<SwigluPairsForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut SwigluPairsForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        pairs_forward(self, op.h, op.both, op.width);
    }
}

impl Run<SwigluPairsBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut SwigluPairsBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        pairs_backward(self, op.dboth, op.dh, op.both, op.width);
    }
}

pub(super) static SWIGLU: Program = program!("swiglu");

/// Elements per work item, `EACH` in `gpu/swiglu.cl`.
const EACH: usize = 4;

pub(super) fn forward(gpu: &Gpu, h: &mut GpuBuffer<f32>, gate: &GpuBuffer<f32>, up: &GpuBuffer<f32>) {
    let length = h.len();
    gpu.launch(&SWIGLU, "swiglu_forward", Groups::over(length.div_ceil(EACH)), arguments![h, gate, up, length]);
}

pub(super) fn backward(
    gpu: &Gpu,
    dgate: &mut GpuBuffer<f32>,
    dup: &mut GpuBuffer<f32>,
    dh: &GpuBuffer<f32>,
    gate: &GpuBuffer<f32>,
    up: &GpuBuffer<f32>,
) {
    let length = dh.len();
    gpu.launch(
        &SWIGLU,
        "swiglu_backward",
        Groups::over(length.div_ceil(EACH)),
        arguments![dgate, dup, dh, gate, up, length],
    );
}

pub(super) fn pairs_forward(gpu: &Gpu, h: &mut GpuBuffer<f32>, both: &GpuBuffer<f32>, width: usize) {
    let length = h.len();
    gpu.launch(&SWIGLU, "swiglu_pairs_forward", Groups::over(length), arguments![h, both, length, width]);
}

pub(super) fn pairs_backward(
    gpu: &Gpu,
    dboth: &mut GpuBuffer<f32>,
    dh: &GpuBuffer<f32>,
    both: &GpuBuffer<f32>,
    width: usize,
) {
    let length = dh.len();
    gpu.launch(&SWIGLU, "swiglu_pairs_backward", Groups::over(length), arguments![dboth, dh, both, length, width]);
}
