//! Gated delta rule (`docs/numerics.md`, "Gated delta rule"): the recurrent layer of hybrid models,
//! in chunks of [`CHUNK`] tokens.
//!
//! Layouts: `q[t, key_heads, key_width]` and `k` (normalised and scaled by the caller),
//! `v[t, value_heads, value_width]`, `g[t, value_heads]` (logarithm of the decay, at most 0),
//! `beta[t, value_heads]`, `o` like `v`; each gradient has the layout of its tensor. Value head `h`
//! uses key head `h / (value_heads / key_heads)`. A document is a row of `row_starts`; its state,
//! `[key_width, value_width]` per value head, starts from zero or from
//! `initial_state[documents, value_heads, key_width, value_width]`; `final_state` has the same
//! layout.
//!
//! # What is computed
//!
//! Per value head, with the state `S`: `S' = exp(g_t)·S`, `δ_t = beta_t·(v_t − S'ᵀ k_t)`,
//! `S = S' + k_t δ_tᵀ`, `o_t = Sᵀ q_t`.
//!
//! # What the bits are
//!
//! Float32; a *chain* is one `fma` after another in the order of its index. Chunks count from the
//! document's first token; `i`, `j` are places in a chunk of `n` tokens, `S` the state before it.
//!
//! ```text
//! a_i  = exp(g_i)
//! A_i  = A_{i-1}·a_i                          A_0 = a_0: the decay from the chunk's start
//! Γ_ij = Γ_{i-1,j}·a_i                        Γ_jj = 1:  the decay from j to i
//! kk_ij = chain over d of k_id·k_jd           qk_ij = chain over d of q_id·k_jd, both from +0
//! M_ij = kk_ij·Γ_ij   (j < i)                 P_ij = qk_ij·Γ_ij   (j ≤ i)
//! Y_ic = fma(-A_i, chain over d of k_id·S_dc, v_ic), then chain over j < i of -M_ij·δ_jc
//! δ_ic = beta_i·Y_ic
//! o_ic = A_i·(chain over d of q_id·S_dc), then chain over j ≤ i of P_ij·δ_jc
//! S_dc = A_{n-1}·S_dc, then chain over i of (Γ_{n-1,i}·k_id)·δ_ic
//! ```
//!
//! No token depends on later ones. Later chunks depend only on the state after a whole chunk, so a
//! document may be split at chunk boundaries: passing the `final_state` of one call as the
//! `initial_state` of the next gives the bits of a single call. A decoder keeps the state at the
//! last boundary and the inputs of the tokens since, and recomputes those tokens.
//!
//! The backward pass is in `docs/numerics.md`; no gradient goes through initial or final states.

use crate::backend::{F32, Length, Memory, Workspaces};
use crate::op::{Op, Output, lengths};
use std::ops::Range;

/// Tokens per chunk.
pub const CHUNK: usize = 64;
/// Widest head, for keys and for values.
pub const HEAD_WIDTH_MAX: usize = 256;

#[derive(Clone, Copy, Debug)]
pub struct DeltaRule<'a> {
    /// Documents: ascending offsets into the tokens, from 0, ending with the total.
    pub row_starts: &'a [usize],
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_width: usize,
    pub value_width: usize,
}

impl DeltaRule<'_> {
    pub fn tokens(&self) -> usize {
        self.row_starts[self.row_starts.len() - 1]
    }

    pub fn documents(&self) -> usize {
        self.row_starts.len() - 1
    }

    pub fn document(&self, index: usize) -> Range<usize> {
        self.row_starts[index]..self.row_starts[index + 1]
    }

    /// Tokens of the longest document.
    pub fn longest(&self) -> usize {
        self.row_starts.windows(2).map(|row| row[1] - row[0]).max().unwrap_or(0)
    }

    /// Value heads that share one key head.
    pub fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Elements of `q` and `k`, of `v` and `o`, of `g` and `beta`, of all states.
    pub fn lengths(&self) -> [usize; 4] {
        [
            self.tokens() * self.key_heads * self.key_width,
            self.tokens() * self.value_heads * self.value_width,
            self.tokens() * self.value_heads,
            self.documents() * self.value_heads * self.key_width * self.value_width,
        ]
    }

    /// Panics on unsupported parameters.
    pub fn check(&self) {
        let widths = 1..=HEAD_WIDTH_MAX;
        assert!(
            widths.contains(&self.key_width) && widths.contains(&self.value_width),
            "head widths are 1 to {HEAD_WIDTH_MAX}, not {} and {}",
            self.key_width,
            self.value_width
        );
        assert!(
            self.key_heads > 0 && self.value_heads > 0 && self.value_heads.is_multiple_of(self.key_heads),
            "{} value heads share {} key heads evenly",
            self.value_heads,
            self.key_heads
        );
        assert_eq!(self.row_starts.first(), Some(&0), "documents start with the tokens");
        assert!(self.row_starts.is_sorted(), "row starts ascend");
    }
}

