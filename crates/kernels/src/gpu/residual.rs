//! Residual addition and scaling on a GPU.

use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};

static RESIDUAL: Program = program!("residual");

pub(super) fn add(gpu: &Gpu, y: &mut GpuBuffer<f32>, a: &GpuBuffer<f32>, b: &GpuBuffer<f32>) {
    let length = y.len();
    assert_eq!((a.len(), b.len()), (length, length), "summands");
    gpu.launch(&RESIDUAL, "residual_add", Groups::over(length), arguments![y, a, b, length]);
}

pub(super) fn scale(gpu: &Gpu, x: &mut GpuBuffer<f32>, factor: f32) {
    let length = x.len();
    gpu.launch(&RESIDUAL, "residual_scale", Groups::over(length), arguments![x, length, factor]);
}
