//! Rotary embedding, the definition (`docs/numerics.md`, "Rotary embedding").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{Rope, RopeBackward, RopeForward};
use isobit_numerics::fma::fma;

impl Run<RopeForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut RopeForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let rotate = |a: f32, b: f32, c: f32, s: f32| (fma(a, c, -(b * s)), fma(b, c, a * s));
        each_pair(op.x, op.cos, op.sin, op.positions, &op.p, rotate);
    }
}

impl Run<RopeBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut RopeBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let rotate = |a: f32, b: f32, c: f32, s: f32| (fma(a, c, b * s), fma(b, c, -(a * s)));
        each_pair(op.dx, op.cos, op.sin, op.positions, &op.p, rotate);
    }
}

fn each_pair(
    x: &mut [f32],
    cos: &[f32],
    sin: &[f32],
    positions: &[u32],
    p: &Rope,
    rotate: impl Fn(f32, f32, f32, f32) -> (f32, f32),
) {
    let half = p.rotary_width / 2;
    for t in 0..p.tokens {
        let table = positions[t] as usize * half;
        for head in 0..p.heads {
            let first = (t * p.heads + head) * p.head_width;
            for i in 0..half {
                let (a, b) = p.pair(i);
                let (a, b) = (first + a, first + b);
                (x[a], x[b]) = rotate(x[a], x[b], cos[table + i], sin[table + i]);
            }
        }
    }
}
