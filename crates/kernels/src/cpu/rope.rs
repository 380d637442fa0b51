//! rope: not written yet.

use crate::op::Rope;
use crate::Cpu;

pub(super) fn forward(_cpu: &Cpu, _x: &mut [f32], _cos: &[f32], _sin: &[f32], _positions: &[u32], _p: &Rope) {
    todo!()
}

pub(super) fn backward(_cpu: &Cpu, _dx: &mut [f32], _cos: &[f32], _sin: &[f32], _positions: &[u32], _p: &Rope) {
    todo!()
}
