//! embedding: not written yet.

use crate::StoredMatrix;
use crate::Cpu;

pub(super) fn forward(_cpu: &Cpu, _y: &mut [f32], _table: StoredMatrix<Cpu>, _ids: &[u32], _width: usize) {
    todo!()
}

pub(super) fn workspace(_cpu: &Cpu, _tokens: usize) -> usize {
    todo!()
}

pub(super) fn backward(_cpu: &Cpu, _dtable: &mut [f32], _dy: &[f32], _ids: &[u32], _width: usize, _workspace: &mut [u8]) {
    todo!()
}
