//! SwiGLU, the definition (`docs/numerics.md`, "SwiGLU").

use isobit_numerics::SoftFma;
use isobit_numerics::elementary::{silu, silu_grad};

pub(super) fn forward(h: &mut [f32], gate: &[f32], up: &[f32]) {
    for index in 0..h.len() {
        h[index] = silu::<SoftFma>(gate[index]) * up[index];
    }
}

pub(super) fn backward(dgate: &mut [f32], dup: &mut [f32], dh: &[f32], gate: &[f32], up: &[f32]) {
    for index in 0..dh.len() {
        dup[index] = dh[index] * silu::<SoftFma>(gate[index]);
        dgate[index] = (dh[index] * up[index]) * silu_grad::<SoftFma>(gate[index]);
    }
}