/// The tokens of each chunk of a document, in order.
pub fn chunks(document: Range<usize>) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator {
    let end = document.end;
    document.step_by(CHUNK).map(move |start| start..(start + CHUNK).min(end))
}

/// `o`, and the states after each document if requested.
pub struct DeltaRuleForward<'a, M: Memory> {
    pub o: &'a mut F32<M>,
    pub final_state: Option<&'a mut F32<M>>,
    pub q: &'a F32<M>,
    pub k: &'a F32<M>,
    pub v: &'a F32<M>,
    pub g: &'a F32<M>,
    pub beta: &'a F32<M>,
    /// If absent, every document starts from zero.
    pub initial_state: Option<&'a F32<M>>,
    pub p: DeltaRule<'a>,
}

impl<M: Memory> Op<M> for DeltaRuleForward<'_, M> {
    const NAME: &'static str = "delta_rule_forward";

    fn check(&self) {
        let p = &self.p;
        p.check();
        let [keys, values, scalars, states] = p.lengths();
        lengths(
            Self::NAME,
            &[
                ("o", self.o.len(), values),
                ("q", self.q.len(), keys),
                ("k", self.k.len(), keys),
                ("v", self.v.len(), values),
                ("g", self.g.len(), scalars),
                ("beta", self.beta.len(), scalars),
            ],
        );
        if let Some(state) = &self.final_state {
            lengths(Self::NAME, &[("final_state", state.len(), states)]);
        }
        if let Some(state) = self.initial_state {
            lengths(Self::NAME, &[("initial_state", state.len(), states)]);
        }
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.delta_rule(&self.p)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        let mut outputs = vec![Output::F32(self.o)];
        outputs.extend(self.final_state.as_deref_mut().map(Output::F32));
        outputs
    }
}

/// Gradients of all inputs. Every document starts from zero; the states are recomputed.
pub struct DeltaRuleBackward<'a, M: Memory> {
    pub dq: &'a mut F32<M>,
    pub dk: &'a mut F32<M>,
    pub dv: &'a mut F32<M>,
    pub dg: &'a mut F32<M>,
    pub dbeta: &'a mut F32<M>,
    pub d_o: &'a F32<M>,
    pub q: &'a F32<M>,
    pub k: &'a F32<M>,
    pub v: &'a F32<M>,
    pub g: &'a F32<M>,
    pub beta: &'a F32<M>,
    pub p: DeltaRule<'a>,
}

impl<M: Memory> Op<M> for DeltaRuleBackward<'_, M> {
    const NAME: &'static str = "delta_rule_backward";

    fn check(&self) {
        let p = &self.p;
        p.check();
        let [keys, values, scalars, _] = p.lengths();
        lengths(
            Self::NAME,
            &[
                ("dq", self.dq.len(), keys),
                ("dk", self.dk.len(), keys),
                ("dv", self.dv.len(), values),
                ("dg", self.dg.len(), scalars),
                ("dbeta", self.dbeta.len(), scalars),
                ("d_o", self.d_o.len(), values),
                ("q", self.q.len(), keys),
                ("k", self.k.len(), keys),
                ("v", self.v.len(), values),
                ("g", self.g.len(), scalars),
                ("beta", self.beta.len(), scalars),
            ],
        );
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.delta_rule(&self.p)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![
            Output::F32(self.dq),
            Output::F32(self.dk),
            Output::F32(self.dv),
            Output::F32(self.dg),
            Output::F32(self.dbeta),
        ]
    }
}
