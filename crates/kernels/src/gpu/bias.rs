//! Bias on a GPU.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{BiasBackward, BiasForward, TOKEN_BLOCK, token_blocks};

static BIAS: Program = program!("bias");

/// Columns that one group sums: `COLUMNS` in `bias.cl`.
const COLUMNS: usize = 32;

impl Run<BiasForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut BiasForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        forward(self, op.y, op.bias);
    }
}

/// Also used by linear layers.
pub(super) fn forward(gpu: &Gpu, y: &mut GpuBuffer<f32>, bias: &GpuBuffer<f32>) {
    let width = bias.len();
    if width == 0 {
        return;
    }
    let tiles = width.div_ceil(GROUP);
    let groups = Groups::each(y.len() / width * tiles);
    gpu.launch(&BIAS, "bias_forward", groups, arguments![y, bias, dimension(width), dimension(tiles)]);
}

impl Run<BiasBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut BiasBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let width = op.dbias.len();
        let mut starts: Vec<usize> = token_blocks(op.row_starts, TOKEN_BLOCK).map(|block| block.start).collect();
        if starts.is_empty() || width == 0 {
            return;
        }
        let blocks = dimension(starts.len());
        starts.push(op.row_starts[op.row_starts.len() - 1]);
        let starts = self.offsets(&starts);
        let groups = Groups::each(width.div_ceil(COLUMNS));
        self.launch(&BIAS, "bias_backward", groups, arguments![&*op.dbias, op.dy, &starts, blocks, dimension(width)]);
    }
}
