//! cast: not written yet.

use crate::StoredMatrix;
use crate::Cpu;
use half::bf16;
use half::f16;

pub(super) fn to_bf16(_cpu: &Cpu, _y: &mut [bf16], _x: &[f32]) {
    todo!()
}

pub(super) fn to_f16(_cpu: &Cpu, _y: &mut [f16], _x: &[f32]) {
    todo!()
}

pub(super) fn to_f32(_cpu: &Cpu, _y: &mut [f32], _x: StoredMatrix<Cpu>) {
    todo!()
}
