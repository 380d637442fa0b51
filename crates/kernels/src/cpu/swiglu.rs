//! swiglu: not written yet.

use crate::Cpu;

pub(super) fn forward(_cpu: &Cpu, _h: &mut [f32], _gate: &[f32], _up: &[f32]) {
    todo!()
}

pub(super) fn backward(_cpu: &Cpu, _dgate: &mut [f32], _dup: &mut [f32], _dh: &[f32], _gate: &[f32], _up: &[f32]) {
    todo!()
}
