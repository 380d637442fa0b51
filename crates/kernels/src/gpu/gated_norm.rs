//! Gated norm on a GPU (`op/gated_norm.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{GatedNorm, GatedNormBackward, GatedNormForward};
use isobit_numerics::lanes::LANES;

pub(super) static GATED_NORM: Program = program!("gated_norm");

/// Eight tokens per group, each with a work item per lane.
fn groups(p: &GatedNorm) -> Groups {
    Groups::each(p.tokens.div_ceil(GROUP / LANES))
}

impl Run<GatedNormForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut GatedNormForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let arguments = arguments![&*op.y, &*op.inverse, op.h, op.z, op.weight, p.tokens, dimension(p.width), p.eps];
        self.launch(&GATED_NORM, "gated_norm_forward", groups(p), arguments);
    }
}

impl Run<GatedNormBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut GatedNormBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let width = dimension(p.width);
        let arguments = arguments![&*op.dh, &*op.dz, op.dy, op.h, op.z, op.inverse, op.weight, p.tokens, width];
        self.launch(&GATED_NORM, "gated_norm_backward", groups(p), arguments);
        let Some(dweight) = &op.dweight else { return };
        let blocks = self.token_blocks(op.row_starts);
        let count = dimension(blocks.len() / 2);
        let arguments = arguments![&**dweight, op.dy, op.h, op.z, op.inverse, &blocks, count, width];
        self.launch(&GATED_NORM, "gated_norm_grad_weight", Groups::each(p.width.div_ceil(LANES)), arguments);
    }
}
