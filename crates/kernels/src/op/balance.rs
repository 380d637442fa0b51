//! Load balancing of a router (`docs/numerics.md`, "Load balance"): how much probability each
//! expert gets in each row of data.
//!
//! Forward: `sums[row, e]` is the sum over the row's tokens of `P[t, e]`, the softmax of the
//! token's logits over all experts. Backward, given the gradient `share` of `sums`:
//! `dz[t, e] = fma(P[t, e], share[row, e] − A, dz[t, e])` with `A` the lane sum of
//! `fma(P, share, ·)`. Each row of data has its own sums, so it does not matter which rows are
//! computed together.

use super::router::EXPERTS_MAX;
use crate::backend::{F32, Length, Memory, Workspaces};
use crate::op::{Op, Output, end, lengths};

/// Panics unless the lengths of logits and sums match the rows.
fn check(op: &'static str, [logits, sums]: [usize; 2], row_starts: &[usize], experts: usize) {
    assert!((1..=EXPERTS_MAX).contains(&experts), "{experts} experts are outside 1..={EXPERTS_MAX}");
    let rows = row_starts.len() - 1;
    lengths(op, &[("logits", logits, end(row_starts) * experts), ("sums", sums, rows * experts)]);
}

/// The probability that each expert gets in each row of data.
pub struct BalanceForward<'a, M: Memory> {
    pub sums: &'a mut F32<M>,
    pub logits: &'a F32<M>,
    pub row_starts: &'a [usize],
    pub experts: usize,
}

impl<M: Memory> Op<M> for BalanceForward<'_, M> {
    const NAME: &'static str = "balance_forward";

    fn check(&self) {
        check(Self::NAME, [self.logits.len(), self.sums.len()], self.row_starts, self.experts);
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.balance(self.row_starts, self.experts)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.sums)]
    }
}

/// Adds to `dlogits`.
pub struct BalanceBackward<'a, M: Memory> {
    pub dlogits: &'a mut F32<M>,
    pub share: &'a F32<M>,
    pub logits: &'a F32<M>,
    pub row_starts: &'a [usize],
    pub experts: usize,
}

impl<M: Memory> Op<M> for BalanceBackward<'_, M> {
    const NAME: &'static str = "balance_backward";

    fn check(&self) {
        check(Self::NAME, [self.logits.len(), self.share.len()], self.row_starts, self.experts);
        lengths(Self::NAME, &[("dlogits", self.dlogits.len(), self.logits.len())]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dlogits)]
    }
}
