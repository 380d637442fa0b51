//! Dropout on a GPU: four elements of a row per work item.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::{ApplyDropout, Dropout};

impl Run<ApplyDropout<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut ApplyDropout<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        apply(self, op.y, op.x, &op.p);
    }
}

static DROPOUT: Program = program!("dropout");

/// Elements of one group: `GROUP_ELEMENTS` in `dropout.cl`.
const GROUP_ELEMENTS: usize = 4 * GROUP;

pub(super) fn apply(gpu: &Gpu, y: &mut GpuBuffer<f32>, x: &GpuBuffer<f32>, p: &Dropout) {
    let length = p.row_starts[p.row_starts.len() - 1] * p.width;
    assert_eq!((x.len(), y.len()), (length, length), "tokens of all rows");
    let mut group_starts = vec![0];
    let mut groups = 0;
    for ends in p.row_starts.windows(2) {
        assert!(ends[0] <= ends[1], "row starts ascend");
        groups += ((ends[1] - ends[0]) * p.width).div_ceil(GROUP_ELEMENTS);
        group_starts.push(groups);
    }
    if groups == 0 {
        return;
    }
    let (row_starts, group_starts) = (gpu.offsets(p.row_starts), gpu.offsets(&group_starts));
    let arguments = arguments![
        y,
        x,
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
    gpu.launch(&DROPOUT, "dropout", Groups::each(groups), arguments);
}
