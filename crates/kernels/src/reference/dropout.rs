//! Dropout, the definition (`docs/numerics.md`, "Dropout").

use crate::op::Dropout;
use isobit_numerics::philox;

pub(super) fn apply(y: &mut [f32], x: &[f32], p: &Dropout) {
    for (row, ends) in p.row_starts.windows(2).enumerate() {
        let start = ends[0] * p.width;
        for index in start..ends[1] * p.width {
            let word = philox::word(p.key, p.step, p.first_row + row as u32, p.tensor, (index - start) as u64);
            y[index] = if philox::keep(word, p.threshold) { x[index] * p.keep_scale } else { 0.0 };
        }
    }
}
