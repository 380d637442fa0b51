//! Elementary functions on a GPU.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::Elementary;
use isobit_numerics::elementary::Function;

static ELEMENTARY: Program = program!("elementary");

impl Run<Elementary<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut Elementary<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let kernel = match op.function {
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
        let length = op.y.len();
        self.launch(&ELEMENTARY, kernel, Groups::over(length), arguments![&*op.y, op.x, length]);
    }
}
