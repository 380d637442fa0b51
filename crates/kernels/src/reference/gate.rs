//! Sigmoid gates, the definition (`docs/numerics.md`, "Gates").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Device, Run};
use crate::op::{GateBackward, GateForward};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::sigmoid;
use isobit_numerics::lanes::dot;

impl Run<GateForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut GateForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let GateForward { y, x, g, p } = op;
        for index in 0..p.tokens * p.width {
            let gate = if p.per_token { g[index / p.width] } else { g[index] };
            y[index] = x[index] * sigmoid::<SoftFma>(gate);
        }
    }
}

impl Run<GateBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut GateBackward<'_, ReferenceMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        // The gradient of `x` is gated like `x`.
        self.run_in(workspace, GateForward { y: op.dx, x: op.dy, g: op.g, p: op.p });
        let GateBackward { dg, dy, x, g, p, .. } = op;
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
}
