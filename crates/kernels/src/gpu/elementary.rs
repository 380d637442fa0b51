//! Elementary functions on a GPU.

use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use isobit_numerics::elementary::Function;

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
