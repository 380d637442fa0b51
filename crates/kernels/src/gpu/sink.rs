//! Attention sinks on a GPU (`op/sink.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::sink::head_width;
use crate::op::{SinkBackward, SinkForward};
use isobit_numerics::lanes::LANES;

static SINK: Program = program!("sink");

/// Heads of tokens per group, each with a work item per lane.
fn groups(heads: usize) -> Groups {
    Groups::each(heads.div_ceil(GROUP / LANES))
}

impl Run<SinkForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut SinkForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let (count, heads) = (op.lse.len(), dimension(op.sink.len()));
        let width = dimension(head_width(op.o.len(), count));
        let arguments = arguments![&*op.o, &*op.lse, op.sink, count, heads, width];
        self.launch(&SINK, "sink_forward", groups(count), arguments);
    }
}

impl Run<SinkBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut SinkBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let (count, heads) = (op.lse.len(), dimension(op.sink.len()));
        let width = dimension(head_width(op.o.len(), count));
        let arguments = arguments![&*op.terms, op.d_o, op.o, op.lse, op.sink, count, heads, width];
        self.launch(&SINK, "sink_backward", groups(count), arguments);
    }
}
