//! Decay, the definition (`docs/numerics.md`, "Decay").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{DecayBackward, DecayForward, TOKEN_BLOCK, token_blocks};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::{exp, sigmoid, softplus};
use isobit_numerics::fma::fma;

impl Run<DecayForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut DecayForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let DecayForward { g, beta, a, b, a_log, dt_bias, p } = op;
        for index in 0..p.tokens * p.heads {
            let head = index % p.heads;
            g[index] = log_decay(a[index], a_log[head], dt_bias[head]);
            beta[index] = sigmoid::<SoftFma>(b[index]);
        }
    }
}

fn log_decay(a: f32, a_log: f32, dt_bias: f32) -> f32 {
    -(exp::<SoftFma>(a_log) * softplus::<SoftFma>(a + dt_bias))
}

impl Run<DecayBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut DecayBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let DecayBackward { da, db, dparameters, dg, dbeta, a, b, a_log, dt_bias, p, row_starts } = op;
        for index in 0..p.tokens * p.heads {
            let head = index % p.heads;
            let s = sigmoid::<SoftFma>(a[index] + dt_bias[head]);
            da[index] = -((dg[index] * exp::<SoftFma>(a_log[head])) * s);
            let beta = sigmoid::<SoftFma>(b[index]);
            db[index] = dbeta[index] * (beta * (1.0 - beta));
        }
        let Some((da_log, ddt_bias)) = dparameters else { return };
        for block in token_blocks(row_starts, TOKEN_BLOCK) {
            for head in 0..p.heads {
                let (mut rates, mut biases) = (0.0, 0.0);
                for index in block.clone().map(|t| t * p.heads + head) {
                    rates = fma(dg[index], log_decay(a[index], a_log[head], dt_bias[head]), rates);
                    biases += da[index];
                }
                da_log[head] += rates;
                ddt_bias[head] += biases;
            }
        }
    }
}
