//! Sum of two tensors on a GPU (`op/add.rs`).

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::Add;

pub(super) static ADD: Program = program!("add");

/// Elements per work item, `EACH` in `gpu/add.cl`.
const EACH: usize = 4;

impl Run<Add<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut Add<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let length = op.y.len();
        self.launch(&ADD, "add_elements", Groups::over(length.div_ceil(EACH)), arguments![&*op.y, op.a, op.b, length]);
    }
}
