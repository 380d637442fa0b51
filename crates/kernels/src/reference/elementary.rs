//! Elementary functions, the definition (`docs/numerics.md`, "Elementary functions").

use isobit_numerics::SoftFma;
use isobit_numerics::elementary::Function;

pub(super) fn apply(y: &mut [f32], x: &[f32], function: Function) {
    for index in 0..y.len() {
        y[index] = function.apply::<SoftFma>(x[index]);
    }
}
