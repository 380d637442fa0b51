//! elementary: not written yet.

use isobit_numerics::elementary::Function;

pub(super) fn apply(_y: &mut [f32], _x: &[f32], _function: Function) {
    todo!()
}
