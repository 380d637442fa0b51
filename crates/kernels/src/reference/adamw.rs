//! AdamW, the definition (`docs/numerics.md`, "AdamW").

use isobit_numerics::SoftFma;
use isobit_numerics::adamw::{self, Coefficients};

pub(super) fn update(parameter: &mut [f32], m: &mut [f32], v: &mut [f32], gradient: &[f32], c: &Coefficients) {
    for i in 0..parameter.len() {
        (parameter[i], m[i], v[i]) = adamw::update::<SoftFma>(parameter[i], m[i], v[i], gradient[i], c);
    }
}
