//! Dropout, the definition (`docs/numerics.md`, "Dropout").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::ApplyDropout;
use isobit_numerics::philox;

impl Run<ApplyDropout<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut ApplyDropout<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let ApplyDropout { y, x, p } = op;
        for (row, ends) in p.row_starts.windows(2).enumerate() {
            let start = ends[0] * p.width;
            for index in start..ends[1] * p.width {
                let word = philox::word(p.key, p.step, p.first_row + row as u32, p.tensor, (index - start) as u64);
                y[index] = if philox::keep(word, p.threshold) { x[index] * p.keep_scale } else { 0.0 };
            }
        }
    }
}
