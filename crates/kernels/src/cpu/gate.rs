//! Sigmoid gates (`op/gate.rs`). Parallel over elements, or over tokens with one gate per token.

use super::CpuMemory;
use super::elements::{self, GRAIN, map};
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::{Checked, Run};
use crate::op::{GateBackward, GateForward};
use crate::{Buffer, Cpu};
use isobit_numerics::elementary::sigmoid;
use isobit_numerics::lanes;

impl Run<GateForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut GateForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let GateForward { y, x, g, p } = op;
        if p.per_token {
            self.pool.run_rows(y, p.width, |tokens, y| {
                let x = &x[tokens.start * p.width..tokens.end * p.width];
                forward_tokens(self.path, y, x, &g[tokens], p.width);
            });
        } else {
            elements::split(self, y, |range, y| forward_elements(self.path, y, &x[range.clone()], &g[range]));
        }
    }
}

impl Run<GateBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut GateBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let GateBackward { dx, dg, dy, x, g, p } = op;
        let (dx, dg) = (SharedMut::new(dx), SharedMut::new(dg));
        if p.per_token {
            self.pool.run_ranges(p.tokens, 1, |tokens| {
                let here = tokens.start * p.width..tokens.end * p.width;
                // SAFETY: tokens of different threads do not overlap.
                let (dx, dg) = unsafe { (dx.slice(here.clone()), dg.slice(tokens.clone())) };
                backward_tokens(self.path, dx, dg, &dy[here.clone()], &x[here], &g[tokens], p.width);
            });
        } else {
            self.pool.run_ranges(p.tokens * p.width, GRAIN, |range| {
                // SAFETY: ranges of different threads do not overlap.
                let (dx, dg) = unsafe { (dx.slice(range.clone()), dg.slice(range.clone())) };
                backward_elements(self.path, dx, dg, &dy[range.clone()], &x[range.clone()], &g[range]);
            });
        }
    }
}

multiversion! {
    fn forward_elements<F>(y: &mut [f32], x: &[f32], g: &[f32]) {
        map(y, [x, g], |[x, g]| x * sigmoid::<F>(g));
    }
}

multiversion! {
    fn forward_tokens<F>(y: &mut [f32], x: &[f32], g: &[f32], width: usize) {
        for ((y, x), g) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(g) {
            let s = sigmoid::<F>(*g);
            for (y, x) in y.iter_mut().zip(x) {
                *y = x * s;
            }
        }
    }
}

multiversion! {
    fn backward_elements<F>(dx: &mut [f32], dg: &mut [f32], dy: &[f32], x: &[f32], g: &[f32]) {
        map(dx, [dy, g], |[dy, g]| dy * sigmoid::<F>(g));
        map(dg, [dy, x, g], |[dy, x, g]| {
            let s = sigmoid::<F>(g);
            (dy * x) * (s * (1.0 - s))
        });
    }
}

multiversion! {
    fn backward_tokens<F>(dx: &mut [f32], dg: &mut [f32], dy: &[f32], x: &[f32], g: &[f32], width: usize) {
        for (index, (dg, g)) in dg.iter_mut().zip(g).enumerate() {
            let token = index * width..(index + 1) * width;
            let s = sigmoid::<F>(*g);
            let dy = &dy[token.clone()];
            *dg = lanes::dot::<F>(dy, &x[token.clone()]) * (s * (1.0 - s));
            for (dx, dy) in dx[token].iter_mut().zip(dy) {
                *dx = dy * s;
            }
        }
    }
}
