//! Column copies on a GPU (`op/columns.rs`).

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{ColumnMode, CopyColumns};

pub(super) static COLUMNS: Program = program!("columns");

impl Run<CopyColumns<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut CopyColumns<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        // One work item per element of `y`; it sums the groups that contribute to it.
        let (targets, summed) = if p.gathers() { (1, p.groups) } else { (p.groups, 1) };
        let length = p.tokens * targets * p.width;
        let [row, offset, stride] = [p.from.row, p.from.offset, p.from.stride].map(dimension);
        let [to_row, to_offset, to_stride] = [p.to.row, p.to.offset, p.to.stride].map(dimension);
        let [targets, width, summed] = [targets, p.width, summed].map(dimension);
        let add = u32::from(p.mode == ColumnMode::Add);
        let arguments = arguments![
            &*op.y, op.x, length, targets, width, summed, row, offset, stride, to_row, to_offset, to_stride, add
        ];
        self.launch(&COLUMNS, "columns", Groups::over(length), arguments);
    }
}
