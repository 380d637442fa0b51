//! dropout: not written yet.

use crate::op::Dropout;
use crate::Cpu;

pub(super) fn apply(_cpu: &Cpu, _y: &mut [f32], _x: &[f32], _p: &Dropout) {
    todo!()
}
