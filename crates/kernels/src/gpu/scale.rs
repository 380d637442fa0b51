//! Multiplication by a number on a GPU (`op/scale.rs`).

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::Scale;

static SCALE: Program = program!("scale");

impl Run<Scale<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut Scale<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        let length = op.x.len();
        self.launch(&SCALE, "scale_elements", Groups::over(length), arguments![&*op.x, length, op.factor]);
    }
}
