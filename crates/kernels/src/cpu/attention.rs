//! attention: not written yet.

use crate::Cpu;
use crate::op::Attention;

pub(super) fn workspace(_cpu: &Cpu, _p: &Attention) -> usize {
    todo!()
}

pub(super) fn forward(
    _cpu: &Cpu,
    _o: &mut [f32],
    _lse: &mut [f32],
    _q: &[f32],
    _k: &[f32],
    _v: &[f32],
    _p: &Attention,
    _workspace: &mut [u8],
) {
    todo!()
}

pub(super) fn backward(
    _cpu: &Cpu,
    _grads: (&mut [f32], &mut [f32], &mut [f32]),
    _d_o: &[f32],
    _qkv: (&[f32], &[f32], &[f32]),
    _o: &[f32],
    _lse: &[f32],
    _p: &Attention,
    _workspace: &mut [u8],
) {
    todo!()
}
