//! AdamW (`op/adamw.rs`): four streams read, three written, in one pass.

use super::CpuMemory;
use super::elements::GRAIN;
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::{Checked, Run};
use crate::op::{AdamWTensor, AdamWUpdate};
use crate::{Buffer, Cpu};
use isobit_numerics::adamw::{self, Coefficients};

impl Run<AdamWUpdate<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut AdamWUpdate<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        for AdamWTensor { parameter, m, v, gradient, coefficients } in &mut op.tensors {
            let length = parameter.len();
            let (parameter, m, v) = (SharedMut::new(parameter), SharedMut::new(m), SharedMut::new(v));
            self.pool.run_ranges(length, GRAIN, |range| {
                // SAFETY: ranges of different threads do not overlap.
                let (parameter, m, v) =
                    unsafe { (parameter.slice(range.clone()), m.slice(range.clone()), v.slice(range.clone())) };
                update_part(self.path, parameter, m, v, &gradient[range], coefficients);
            });
        }
    }
}

multiversion! {
    fn update_part<F>(parameter: &mut [f32], m: &mut [f32], v: &mut [f32], gradient: &[f32], c: &Coefficients) {
        // With a copy the compiler sees that the stores do not alias the coefficients.
        let c = *c;
        for (((parameter, m), v), gradient) in parameter.iter_mut().zip(m).zip(v).zip(gradient) {
            (*parameter, *m, *v) = adamw::update::<F>(*parameter, *m, *v, *gradient, &c);
        }
    }
}
