//! Sum of squares on a GPU, one launch per level.

use super::device::{GROUP, Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::DeviceFailure;
use crate::op::sum_squares::BLOCK;
use isobit_numerics::lanes::LANES;

static SUM_SQUARES: Program = program!("sum_squares");

pub(super) fn apply(gpu: &Gpu, x: &GpuBuffer<f32>) -> Result<f32, DeviceFailure> {
    if x.is_empty() {
        return gpu.device.check().map(|()| 0.0);
    }
    let mut sums = level(gpu, "sum_squares_first", x);
    while sums.len() > 1 {
        sums = level(gpu, "sum_squares_further", &sums);
    }
    Ok(gpu.read(&sums)?[0])
}

/// The sums of all blocks of `x`. The memory is this function's own: the op has no workspace, and its host waits anyway.
fn level(gpu: &Gpu, kernel: &'static str, x: &GpuBuffer<f32>) -> GpuBuffer<f32> {
    let blocks = x.len().div_ceil(BLOCK);
    let sums = GpuBuffer::new(gpu, blocks);
    gpu.launch(&SUM_SQUARES, kernel, Groups::each(blocks.div_ceil(GROUP / LANES)), arguments![&sums, x, x.len()]);
    sums
}
