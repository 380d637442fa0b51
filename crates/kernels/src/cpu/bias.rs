//! bias: not written yet.

use crate::Cpu;

pub(super) fn forward(_cpu: &Cpu, _y: &mut [f32], _bias: &[f32]) {
    todo!()
}

pub(super) fn backward(_cpu: &Cpu, _dbias: &mut [f32], _dy: &[f32], _row_starts: &[usize]) {
    todo!()
}
