//! Rotary embedding (`op/rope.rs`), in place; parallel over tokens.

use super::CpuMemory;
use super::path::multiversion;
use crate::backend::{Checked, Run};
use crate::op::{Rope, RopeBackward, RopeForward};
use crate::{Buffer, Cpu};
use isobit_numerics::Fma;

impl Run<RopeForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut RopeForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        run::<false>(self, op.x, op.cos, op.sin, op.positions, &op.p);
    }
}

impl Run<RopeBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut RopeBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        run::<true>(self, op.dx, op.cos, op.sin, op.positions, &op.p);
    }
}

fn run<const INVERSE: bool>(cpu: &Cpu, x: &mut [f32], cos: &[f32], sin: &[f32], positions: &[u32], p: &Rope) {
    cpu.pool.run_rows(x, p.heads * p.head_width, |tokens, x| {
        if p.interleaved {
            rotate_neighbours::<INVERSE>(cpu.path, x, cos, sin, &positions[tokens], p);
        } else {
            rotate_halves::<INVERSE>(cpu.path, x, cos, sin, &positions[tokens], p);
        }
    });
}

multiversion! {
    fn rotate_halves<F, const INVERSE: bool>(x: &mut [f32], cos: &[f32], sin: &[f32], positions: &[u32], p: &Rope) {
        let half = p.rotary_width / 2;
        for (x, position) in x.chunks_exact_mut(p.heads * p.head_width).zip(positions) {
            let table = *position as usize * half;
            let (cos, sin) = (&cos[table..table + half], &sin[table..table + half]);
            for head in x.chunks_exact_mut(p.head_width) {
                let (a, b) = head[p.offset..p.offset + 2 * half].split_at_mut(half);
                for (((a, b), c), s) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                    (*a, *b) = rotated::<F, INVERSE>(*a, *b, *c, *s);
                }
            }
        }
    }
}

multiversion! {
    fn rotate_neighbours<F, const INVERSE: bool>(x: &mut [f32], cos: &[f32], sin: &[f32], positions: &[u32], p: &Rope) {
        let half = p.rotary_width / 2;
        for (x, position) in x.chunks_exact_mut(p.heads * p.head_width).zip(positions) {
            let table = *position as usize * half;
            let (cos, sin) = (&cos[table..table + half], &sin[table..table + half]);
            for head in x.chunks_exact_mut(p.head_width) {
                let (pairs, _) = head[p.offset..p.offset + 2 * half].as_chunks_mut::<2>();
                for ((pair, c), s) in pairs.iter_mut().zip(cos).zip(sin) {
                    (pair[0], pair[1]) = rotated::<F, INVERSE>(pair[0], pair[1], *c, *s);
                }
            }
        }
    }
}

#[inline(always)]
fn rotated<F: Fma, const INVERSE: bool>(a: f32, b: f32, c: f32, s: f32) -> (f32, f32) {
    let (from_b, from_a) = (b * s, a * s);
    let (from_b, from_a) = if INVERSE { (from_b, -from_a) } else { (-from_b, from_a) };
    (F::fma(a, c, from_b), F::fma(b, c, from_a))
}
