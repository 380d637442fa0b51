//! SwiGLU (`op/swiglu.rs`). The elementary functions are branch-free, so loops over lanes are
//! vectorized.

use super::CpuMemory;
use super::elements::{self, GRAIN};
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::{Checked, Run};
use crate::op::{SwigluBackward, SwigluForward, SwigluPairsBackward, SwigluPairsForward};
use crate::{Buffer, Cpu};
use isobit_numerics::Fma;
use isobit_numerics::elementary::{silu, silu_grad};
use isobit_numerics::lanes::{LANES, Lanes};

impl Run<SwigluForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut SwigluForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let SwigluForward { h, gate, up } = op;
        elements::split(self, h, |range, h| forward_part(self.path, h, &gate[range.clone()], &up[range]));
    }
}

impl Run<SwigluBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut SwigluBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let SwigluBackward { dgate, dup, dh, gate, up } = op;
        let length = dh.len();
        let (dgate, dup) = (SharedMut::new(dgate), SharedMut::new(dup));
        self.pool.run_ranges(length, GRAIN, |range| {
            // SAFETY: ranges of different threads do not overlap.
            let (dgate, dup) = unsafe { (dgate.slice(range.clone()), dup.slice(range.clone())) };
            backward_part(self.path, dgate, dup, &dh[range.clone()], &gate[range.clone()], &up[range]);
        });
    }
}

impl Run<SwigluPairsForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut SwigluPairsForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let SwigluPairsForward { h, both, .. } = op;
        let width = op.width;
        self.pool.run_rows(h, width, |rows, h| {
            for (row, h) in rows.zip(h.chunks_exact_mut(width)) {
                let (gate, up) = both[2 * row * width..][..2 * width].split_at(width);
                forward_part(self.path, h, gate, up);
            }
        });
    }
}

impl Run<SwigluPairsBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut SwigluPairsBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let SwigluPairsBackward { dboth, dh, both, .. } = op;
        let width = op.width;
        self.pool.run_rows(dboth, 2 * width, |rows, dboth| {
            for (row, dboth) in rows.zip(dboth.chunks_exact_mut(2 * width)) {
                let (dgate, dup) = dboth.split_at_mut(width);
                let (gate, up) = both[2 * row * width..][..2 * width].split_at(width);
                backward_part(self.path, dgate, dup, &dh[row * width..][..width], gate, up);
            }
        });
    }
}

multiversion! {
    fn forward_part<F>(h: &mut [f32], gate: &[f32], up: &[f32]) {
        let whole = h.len() / LANES * LANES;
        let blocks = h[..whole].as_chunks_mut::<LANES>().0.iter_mut();
        for ((h, gate), up) in blocks.zip(gate.as_chunks().0).zip(up.as_chunks().0) {
            *h = forward_lanes::<F>(gate, up);
        }
        for index in whole..h.len() {
            h[index] = silu::<F>(gate[index]) * up[index];
        }
    }
}

multiversion! {
    fn backward_part<F>(dgate: &mut [f32], dup: &mut [f32], dh: &[f32], gate: &[f32], up: &[f32]) {
        let whole = dh.len() / LANES * LANES;
        let outputs = dgate[..whole].as_chunks_mut::<LANES>().0.iter_mut().zip(dup[..whole].as_chunks_mut::<LANES>().0);
        let inputs = dh.as_chunks::<LANES>().0.iter().zip(gate.as_chunks::<LANES>().0).zip(up.as_chunks::<LANES>().0);
        for ((dgate, dup), ((dh, gate), up)) in outputs.zip(inputs) {
            (*dgate, *dup) = backward_lanes::<F>(dh, gate, up);
        }
        for index in whole..dh.len() {
            dup[index] = dh[index] * silu::<F>(gate[index]);
            dgate[index] = (dh[index] * up[index]) * silu_grad::<F>(gate[index]);
        }
    }
}

// Lane blocks in local arrays: inputs and outputs cannot alias, so no runtime checks are needed.

#[inline(always)]
fn forward_lanes<F: Fma>(gate: &Lanes, up: &Lanes) -> Lanes {
    let mut h = [0.0; LANES];
    for lane in 0..LANES {
        h[lane] = silu::<F>(gate[lane]) * up[lane];
    }
    h
}

#[inline(always)]
fn backward_lanes<F: Fma>(dh: &Lanes, gate: &Lanes, up: &Lanes) -> (Lanes, Lanes) {
    let (mut dgate, mut dup) = ([0.0; LANES], [0.0; LANES]);
    for lane in 0..LANES {
        dup[lane] = dh[lane] * silu::<F>(gate[lane]);
        dgate[lane] = (dh[lane] * up[lane]) * silu_grad::<F>(gate[lane]);
    }
    (dgate, dup)
}
