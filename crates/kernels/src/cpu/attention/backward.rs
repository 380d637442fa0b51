//! later
use crate::Cpu;
use crate::op::Attention;
pub(super) fn workspace(_cpu: &Cpu, _p: &Attention) -> usize { 0 }
pub(in crate::cpu) fn backward(_cpu: &Cpu, _grads: (&mut [f32], &mut [f32], &mut [f32]), _d_o: &[f32], _qkv: (&[f32], &[f32], &[f32]), _o: &[f32], _lse: &[f32], _p: &Attention, _workspace: &mut [u8]) {
}
