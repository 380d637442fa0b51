//! Elementary functions on a GPU.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::Elementary;
use isobit_numerics::elementary::Function;

impl Run<Elementary<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut Elementary<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        apply(self, op.y, op.x, op.function);
    }
}

static ELEMENTARY: Program = program!("elementary");

pub(super) fn apply(gpu: &Gpu, y: &mut GpuBuffer<f32>, x: &GpuBuffer<f32>, function: Function) {
    assert_eq!(y.len(), x.len(), "as many results as arguments");
    let kernel = match function {
        Function::Exp => "elementary_exp",
        Function::Exp2 => "elementary_exp2",
        Function::Ln => "elementary_ln",
        Function::Sin => "elementary_sin",
        Function::Cos => "elementary_cos",
        Function::Tanh => "elementary_tanh",
        Function::Sigmoid => "elementary_sigmoid",
        Function::Silu => "elementary_silu",
        Function::SiluGrad => "elementary_silu_grad",
        Function::Softplus => "elementary_softplus",
        Function::Rsqrt => "elementary_rsqrt",
    };
    let length = y.len();
    gpu.launch(&ELEMENTARY, kernel, Groups::over(length), arguments![y, x, length]);
}
