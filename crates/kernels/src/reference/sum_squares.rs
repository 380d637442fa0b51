//! Sum of squares, the definition (`docs/numerics.md`, "Sum of squares and clipping").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::SumSquares;
use crate::op::sum_squares::BLOCK;
use isobit_numerics::SoftFma;
use isobit_numerics::lanes::{dot, sum};

impl Run<SumSquares<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut SumSquares<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        for (total, x) in op.sums.iter_mut().zip(op.tensors) {
            let mut level: Vec<f32> = x.chunks(BLOCK).map(|block| dot::<SoftFma>(block, block)).collect();
            while level.len() > 1 {
                level = level.chunks(BLOCK).map(sum).collect();
            }
            *total = level.first().copied().unwrap_or(0.0);
        }
    }
}
