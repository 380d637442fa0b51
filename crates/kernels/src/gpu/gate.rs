//! Sigmoid gates on a GPU (`op/gate.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::{Gate, GateBackward, GateForward};
use isobit_numerics::lanes::LANES;

impl Run<GateForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut GateForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        forward(self, op.y, op.x, op.g, &op.p);
    }
}

impl Run<GateBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut GateBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        backward(self, op.dx, op.dg, op.dy, op.x, op.g, &op.p);
    }
}

static GATE: Program = program!("gate");

/// Elements that one gate serves.
fn shared_by(p: &Gate) -> u32 {
    dimension(if p.per_token { p.width } else { 1 })
}

pub(super) fn forward(gpu: &Gpu, y: &mut GpuBuffer<f32>, x: &GpuBuffer<f32>, g: &GpuBuffer<f32>, p: &Gate) {
    let length = p.tokens * p.width;
    assert_eq!([y.len(), x.len(), g.len()], [length, length, p.gates()], "gate");
    gpu.launch(&GATE, "gate_forward", Groups::over(length), arguments![y, x, g, length, shared_by(p)]);
}

pub(super) fn backward(
    gpu: &Gpu,
    dx: &mut GpuBuffer<f32>,
    dg: &mut GpuBuffer<f32>,
    dy: &GpuBuffer<f32>,
    x: &GpuBuffer<f32>,
    g: &GpuBuffer<f32>,
    p: &Gate,
) {
    let (length, gates) = (p.tokens * p.width, p.gates());
    assert_eq!([dx.len(), dy.len(), x.len(), dg.len(), g.len()], [length, length, length, gates, gates], "gate");
    if p.per_token {
        let groups = Groups::each(p.tokens.div_ceil(GROUP / LANES));
        let arguments = arguments![dx, dg, dy, x, g, p.tokens, dimension(p.width)];
        gpu.launch(&GATE, "gate_backward_tokens", groups, arguments);
    } else {
        gpu.launch(&GATE, "gate_backward", Groups::over(length), arguments![dx, dg, dy, x, g, length]);
    }
}
