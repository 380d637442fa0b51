//! thin: not written yet.

use crate::op::Thin;
use crate::Cpu;

pub(super) fn contract(_cpu: &Cpu, _u: &mut [f32], _x: &[f32], _factor: &[f32], _p: &Thin) {
    todo!()
}

pub(super) fn expand(_cpu: &Cpu, _y: &mut [f32], _u: &[f32], _factor: &[f32], _p: &Thin) {
    todo!()
}

pub(super) fn outer(_cpu: &Cpu, _dfactor: &mut [f32], _u: &[f32], _x: &[f32], _p: &Thin, _row_starts: &[usize]) {
    todo!()
}
