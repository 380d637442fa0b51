//! Bias on a GPU.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::{BiasBackward, BiasForward, TOKEN_BLOCK, token_blocks};

impl Run<BiasForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut BiasForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        forward(self, op.y, op.bias);
    }
}

impl Run<BiasBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut BiasBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        backward(self, op.dbias, op.dy, op.row_starts);
    }
}

static BIAS: Program = program!("bias");

/// Columns that one group sums: `COLUMNS` in `bias.cl`.
const COLUMNS: usize = 32;

pub(super) fn forward(gpu: &Gpu, y: &mut GpuBuffer<f32>, bias: &GpuBuffer<f32>) {
    let width = bias.len();
    if width == 0 {
        assert!(y.is_empty(), "whole tokens");
        return;
    }
    assert!(y.len().is_multiple_of(width), "whole tokens");
    let tiles = width.div_ceil(GROUP);
    let groups = Groups::each(y.len() / width * tiles);
    gpu.launch(&BIAS, "bias_forward", groups, arguments![y, bias, dimension(width), dimension(tiles)]);
}

pub(super) fn backward(gpu: &Gpu, dbias: &mut GpuBuffer<f32>, dy: &GpuBuffer<f32>, row_starts: &[usize]) {
    let width = dbias.len();
    let tokens = row_starts[row_starts.len() - 1];
    assert_eq!(dy.len(), tokens * width, "tokens of all rows");
    let mut starts: Vec<usize> = token_blocks(row_starts, TOKEN_BLOCK).map(|block| block.start).collect();
    if starts.is_empty() || width == 0 {
        return;
    }
    let blocks = starts.len();
    starts.push(tokens);
    let starts = gpu.offsets(&starts);
    let groups = Groups::each(width.div_ceil(COLUMNS));
    gpu.launch(&BIAS, "bias_backward", groups, arguments![dbias, dy, &starts, dimension(blocks), dimension(width)]);
}
