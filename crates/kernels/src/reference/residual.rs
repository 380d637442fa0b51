//! Residual addition and scaling, the definition (`docs/numerics.md`, "Residual").

pub(super) fn add(y: &mut [f32], a: &[f32], b: &[f32]) {
    for index in 0..y.len() {
        y[index] = a[index] + b[index];
    }
}

pub(super) fn scale(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}
