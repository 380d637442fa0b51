//! Decay on a GPU (`op/decay.rs`).

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{DecayBackward, DecayForward};
use isobit_numerics::lanes::LANES;

pub(super) static DECAY: Program = program!("decay");

impl Run<DecayForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut DecayForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let length = p.tokens * p.heads;
        let arguments = arguments![&*op.g, &*op.beta, op.a, op.b, op.a_log, op.dt_bias, length, dimension(p.heads)];
        self.launch(&DECAY, "decay_forward", Groups::over(length), arguments);
    }
}

impl Run<DecayBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut DecayBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let (length, heads) = (p.tokens * p.heads, dimension(p.heads));
        let arguments = arguments![&*op.da, &*op.db, op.dg, op.dbeta, op.a, op.b, op.a_log, op.dt_bias, length, heads];
        self.launch(&DECAY, "decay_backward", Groups::over(length), arguments);
        let Some((da_log, ddt_bias)) = &op.dparameters else { return };
        let blocks = self.token_blocks(op.row_starts);
        let count = dimension(blocks.len() / 2);
        let arguments =
            arguments![&**da_log, &**ddt_bias, op.dg, &*op.da, op.a, op.a_log, op.dt_bias, &blocks, count, heads];
        self.launch(&DECAY, "decay_grad_parameters", Groups::each(p.heads.div_ceil(LANES)), arguments);
    }
}
