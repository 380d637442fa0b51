//! Decay (`op/decay.rs`). Parallel over tokens, and over heads for the parameter gradients; both
//! are small.

use super::CpuMemory;
use super::bias::{COLUMN_GRAIN, COLUMNS, ColumnBlock};
use super::elements::map;
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::{Checked, Run};
use crate::op::{DecayBackward, DecayForward, TOKEN_BLOCK, token_blocks};
use crate::{Buffer, Cpu};
use isobit_numerics::Fma;
use isobit_numerics::elementary::{exp, sigmoid, softplus};

impl Run<DecayForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut DecayForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let DecayForward { g, beta, a, b, a_log, dt_bias, p } = op;
        let (g, beta) = (SharedMut::new(g), SharedMut::new(beta));
        self.pool.run_ranges(p.tokens, 1, |tokens| {
            let here = tokens.start * p.heads..tokens.end * p.heads;
            // SAFETY: tokens of different threads do not overlap.
            let (g, beta) = unsafe { (g.slice(here.clone()), beta.slice(here.clone())) };
            forward_tokens(self.path, g, beta, &a[here.clone()], &b[here], a_log, dt_bias);
        });
    }
}

impl Run<DecayBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut DecayBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let DecayBackward { da, db, dparameters, dg, dbeta, a, b, a_log, dt_bias, p, row_starts } = op;
        let (da_shared, db_shared) = (SharedMut::new(da), SharedMut::new(db));
        self.pool.run_ranges(p.tokens, 1, |tokens| {
            let here = tokens.start * p.heads..tokens.end * p.heads;
            // SAFETY: tokens of different threads do not overlap.
            let (da, db) = unsafe { (da_shared.slice(here.clone()), db_shared.slice(here.clone())) };
            let (d, ab) = ((&dg[here.clone()], &dbeta[here.clone()]), (&a[here.clone()], &b[here]));
            backward_tokens(self.path, da, db, d, ab, a_log, dt_bias);
        });
        let Some((da_log, ddt_bias)) = dparameters else { return };
        let (da_log, ddt_bias) = (SharedMut::new(da_log), SharedMut::new(ddt_bias));
        let da: &[f32] = da;
        self.pool.run_ranges(p.heads, COLUMN_GRAIN, |heads| {
            for first in heads.clone().step_by(COLUMNS) {
                let here = first..(first + COLUMNS).min(heads.end);
                // SAFETY: heads of different threads do not overlap.
                let (da_log, ddt_bias) = unsafe { (da_log.slice(here.clone()), ddt_bias.slice(here.clone())) };
                let own = (&a_log[here.clone()], &dt_bias[here]);
                for tokens in token_blocks(row_starts, TOKEN_BLOCK) {
                    let block = ColumnBlock { tokens, first, width: p.heads };
                    parameter_block(self.path, da_log, ddt_bias, (dg, da, a), own, &block);
                }
            }
        });
    }
}

#[inline(always)]
fn log_decay<F: Fma>(a: f32, a_log: f32, dt_bias: f32) -> f32 {
    -(exp::<F>(a_log) * softplus::<F>(a + dt_bias))
}

multiversion! {
    fn forward_tokens<F>(g: &mut [f32], beta: &mut [f32], a: &[f32], b: &[f32], a_log: &[f32], dt_bias: &[f32]) {
        for (g, a) in g.chunks_exact_mut(a_log.len()).zip(a.chunks_exact(a_log.len())) {
            map(g, [a, a_log, dt_bias], |[a, a_log, dt_bias]| log_decay::<F>(a, a_log, dt_bias));
        }
        map(beta, [b], |[b]| sigmoid::<F>(b));
    }
}

multiversion! {
    fn backward_tokens<F>(
        da: &mut [f32],
        db: &mut [f32],
        d: (&[f32], &[f32]),
        ab: (&[f32], &[f32]),
        a_log: &[f32],
        dt_bias: &[f32],
    ) {
        let heads = a_log.len();
        let tokens = da.chunks_exact_mut(heads).zip(d.0.chunks_exact(heads)).zip(ab.0.chunks_exact(heads));
        for ((da, dg), a) in tokens {
            map(da, [dg, a, a_log, dt_bias], |[dg, a, a_log, dt_bias]| {
                -((dg * exp::<F>(a_log)) * sigmoid::<F>(a + dt_bias))
            });
        }
        map(db, [d.1, ab.1], |[dbeta, b]| {
            let beta = sigmoid::<F>(b);
            dbeta * (beta * (1.0 - beta))
        });
    }
}

multiversion! {
    /// Some heads over one block; `inputs` are `dg`, `da` and `a`, `own` these heads' `a_log` and
    /// `dt_bias`.
    fn parameter_block<F>(
        da_log: &mut [f32],
        ddt_bias: &mut [f32],
        inputs: (&[f32], &[f32], &[f32]),
        own: (&[f32], &[f32]),
        block: &ColumnBlock,
    ) {
        let ([mut rates, mut biases, mut decays], count) = ([[0.0f32; COLUMNS]; 3], own.0.len());
        let (rates, biases, decays) = (&mut rates[..count], &mut biases[..count], &mut decays[..count]);
        for t in block.tokens.clone() {
            let at = t * block.width + block.first;
            let here = at..at + count;
            let (dg, da, a) = (&inputs.0[here.clone()], &inputs.1[here.clone()], &inputs.2[here]);
            map(decays, [a, own.0, own.1], |[a, a_log, dt_bias]| log_decay::<F>(a, a_log, dt_bias));
            for ((rate, dg), decay) in rates.iter_mut().zip(dg).zip(&*decays) {
                *rate = F::fma(*dg, *decay, *rate);
            }
            for (bias, da) in biases.iter_mut().zip(da) {
                *bias += da;
            }
        }
        for (total, sum) in da_log.iter_mut().chain(ddt_bias).zip(rates.iter().chain(&*biases)) {
            *total += sum;
        }
    }
}
