//! Rotary embedding (`op/rope.rs`), in place; threads share the tokens.

use super::path::multiversion;
use crate::Cpu;
use crate::op::Rope;

pub(super) fn forward(cpu: &Cpu, x: &mut [f32], cos: &[f32], sin: &[f32], positions: &[u32], p: &Rope) {
    run::<false>(cpu, x, cos, sin, positions, p);
}

pub(super) fn backward(cpu: &Cpu, dx: &mut [f32], cos: &[f32], sin: &[f32], positions: &[u32], p: &Rope) {
    run::<true>(cpu, dx, cos, sin, positions, p);
}

fn run<const INVERSE: bool>(cpu: &Cpu, x: &mut [f32], cos: &[f32], sin: &[f32], positions: &[u32], p: &Rope) {
    assert!(p.rotary_width.is_multiple_of(2) && p.rotary_width <= p.head_width, "rotated channels come in pairs");
    assert_eq!((x.len(), positions.len()), (p.tokens * p.heads * p.head_width, p.tokens), "heads of all tokens");
    cpu.pool.run_rows(x, p.heads * p.head_width, |tokens, x| {
        rotate::<INVERSE>(cpu.path, x, cos, sin, &positions[tokens], p);
    });
}

multiversion! {
    fn rotate<F, const INVERSE: bool>(x: &mut [f32], cos: &[f32], sin: &[f32], positions: &[u32], p: &Rope) {
        let half = p.rotary_width / 2;
        for (x, position) in x.chunks_exact_mut(p.heads * p.head_width).zip(positions) {
            let table = *position as usize * half;
            let (cos, sin) = (&cos[table..table + half], &sin[table..table + half]);
            for head in x.chunks_exact_mut(p.head_width) {
                let (a, b) = head[..2 * half].split_at_mut(half);
                for (((a, b), c), s) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                    let (from_b, from_a) = (*b * s, *a * s);
                    let (from_b, from_a) = if INVERSE { (from_b, -from_a) } else { (-from_b, from_a) };
                    (*a, *b) = (F::fma(*a, *c, from_b), F::fma(*b, *c, from_a));
                }
            }
        }
    }
}
