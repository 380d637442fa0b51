//! Sigmoid gates, the definition (`docs/numerics.md`, "Gates").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::Run;
use crate::op::{Gate, GateBackward, GateForward};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::sigmoid;
use isobit_numerics::lanes::dot;

impl Run<GateForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut GateForward<'_, ReferenceMemory>, _: &mut Buffer<u8>) {
        forward(op.y, op.x, op.g, &op.p);
    }
}

impl Run<GateBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut GateBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>) {
        backward(op.dx, op.dg, op.dy, op.x, op.g, &op.p);
    }
}

pub(super) fn forward(y: &mut [f32], x: &[f32], g: &[f32], p: &Gate) {
    for index in 0..p.tokens * p.width {
        let gate = if p.per_token { g[index / p.width] } else { g[index] };
        y[index] = x[index] * sigmoid::<SoftFma>(gate);
    }
}

pub(super) fn backward(dx: &mut [f32], dg: &mut [f32], dy: &[f32], x: &[f32], g: &[f32], p: &Gate) {
    forward(dx, dy, g, p);
    for index in 0..p.gates() {
        let s = sigmoid::<SoftFma>(g[index]);
        let d = if p.per_token {
            let token = index * p.width..(index + 1) * p.width;
            dot::<SoftFma>(&dy[token.clone()], &x[token])
        } else {
            dy[index] * x[index]
        };
        dg[index] = d * (s * (1.0 - s));
    }
}
