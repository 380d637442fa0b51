//! AdamW on a GPU: four streams read, three written, in one pass.

use super::device::{Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use super::{GpuMemory, multi_tensor};
use crate::backend::{Checked, Run};
use crate::op::{AdamWTensor, AdamWUpdate};

static ADAMW: Program = program!("adamw");

impl Run<AdamWUpdate<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut AdamWUpdate<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        if multi_tensor::serves(self) {
            return multi_tensor::adamw(self, &op.tensors);
        }
        for AdamWTensor { parameter, m, v, gradient, coefficients: c } in &op.tensors {
            let length = parameter.len();
            let arguments = arguments![
                &**parameter,
                &**m,
                &**v,
                *gradient,
                length,
                c.decay,
                c.one_minus_beta1,
                c.beta2,
                c.one_minus_beta2,
                c.step_size,
                c.inv_sqrt_c2,
                c.eps,
            ];
            self.launch(&ADAMW, "adamw", Groups::over(length), arguments);
        }
    }
}
