//! Column copies on a GPU (`op/columns.rs`).

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::{ColumnMode, Columns, CopyColumns};

impl Run<CopyColumns<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut CopyColumns<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        apply(self, op.y, op.x, &op.p);
    }
}

static COLUMNS: Program = program!("columns");

pub(super) fn apply(gpu: &Gpu, y: &mut GpuBuffer<f32>, x: &GpuBuffer<f32>, p: &Columns) {
    p.check(y.len(), x.len());
    // A work item per element of `y`: the groups that meet there are summed by it.
    let (targets, summed) = if p.gathers() { (1, p.groups) } else { (p.groups, 1) };
    let length = p.tokens * targets * p.width;
    let [row, offset, stride] = [p.from.row, p.from.offset, p.from.stride].map(dimension);
    let [to_row, to_offset, to_stride] = [p.to.row, p.to.offset, p.to.stride].map(dimension);
    let [targets, width, summed] = [targets, p.width, summed].map(dimension);
    let add = u32::from(p.mode == ColumnMode::Add);
    let arguments =
        arguments![y, x, length, targets, width, summed, row, offset, stride, to_row, to_offset, to_stride, add];
    gpu.launch(&COLUMNS, "columns", Groups::over(length), arguments);
}
