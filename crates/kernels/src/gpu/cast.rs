//! Casts on a GPU: integer arithmetic on the bits.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::StoredMatrix;
use crate::backend::{Checked, Run};
use crate::buffer::Element;
use crate::op::{ToBf16, ToF16, ToF32};

static CAST: Program = program!("cast");

impl Run<ToBf16<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut ToBf16<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        cast(self, "cast_to_bf16", op.y, op.x);
    }
}

impl Run<ToF16<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut ToF16<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        cast(self, "cast_to_f16", op.y, op.x);
    }
}

impl Run<ToF32<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut ToF32<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        match op.x {
            StoredMatrix::F32(x) => cast(self, "cast_from_f32", op.y, x),
            StoredMatrix::Bf16(x) => cast(self, "cast_from_bf16", op.y, x),
            StoredMatrix::F16(x) => cast(self, "cast_from_f16", op.y, x),
        }
    }
}

fn cast<T: Element, U: Element>(gpu: &Gpu, kernel: &'static str, y: &mut GpuBuffer<T>, x: &GpuBuffer<U>) {
    let length = y.len();
    gpu.launch(&CAST, kernel, Groups::over(length), arguments![y, x, length]);
}
