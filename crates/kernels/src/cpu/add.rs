//! Sum of two tensors (`op/add.rs`): one pass over memory.

use super::path::multiversion;
use super::{CpuMemory, elements};
use crate::backend::{Checked, Run};
use crate::op::Add;
use crate::{Buffer, Cpu};

impl Run<Add<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut Add<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let Add { y, a, b } = op;
        elements::split(self, y, |range, y| add_part(self.path, y, &a[range.clone()], &b[range]));
    }
}

multiversion! {
    fn add_part<_F>(y: &mut [f32], a: &[f32], b: &[f32]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = a + b;
        }
    }
}
