//! AdamW on a GPU: four streams read, three written, in one pass.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::AdamWUpdate;
use isobit_numerics::adamw::Coefficients;

impl Run<AdamWUpdate<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut AdamWUpdate<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        update(self, op.parameter, op.m, op.v, op.gradient, &op.c);
    }
}

static ADAMW: Program = program!("adamw");

pub(super) fn update(
    gpu: &Gpu,
    parameter: &mut GpuBuffer<f32>,
    m: &mut GpuBuffer<f32>,
    v: &mut GpuBuffer<f32>,
    gradient: &GpuBuffer<f32>,
    c: &Coefficients,
) {
    let length = parameter.len();
    assert_eq!([m.len(), v.len(), gradient.len()], [length; 3], "moments and gradient");
    let arguments = arguments![
        parameter,
        m,
        v,
        gradient,
        length,
        c.decay,
        c.one_minus_beta1,
        c.beta2,
        c.one_minus_beta2,
        c.step_size,
        c.inv_sqrt_c2,
        c.eps,
    ];
    gpu.launch(&ADAMW, "adamw", Groups::over(length), arguments);
}
