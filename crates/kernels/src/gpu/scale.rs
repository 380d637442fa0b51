//! Multiplication by a number on a GPU (`op/scale.rs`).

use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use super::{GpuMemory, multi_tensor};
use crate::backend::{Checked, Run};
use crate::op::Scale;

static SCALE: Program = program!("scale");

impl Run<Scale<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut Scale<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        if multi_tensor::serves(self) {
            return multi_tensor::scale(self, &op.tensors, op.factor);
        }
        for x in &op.tensors {
            let length = x.len();
            self.launch(&SCALE, "scale_elements", Groups::over(length), arguments![&**x, length, op.factor]);
        }
    }
}
