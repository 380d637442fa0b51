//! Elementary functions (`op/elementary.rs`): blocks of 32 lanes, so the function is selected
//! outside the loop.

use super::path::multiversion;
use super::{CpuMemory, elements};
use crate::backend::{Checked, Run};
use crate::op::Elementary;
use crate::{Buffer, Cpu};
use isobit_numerics::elementary::Function;
use isobit_numerics::lanes::LANES;

impl Run<Elementary<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut Elementary<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let Elementary { y, x, .. } = op;
        let function = op.function;
        elements::split(self, y, |range, y| apply_part(self.path, y, &x[range], function));
    }
}

multiversion! {
    fn apply_part<F>(y: &mut [f32], x: &[f32], function: Function) {
        let (y_blocks, y_tail) = y.as_chunks_mut::<LANES>();
        let (x_blocks, x_tail) = x.as_chunks::<LANES>();
        for (y, x) in y_blocks.iter_mut().zip(x_blocks) {
            *y = function.apply_lanes::<F>(x);
        }
        if !x_tail.is_empty() {
            let mut padded = [0.0; LANES];
            padded[..x_tail.len()].copy_from_slice(x_tail);
            y_tail.copy_from_slice(&function.apply_lanes::<F>(&padded)[..x_tail.len()]);
        }
    }
}
