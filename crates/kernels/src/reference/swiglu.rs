//! swiglu: not written yet.



pub(super) fn forward(_h: &mut [f32], _gate: &[f32], _up: &[f32]) {
    todo!()
}

pub(super) fn backward(_dgate: &mut [f32], _dup: &mut [f32], _dh: &[f32], _gate: &[f32], _up: &[f32]) {
    todo!()
}
