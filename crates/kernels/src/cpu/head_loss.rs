//! head_loss: not written yet.

use crate::op::HeadLoss;
use crate::Matrix;
use crate::Backend;
use crate::Cpu;

pub(super) fn workspace(_cpu: &Cpu, _p: &HeadLoss) -> usize {
    todo!()
}

pub(super) fn forward(_cpu: &Cpu, _loss: &mut [f32], _lse: &mut [f32], _best: &mut [u32], _h: &<Cpu as Backend>::Rows, _head: Matrix<Cpu>, _labels: &[i32], _p: &HeadLoss, _workspace: &mut [u8]) {
    todo!()
}

pub(super) fn backward(_cpu: &Cpu, _dh: &mut [f32], _dhead: Option<&mut [f32]>, _h: (&<Cpu as Backend>::Rows, &[f32]), _head: Matrix<Cpu>, _labels: &[i32], _lse: &[f32], _weight: &[f32], _p: &HeadLoss, _workspace: &mut [u8]) {
    todo!()
}
