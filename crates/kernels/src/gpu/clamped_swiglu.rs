//! Clamped SwiGLU on a GPU.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{ClampedSwigluBackward, ClampedSwigluForward};

static CLAMPED_SWIGLU: Program = program!("clamped_swiglu");

impl Run<ClampedSwigluForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut ClampedSwigluForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let length = op.h.len();
        let arguments = arguments![&*op.h, op.both, length, op.p.alpha, op.p.limit];
        self.launch(&CLAMPED_SWIGLU, "clamped_swiglu_forward", Groups::over(length), arguments);
    }
}

impl Run<ClampedSwigluBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut ClampedSwigluBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let length = op.dh.len();
        let arguments = arguments![&*op.dboth, op.dh, op.both, length, op.p.alpha, op.p.limit];
        self.launch(&CLAMPED_SWIGLU, "clamped_swiglu_backward", Groups::over(length), arguments);
    }
}
