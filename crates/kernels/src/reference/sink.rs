//! Attention sinks, the definition (`docs/numerics.md`, "Attention sinks").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::sink::head_width;
use crate::op::{SinkBackward, SinkForward};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::{exp2, sigmoid, softplus};
use isobit_numerics::lanes::dot;
use std::f32::consts::{LN_2, LOG2_E};

impl Run<SinkForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut SinkForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let SinkForward { o, lse, sink } = op;
        let width = head_width(o.len(), lse.len());
        for at in 0..lse.len() {
            let s = sink[at % sink.len()] * LOG2_E;
            let x = (lse[at] - s) * LN_2;
            let share = sigmoid::<SoftFma>(x);
            for o in &mut o[at * width..(at + 1) * width] {
                *o *= share;
            }
            lse[at] += softplus::<SoftFma>(-x) * LOG2_E;
        }
    }
}

impl Run<SinkBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut SinkBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let SinkBackward { terms, d_o, o, lse, sink } = op;
        let width = head_width(o.len(), lse.len());
        for at in 0..lse.len() {
            let row = at * width..(at + 1) * width;
            let s = sink[at % sink.len()] * LOG2_E;
            let p = exp2::<SoftFma>(s - lse[at]);
            terms[at] = -p * dot::<SoftFma>(&d_o[row.clone()], &o[row]);
        }
    }
}
