//! Decay and write strength of the gated delta rule (`docs/numerics.md`, "Decay"), per token and
//! value head.
//!
//! Forward: `u = a + dt_bias`, `rate = exp(a_log)`, `g = −(rate·softplus(u))`, `beta = sigmoid(b)`.
//!
//! Backward: `da = −((dg·rate)·sigmoid(u))`; `db = dbeta·(beta·(1 − beta))`; `da_log` accumulates
//! the sum over tokens with the step `s = fma(dg, g, s)`, `ddt_bias` that of `da`. Everything is
//! recomputed from `a` and `b`.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, end, lengths};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decay {
    pub tokens: usize,
    pub heads: usize,
}

/// Decay `g` and write strength `beta`.
pub struct DecayForward<'a, M: Memory> {
    pub g: &'a mut F32<M>,
    pub beta: &'a mut F32<M>,
    pub a: &'a F32<M>,
    pub b: &'a F32<M>,
    pub a_log: &'a F32<M>,
    pub dt_bias: &'a F32<M>,
    pub p: Decay,
}

impl<M: Memory> Op<M> for DecayForward<'_, M> {
    const NAME: &'static str = "decay_forward";

    fn check(&self) {
        let p = &self.p;
        let length = p.tokens * p.heads;
        lengths(
            Self::NAME,
            &[
                ("g", self.g.len(), length),
                ("beta", self.beta.len(), length),
                ("a", self.a.len(), length),
                ("b", self.b.len(), length),
                ("a_log", self.a_log.len(), p.heads),
                ("dt_bias", self.dt_bias.len(), p.heads),
            ],
        );
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.g), Output::F32(self.beta)]
    }
}

/// Gradients of `a` and `b`, and of `a_log` and `dt_bias` if requested.
pub struct DecayBackward<'a, M: Memory> {
    pub da: &'a mut F32<M>,
    pub db: &'a mut F32<M>,
    /// Of `a_log` and `dt_bias`; they accumulate.
    pub dparameters: Option<(&'a mut F32<M>, &'a mut F32<M>)>,
    pub dg: &'a F32<M>,
    pub dbeta: &'a F32<M>,
    pub a: &'a F32<M>,
    pub b: &'a F32<M>,
    pub a_log: &'a F32<M>,
    pub dt_bias: &'a F32<M>,
    pub p: Decay,
    pub row_starts: &'a [usize],
}

impl<M: Memory> Op<M> for DecayBackward<'_, M> {
    const NAME: &'static str = "decay_backward";

    fn check(&self) {
        let p = &self.p;
        let length = p.tokens * p.heads;
        lengths(
            Self::NAME,
            &[
                ("da", self.da.len(), length),
                ("db", self.db.len(), length),
                ("dg", self.dg.len(), length),
                ("dbeta", self.dbeta.len(), length),
                ("a", self.a.len(), length),
                ("b", self.b.len(), length),
                ("a_log", self.a_log.len(), p.heads),
                ("dt_bias", self.dt_bias.len(), p.heads),
            ],
        );
        if let Some((da_log, ddt_bias)) = &self.dparameters {
            lengths(
                Self::NAME,
                &[
                    ("da_log", da_log.len(), p.heads),
                    ("ddt_bias", ddt_bias.len(), p.heads),
                    ("row_starts", end(self.row_starts), p.tokens),
                ],
            );
        }
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        let mut outputs = vec![Output::F32(self.da), Output::F32(self.db)];
        if let Some((da_log, ddt_bias)) = &mut self.dparameters {
            outputs.extend([Output::F32(&mut **da_log), Output::F32(&mut **ddt_bias)]);
        }
        outputs
    }
}
