//! Casts, the definition (`docs/numerics.md`, "Casts").

use super::ReferenceMemory;
use crate::backend::{Checked, Run};
use crate::op::{ToBf16, ToF16, ToF32};
use crate::{Buffer, Element, Reference, StoredMatrix};
use half::{bf16, f16};
use isobit_numerics::cast;

impl Run<ToBf16<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut ToBf16<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let ToBf16 { y, x } = op;
        for index in 0..y.len() {
            y[index] = bf16::from_bits(cast::f32_to_bf16(x[index]));
        }
    }
}

impl Run<ToF16<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut ToF16<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let ToF16 { y, x } = op;
        for index in 0..y.len() {
            y[index] = f16::from_bits(cast::f32_to_f16(x[index]));
        }
    }
}

impl Run<ToF32<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut ToF32<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        match op.x {
            StoredMatrix::F32(x) => widen(op.y, x),
            StoredMatrix::Bf16(x) => widen(op.y, x),
            StoredMatrix::F16(x) => widen(op.y, x),
        }
    }
}

fn widen<T: Element>(y: &mut [f32], x: &[T]) {
    for index in 0..y.len() {
        y[index] = x[index].to_f32();
    }
}
