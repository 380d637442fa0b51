//! Dropout on a GPU: four elements of a row per work item.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::ApplyDropout;

static DROPOUT: Program = program!("dropout");

/// Elements per group: `GROUP_ELEMENTS` in `dropout.cl`.
const GROUP_ELEMENTS: usize = 4 * GROUP;

impl Run<ApplyDropout<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut ApplyDropout<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let mut group_starts = vec![0];
        let mut groups = 0;
        for ends in p.row_starts.windows(2) {
            groups += ((ends[1] - ends[0]) * p.width).div_ceil(GROUP_ELEMENTS);
            group_starts.push(groups);
        }
        if groups == 0 {
            return;
        }
        let (row_starts, group_starts) = (self.offsets(p.row_starts), self.offsets(&group_starts));
        let arguments = arguments![
            &*op.y,
            op.x,
            &row_starts,
            &group_starts,
            dimension(p.row_starts.len() - 1),
            dimension(p.width),
            p.first_row,
            p.tensor,
            p.step,
            p.key.0[0],
            p.key.0[1],
            p.threshold,
            p.keep_scale,
        ];
        self.launch(&DROPOUT, "dropout", Groups::each(groups), arguments);
    }
}
