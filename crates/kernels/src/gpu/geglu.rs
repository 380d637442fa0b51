//! GeGLU on a GPU.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{GegluBackward, GegluForward};

static GEGLU: Program = program!("geglu");

/// Elements per work item, `EACH` in `gpu/geglu.cl`.
const EACH: usize = 4;

impl Run<GegluForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut GegluForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let length = op.h.len();
        let groups = Groups::over(length.div_ceil(EACH));
        self.launch(&GEGLU, "geglu_forward", groups, arguments![&*op.h, op.gate, op.up, length]);
    }
}

impl Run<GegluBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut GegluBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let length = op.dh.len();
        let groups = Groups::over(length.div_ceil(EACH));
        let arguments = arguments![&*op.dgate, &*op.dup, op.dh, op.gate, op.up, length];
        self.launch(&GEGLU, "geglu_backward", groups, arguments);
    }
}
