//! adamw: not written yet.

use crate::Cpu;
use isobit_numerics::adamw::Coefficients;

pub(super) fn update(_cpu: &Cpu, _parameter: &mut [f32], _m: &mut [f32], _v: &mut [f32], _gradient: &[f32], _c: &Coefficients) {
    todo!()
}
