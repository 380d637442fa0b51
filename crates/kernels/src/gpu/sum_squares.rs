//! Sums of squares on a GPU, one launch per level, or per tensor and level if a launch takes only
//! one tensor.

use super::device::{GROUP, Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use super::{GpuMemory, multi_tensor};
use crate::backend::{Checked, Run};
use crate::op::SumSquares;
use crate::op::sum_squares::BLOCK;
use isobit_numerics::lanes::LANES;

static SUM_SQUARES: Program = program!("sum_squares");

impl Run<SumSquares<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut SumSquares<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        self.zero(op.sums);
        if multi_tensor::serves(self) {
            return multi_tensor::sums_of_squares(self, op.sums, op.tensors);
        }
        for (index, x) in op.tensors.iter().enumerate().filter(|(_, x)| !x.is_empty()) {
            tensor(self, op.sums, index, x);
        }
    }
}

/// Level by level, until one number is left: `sums[index]`.
fn tensor(gpu: &Gpu, sums: &GpuBuffer<f32>, index: usize, x: &GpuBuffer<f32>) {
    let mut kernel = "sum_squares_first";
    let mut below: Option<GpuBuffer<f32>> = None;
    loop {
        let x = below.as_ref().unwrap_or(x);
        let blocks = x.len().div_ceil(BLOCK);
        let groups = Groups::each(blocks.div_ceil(GROUP / LANES));
        if blocks == 1 {
            return gpu.launch(&SUM_SQUARES, kernel, groups, arguments![sums, index, x, x.len()]);
        }
        // Allocated here: the op has no workspace.
        let level = GpuBuffer::new(gpu, blocks);
        gpu.launch(&SUM_SQUARES, kernel, groups, arguments![&level, 0usize, x, x.len()]);
        (kernel, below) = ("sum_squares_further", Some(level));
    }
}
