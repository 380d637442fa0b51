//! L2 norm on a GPU (`op/l2_norm.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{L2Norm, L2NormBackward, L2NormForward};
use isobit_numerics::lanes::LANES;

pub(super) static L2_NORM: Program = program!("l2_norm");

/// Eight tokens per group, each with a work item per lane.
fn groups(p: &L2Norm) -> Groups {
    Groups::each(p.tokens.div_ceil(GROUP / LANES))
}

impl Run<L2NormForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut L2NormForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let arguments = arguments![&*op.y, &*op.inverse, op.x, p.tokens, dimension(p.width), p.eps, p.factor];
        self.launch(&L2_NORM, "l2_norm_forward", groups(p), arguments);
    }
}

impl Run<L2NormBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut L2NormBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let arguments = arguments![&*op.dx, op.dy, op.x, op.inverse, p.tokens, dimension(p.width), p.factor];
        self.launch(&L2_NORM, "l2_norm_backward", groups(p), arguments);
    }
}
