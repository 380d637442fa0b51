//! Decay and write strength of the gated delta rule (`docs/numerics.md`, "Decay"), per token and value head.
//!
//! Forward: `u = a + dt_bias`, `rate = exp(a_log)`, `g = −(rate·softplus(u))`, `beta = sigmoid(b)`.
//!
//! Backward: `da = −((dg·rate)·sigmoid(u))`; `db = dbeta·(beta·(1 − beta))`; `da_log` gets the sum over tokens with the step
//! `s = fma(dg, g, s)`, `ddt_bias` that of `da`. Everything is computed anew from `a` and `b`.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decay {
    pub tokens: usize,
    pub heads: usize,
}
