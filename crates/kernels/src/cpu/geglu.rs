//! GeGLU (`op/geglu.rs`). The functions are branch-free, so loops over lanes are vectorized.

use super::CpuMemory;
use super::elements::{self, GRAIN};
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::{Checked, Run};
use crate::op::{GegluBackward, GegluForward};
use crate::{Buffer, Cpu};
use isobit_numerics::elementary::{gelu, gelu_grad};
use isobit_numerics::lanes::LANES;

impl Run<GegluForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut GegluForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let GegluForward { h, gate, up } = op;
        elements::split(self, h, |range, h| forward_part(self.path, h, &gate[range.clone()], &up[range]));
    }
}

impl Run<GegluBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut GegluBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let GegluBackward { dgate, dup, dh, gate, up } = op;
        let length = dh.len();
        let (dgate, dup) = (SharedMut::new(dgate), SharedMut::new(dup));
        self.pool.run_ranges(length, GRAIN, |range| {
            // SAFETY: ranges of different threads do not overlap.
            let (dgate, dup) = unsafe { (dgate.slice(range.clone()), dup.slice(range.clone())) };
            backward_part(self.path, dgate, dup, &dh[range.clone()], &gate[range.clone()], &up[range]);
        });
    }
}

// Lane blocks in local arrays: inputs and outputs cannot alias, so no runtime checks are needed.

multiversion! {
    fn forward_part<F>(h: &mut [f32], gate: &[f32], up: &[f32]) {
        let whole = h.len() / LANES * LANES;
        let blocks = h[..whole].as_chunks_mut::<LANES>().0.iter_mut();
        for ((h, gate), up) in blocks.zip(gate.as_chunks::<LANES>().0).zip(up.as_chunks::<LANES>().0) {
            let mut block = [0.0; LANES];
            for lane in 0..LANES {
                block[lane] = gelu::<F>(gate[lane]) * up[lane];
            }
            *h = block;
        }
        for index in whole..h.len() {
            h[index] = gelu::<F>(gate[index]) * up[index];
        }
    }
}

multiversion! {
    fn backward_part<F>(dgate: &mut [f32], dup: &mut [f32], dh: &[f32], gate: &[f32], up: &[f32]) {
        let whole = dh.len() / LANES * LANES;
        let outputs = dgate[..whole].as_chunks_mut::<LANES>().0.iter_mut().zip(dup[..whole].as_chunks_mut::<LANES>().0);
        let inputs = dh.as_chunks::<LANES>().0.iter().zip(gate.as_chunks::<LANES>().0).zip(up.as_chunks::<LANES>().0);
        for ((dgate, dup), ((dh, gate), up)) in outputs.zip(inputs) {
            let (mut gates, mut ups) = ([0.0; LANES], [0.0; LANES]);
            for lane in 0..LANES {
                ups[lane] = dh[lane] * gelu::<F>(gate[lane]);
                gates[lane] = (dh[lane] * up[lane]) * gelu_grad::<F>(gate[lane]);
            }
            (*dgate, *dup) = (gates, ups);
        }
        for index in whole..dh.len() {
            dup[index] = dh[index] * gelu::<F>(gate[index]);
            dgate[index] = (dh[index] * up[index]) * gelu_grad::<F>(gate[index]);
        }
    }
}
