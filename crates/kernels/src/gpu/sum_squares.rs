//! Sums of squares on a GPU, one launch per tensor and level; the results of all tensors come back together.

use super::device::{GROUP, Gpu, Groups, arguments};
use super::memory::{GpuBuffer, Parts, Place};
use super::program::{Program, program};
use crate::backend::DeviceFailure;
use crate::op::sum_squares::BLOCK;
use isobit_numerics::lanes::LANES;

static SUM_SQUARES: Program = program!("sum_squares");

pub(super) fn apply(gpu: &Gpu, tensors: &[&GpuBuffer<f32>]) -> Result<Vec<f32>, DeviceFailure> {
    let slot = gpu.part::<f32>(1);
    let mut results = GpuBuffer::<u8>::new(gpu, tensors.len() * slot);
    let mut slots = Parts::new(gpu, &mut results);
    for x in tensors {
        let slot = slots.take::<f32>(1);
        if !x.is_empty() {
            tensor(gpu, slot, x);
        }
    }
    let bytes = gpu.read(&results)?;
    let of_slot = |(x, slot): (&&GpuBuffer<f32>, &[u8])| match slot.first_chunk::<4>() {
        Some(&sum) if !x.is_empty() => f32::from_ne_bytes(sum),
        _ => 0.0,
    };
    Ok(tensors.iter().zip(bytes.chunks(slot)).map(of_slot).collect())
}

/// Level after level, until one number is left.
fn tensor(gpu: &Gpu, result: Place, x: &GpuBuffer<f32>) {
    let mut kernel = "sum_squares_first";
    let mut below: Option<GpuBuffer<f32>> = None;
    loop {
        let x = below.as_ref().unwrap_or(x);
        let blocks = x.len().div_ceil(BLOCK);
        let groups = Groups::each(blocks.div_ceil(GROUP / LANES));
        if blocks == 1 {
            return gpu.launch(&SUM_SQUARES, kernel, groups, arguments![result, x, x.len()]);
        }
        // The memory is this function's own: the op has no workspace.
        let sums = GpuBuffer::new(gpu, blocks);
        gpu.launch(&SUM_SQUARES, kernel, groups, arguments![&sums, x, x.len()]);
        (kernel, below) = ("sum_squares_further", Some(sums));
    }
}
