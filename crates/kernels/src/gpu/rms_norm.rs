//! RMS norm on a GPU (`op/rms_norm.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use super::token_sums::{self, Blocks};
use crate::backend::{Checked, Run};
use crate::op::{RmsNorm, RmsNormBackward, RmsNormForward};
use isobit_numerics::lanes::LANES;

impl Run<RmsNormForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RmsNormForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let flag = u32::from(p.zero_centred);
        let arguments = arguments![&mut *op.y, &mut *op.inverse, op.x, op.weight, p.tokens, width(p), flag, p.eps];
        self.launch(&RMS_NORM, "rms_norm_forward", Groups::each(p.tokens.div_ceil(TOKENS)), arguments);
    }
}

impl Run<RmsNormBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut RmsNormBackward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let flags = [p.zero_centred, p.accumulate].map(u32::from);
        let arguments =
            arguments![&mut *op.dx, op.dy, op.x, op.inverse, op.weight, p.tokens, width(p), flags[0], flags[1]];
        self.launch(&RMS_NORM, "rms_norm_backward", Groups::each(p.tokens.div_ceil(TOKENS)), arguments);
        let Some(dweight) = op.dweight.as_deref_mut() else { return };
        token_sums::add(self, dweight, op.row_starts, workspace, |Blocks { sums, table, first, tiles, groups }| {
            let arguments = arguments![sums, op.dy, op.x, op.inverse, table, first, width(p), tiles];
            self.launch(&RMS_NORM, "rms_norm_grad_weight", groups, arguments);
        });
    }
}

pub(super) static RMS_NORM: Program = program!("rms_norm");

/// Tokens per group: each has a work item per lane.
const TOKENS: usize = GROUP / LANES;

fn width(p: &RmsNorm) -> u32 {
    u32::try_from(p.width).expect("a width below 2³²")
}
