//! SwiGLU (`op/swiglu.rs`). The elementary functions are straight lines, so these loops become vector code.

use super::elements::{self, GRAIN};
use super::path::multiversion;
use super::pool::SharedMut;
use crate::Cpu;
use isobit_numerics::elementary::{silu, silu_grad};

pub(super) fn forward(cpu: &Cpu, h: &mut [f32], gate: &[f32], up: &[f32]) {
    assert_eq!((gate.len(), up.len()), (h.len(), h.len()), "gate and up");
    elements::split(cpu, h, |range, h| forward_part(cpu.path, h, &gate[range.clone()], &up[range]));
}

pub(super) fn backward(cpu: &Cpu, dgate: &mut [f32], dup: &mut [f32], dh: &[f32], gate: &[f32], up: &[f32]) {
    let length = dh.len();
    assert_eq!([dgate.len(), dup.len(), gate.len(), up.len()], [length; 4], "gate, up and their gradients");
    let (dgate, dup) = (SharedMut::new(dgate), SharedMut::new(dup));
    cpu.pool.run_ranges(length, GRAIN, |range| {
        // SAFETY: ranges of different threads do not overlap.
        let (dgate, dup) = unsafe { (dgate.slice(range.clone()), dup.slice(range.clone())) };
        backward_part(cpu.path, dgate, dup, &dh[range.clone()], &gate[range.clone()], &up[range]);
    });
}

multiversion! {
    fn forward_part<F>(h: &mut [f32], gate: &[f32], up: &[f32]) {
        for ((h, gate), up) in h.iter_mut().zip(gate).zip(up) {
            *h = silu::<F>(*gate) * up;
        }
    }
}

multiversion! {
    fn backward_part<F>(dgate: &mut [f32], dup: &mut [f32], dh: &[f32], gate: &[f32], up: &[f32]) {
        let outputs = dgate.iter_mut().zip(dup);
        for ((((dgate, dup), dh), gate), up) in outputs.zip(dh).zip(gate).zip(up) {
            *dup = dh * silu::<F>(*gate);
            *dgate = (dh * up) * silu_grad::<F>(*gate);
        }
    }
}
