//! Sum of squares, the definition (`docs/numerics.md`, "Sum of squares and clipping").

use crate::op::sum_squares::BLOCK;
use isobit_numerics::SoftFma;
use isobit_numerics::lanes::{dot, sum};

pub(super) fn apply(x: &[f32]) -> f32 {
    let mut level: Vec<f32> = x.chunks(BLOCK).map(|block| dot::<SoftFma>(block, block)).collect();
    while level.len() > 1 {
        level = level.chunks(BLOCK).map(sum).collect();
    }
    level.first().copied().unwrap_or(0.0)
}
