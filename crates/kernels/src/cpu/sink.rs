//! Attention sinks (`op/sink.rs`); parallel over the heads of all tokens.

use super::CpuMemory;
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::{Checked, Run};
use crate::op::sink::head_width;
use crate::op::{SinkBackward, SinkForward};
use crate::{Buffer, Cpu};
use isobit_numerics::elementary::{exp2, sigmoid, softplus};
use isobit_numerics::lanes::dot;
use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// Minimum heads per thread.
const HEAD_GRAIN: usize = 16;

impl Run<SinkForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut SinkForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let SinkForward { o, lse, sink } = op;
        let (count, width) = (lse.len(), head_width(o.len(), lse.len()));
        let (o, lse) = (SharedMut::new(o), SharedMut::new(lse));
        self.pool.run_ranges(count, HEAD_GRAIN, |range| {
            // SAFETY: ranges of different threads do not overlap, and neither do their rows of `o`.
            let (o, lse) = unsafe { (o.slice(range.start * width..range.end * width), lse.slice(range.clone())) };
            forward_heads(self.path, o, lse, sink, range.start);
        });
    }
}

impl Run<SinkBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut SinkBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let SinkBackward { terms, d_o, o, lse, sink } = op;
        let count = lse.len();
        let terms = SharedMut::new(terms);
        self.pool.run_ranges(count, HEAD_GRAIN, |range| {
            // SAFETY: ranges of different threads do not overlap.
            let here = unsafe { terms.slice(range.clone()) };
            backward_heads(self.path, here, d_o, o, lse, sink, range);
        });
    }
}

multiversion! {
    fn forward_heads<F>(o: &mut [f32], lse: &mut [f32], sink: &[f32], first: usize) {
        let width = head_width(o.len(), lse.len());
        for (at, lse) in lse.iter_mut().enumerate() {
            let s = sink[(first + at) % sink.len()] * LOG2_E;
            let x = (*lse - s) * LN_2;
            let share = sigmoid::<F>(x);
            for o in &mut o[at * width..(at + 1) * width] {
                *o *= share;
            }
            *lse += softplus::<F>(-x) * LOG2_E;
        }
    }
}

multiversion! {
    fn backward_heads<F>(
        terms: &mut [f32],
        d_o: &[f32],
        o: &[f32],
        lse: &[f32],
        sink: &[f32],
        range: Range<usize>,
    ) {
        let width = head_width(o.len(), lse.len());
        for (term, at) in terms.iter_mut().zip(range) {
            let row = at * width..(at + 1) * width;
            let s = sink[at % sink.len()] * LOG2_E;
            let p = exp2::<F>(s - lse[at]);
            *term = -p * dot::<F>(&d_o[row.clone()], &o[row]);
        }
    }
}
