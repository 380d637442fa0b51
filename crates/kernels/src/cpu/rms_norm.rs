//! rms_norm: not written yet.

use crate::op::RmsNorm;
use crate::Cpu;

pub(super) fn forward(_cpu: &Cpu, _y: &mut [f32], _inverse: &mut [f32], _x: &[f32], _weight: &[f32], _p: &RmsNorm) {
    todo!()
}

pub(super) fn backward(_cpu: &Cpu, _dx: &mut [f32], _dweight: Option<&mut [f32]>, _dy: &[f32], _x: &[f32], _inverse: &[f32], _weight: &[f32], _p: &RmsNorm, _row_starts: &[usize]) {
    todo!()
}
