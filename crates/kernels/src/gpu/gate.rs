//! Sigmoid gates on a GPU (`op/gate.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{Gate, GateBackward, GateForward};
use isobit_numerics::lanes::LANES;

pub(super) static GATE: Program = program!("gate");

/// Elements per gate.
fn shared_by(p: &Gate) -> u32 {
    dimension(if p.per_token { p.width } else { 1 })
}

impl Run<GateForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut GateForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let length = p.tokens * p.width;
        self.launch(&GATE, "gate_forward", Groups::over(length), arguments![&*op.y, op.x, op.g, length, shared_by(p)]);
    }
}

impl Run<GateBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut GateBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        if p.per_token {
            let groups = Groups::each(p.tokens.div_ceil(GROUP / LANES));
            let arguments = arguments![&*op.dx, &*op.dg, op.dy, op.x, op.g, p.tokens, dimension(p.width)];
            self.launch(&GATE, "gate_backward_tokens", groups, arguments);
        } else {
            let length = p.tokens * p.width;
            let arguments = arguments![&*op.dx, &*op.dg, op.dy, op.x, op.g, length];
            self.launch(&GATE, "gate_backward", Groups::over(length), arguments);
        }
    }
}
