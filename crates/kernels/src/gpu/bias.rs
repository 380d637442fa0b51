//! Bias on a GPU.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use super::token_sums::{self, Blocks};
use crate::backend::{Checked, Run};
use crate::op::{BiasBackward, BiasForward};

static BIAS: Program = program!("bias");

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
    fn execute(&self, op: &mut BiasBackward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        let width = dimension(op.dbias.len());
        token_sums::add(self, op.dbias, op.row_starts, workspace, |Blocks { sums, table, first, tiles, groups }| {
            self.launch(&BIAS, "bias_backward", groups, arguments![sums, op.dy, table, first, width, tiles]);
        });
    }
}
