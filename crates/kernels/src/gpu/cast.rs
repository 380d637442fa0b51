//! Casts on a GPU: integer arithmetic on the bits.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::StoredMatrix;
use crate::backend::Run;
use crate::buffer::Element;
use crate::op::{ToBf16, ToF16, ToF32};
use half::{bf16, f16};

impl Run<ToBf16<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut ToBf16<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        to_bf16(self, op.y, op.x);
    }
}

impl Run<ToF16<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut ToF16<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        to_f16(self, op.y, op.x);
    }
}

impl Run<ToF32<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut ToF32<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        to_f32(self, op.y, op.x);
    }
}

static CAST: Program = program!("cast");

pub(super) fn to_bf16(gpu: &Gpu, y: &mut GpuBuffer<bf16>, x: &GpuBuffer<f32>) {
    cast(gpu, "cast_to_bf16", y, x);
}

pub(super) fn to_f16(gpu: &Gpu, y: &mut GpuBuffer<f16>, x: &GpuBuffer<f32>) {
    cast(gpu, "cast_to_f16", y, x);
}

pub(super) fn to_f32(gpu: &Gpu, y: &mut GpuBuffer<f32>, x: StoredMatrix<GpuMemory>) {
    match x {
        StoredMatrix::F32(x) => cast(gpu, "cast_from_f32", y, x),
        StoredMatrix::Bf16(x) => cast(gpu, "cast_from_bf16", y, x),
        StoredMatrix::F16(x) => cast(gpu, "cast_from_f16", y, x),
    }
}

fn cast<T: Element, U: Element>(gpu: &Gpu, kernel: &'static str, y: &mut GpuBuffer<T>, x: &GpuBuffer<U>) {
    assert_eq!(x.len(), y.len(), "numbers to cast");
    let length = y.len();
    gpu.launch(&CAST, kernel, Groups::over(length), arguments![y, x, length]);
}
