//! Rotary embedding, the definition (`docs/numerics.md`, "Rotary embedding").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::Run;
use crate::op::{Rope, RopeBackward, RopeForward};
use isobit_numerics::fma::fma;

impl Run<RopeForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut RopeForward<'_, ReferenceMemory>, _: &mut Buffer<u8>) {
        forward(op.x, op.cos, op.sin, op.positions, &op.p);
    }
}

impl Run<RopeBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut RopeBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>) {
        backward(op.dx, op.cos, op.sin, op.positions, &op.p);
    }
}

pub(super) fn forward(x: &mut [f32], cos: &[f32], sin: &[f32], positions: &[u32], p: &Rope) {
    each_pair(x, cos, sin, positions, p, |a, b, c, s| (fma(a, c, -(b * s)), fma(b, c, a * s)));
}

pub(super) fn backward(dx: &mut [f32], cos: &[f32], sin: &[f32], positions: &[u32], p: &Rope) {
    each_pair(dx, cos, sin, positions, p, |a, b, c, s| (fma(a, c, b * s), fma(b, c, -(a * s))));
}

fn each_pair(
    x: &mut [f32],
    cos: &[f32],
    sin: &[f32],
    positions: &[u32],
    p: &Rope,
    rotate: impl Fn(f32, f32, f32, f32) -> (f32, f32),
) {
    p.check();
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
