//! Multiplication by a number on a GPU.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::Scale;

static RESIDUAL: Program = program!("residual");

impl Run<Scale<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut Scale<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        let length = op.x.len();
        self.launch(&RESIDUAL, "residual_scale", Groups::over(length), arguments![&*op.x, length, op.factor]);
    }
}
