//! Casts (`op/cast.rs`): integer arithmetic on the bits, vectorised by the compiler.

use super::path::multiversion;
use super::{CpuMemory, elements};
use crate::backend::{Checked, Run};
use crate::op::{ToBf16, ToF16, ToF32};
use crate::{Buffer, Cpu, StoredMatrix};
use half::{bf16, f16};
use isobit_numerics::cast;

impl Run<ToBf16<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut ToBf16<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let ToBf16 { y, x } = op;
        elements::split(self, y, |range, y| to_bf16_part(self.path, y, &x[range]));
    }
}

impl Run<ToF16<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut ToF16<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let ToF16 { y, x } = op;
        elements::split(self, y, |range, y| to_f16_part(self.path, y, &x[range]));
    }
}

impl Run<ToF32<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut ToF32<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let y = &mut *op.y;
        match op.x {
            StoredMatrix::F32(x) => elements::split(self, y, |range, y| y.copy_from_slice(&x[range])),
            StoredMatrix::Bf16(x) => elements::split(self, y, |range, y| from_bf16(self.path, y, &x[range])),
            StoredMatrix::F16(x) => elements::split(self, y, |range, y| from_f16(self.path, y, &x[range])),
        }
    }
}

multiversion! {
    fn to_bf16_part<_F>(y: &mut [bf16], x: &[f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = bf16::from_bits(cast::f32_to_bf16(*x));
        }
    }
}

multiversion! {
    fn to_f16_part<_F>(y: &mut [f16], x: &[f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = f16::from_bits(cast::f32_to_f16(*x));
        }
    }
}

multiversion! {
    pub(super) fn from_bf16<_F>(y: &mut [f32], x: &[bf16]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = cast::bf16_to_f32(x.to_bits());
        }
    }
}

multiversion! {
    pub(super) fn from_f16<_F>(y: &mut [f32], x: &[f16]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = cast::f16_to_f32(x.to_bits());
        }
    }
}
