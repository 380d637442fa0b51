//! Multiplication by a number (`op/scale.rs`): one pass over memory.

use super::path::multiversion;
use super::{CpuMemory, elements};
use crate::backend::{Checked, Run};
use crate::op::Scale;
use crate::{Buffer, Cpu};

impl Run<Scale<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut Scale<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let factor = op.factor;
        for x in &mut op.tensors {
            elements::split(self, x, |_, x| scale_part(self.path, x, factor));
        }
    }
}

multiversion! {
    fn scale_part<_F>(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }
}
