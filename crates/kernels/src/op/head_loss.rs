//! Fused LM head and cross-entropy (`docs/numerics.md`, "Head and loss"): the full logits are never
//! materialized.
//!
//! Logit `z[t, v]` is the forward slice product of hidden state and head row, soft-capped if there
//! is a cap ("Soft-capping"). Forward, over vocabulary blocks of 512:
//! - `m_b = max z` over the block, starting from −∞ with `z > m ? z : m` (a NaN never becomes the
//!   maximum), and `s_b` = lane sum of `exp(z − m_b)`, lane = index in the block mod 32. A NaN
//!   logit makes `s_b` NaN.
//! - `m = max m_b` and `s` = lane sum of the rounded products `s_b·exp(m_b − m)`, lane = block
//!   index mod 32.
//! - `lse = m + ln(s)`, `loss = lse − z[label]`, or +0 where the label is [`IGNORED`]. A NaN `lse`
//!   or `loss` is the canonical NaN. `best` is the smallest `v` with `z[v] = m`, and 0 if there is
//!   none (every logit NaN).
//!
//! `lse` and `best` are given for every token, ignored or not. A token with a NaN or +∞ logit, or
//! with a block of nothing but −∞, has a NaN `lse`; the maximum hides nothing.
//!
//! Backward: `dz[t, v] = (exp(z − lse) − [v = label])·weight[t]`, the difference rounded, then the
//! product, then with a cap times the slope at `z`; +0 for all of an ignored token. `dh` is the
//! input-gradient slice product of `dz` and the head (`dz·scale_head[v]` rounded, sliced per token
//! and 512 of the vocabulary, chunks added ascending from zero); an ignored token's `dh` is +0
//! whatever the head holds. `dhead`, if requested, accumulates the weight-gradient slice product of
//! `dz` and `h` over token chunks of 512 that restart at row starts; ignored tokens contribute
//! their zeros.

use crate::backend::{F32, I32, Length, Matrix, Memory, Shaped, U32, Workspaces};
use crate::op::product::Product;
use crate::op::slices::SliceShape;
use crate::op::{Op, Output, lengths};
use isobit_numerics::elementary::{CANONICAL_NAN_BITS, SoftCap};
use isobit_numerics::slices::Profile;

/// Label of a token that is not a target.
pub const IGNORED: i32 = -100;
/// Vocabulary rows per maximum and sum: one chunk of the slice product.
pub const VOCABULARY_BLOCK: usize = 512;

#[derive(Clone, Copy, Debug)]
pub struct HeadLoss<'a> {
    pub row_starts: &'a [usize],
    pub hidden: usize,
    pub vocabulary: usize,
    /// Logits stay between plus and minus this.
    pub cap: Option<f32>,
    pub profile: Profile,
}

impl HeadLoss<'_> {
    pub fn tokens(&self) -> usize {
        self.row_starts[self.row_starts.len() - 1]
    }

    pub fn soft_cap(&self) -> Option<SoftCap> {
        self.cap.map(|cap| SoftCap::new(f64::from(cap)))
    }

    /// Multiply-adds of one product with the head.
    fn multiply_adds(&self) -> usize {
        self.tokens() * self.hidden * self.vocabulary
    }

    /// Panics unless the parameters are supported, `hidden` is the shape of the hidden states,
    /// `head` has the head's shape, and every tensor of `per_token` has one element per token.
    fn check<M: Memory>(
        &self,
        op: &'static str,
        hidden: SliceShape,
        head: Matrix<M>,
        per_token: &[(&'static str, usize)],
    ) {
        assert!(self.vocabulary > 0 && self.hidden > 0, "a head");
        assert!(self.cap.is_none_or(|cap| cap.is_normal() && cap > 0.0), "a cap is positive, not {:?}", self.cap);
        assert_eq!(self.row_starts.first(), Some(&0), "rows of data from the first token on");
        let segments = [0, self.tokens()];
        let (n, k) = (self.vocabulary, self.hidden);
        let logits = Product { segments: &segments, n, k, profile: self.profile, accumulate: false };
        logits.check_left(hidden);
        logits.check_weight(head);
        for &(tensor, length) in per_token {
            lengths(op, &[(tensor, length, self.tokens())]);
        }
    }

    /// Panics unless hidden states and their gradient have these lengths.
    fn check_gradient(&self, op: &'static str, h: usize, dh: usize) {
        let length = self.tokens() * self.hidden;
        lengths(op, &[("h", h, length), ("dh", dh, length)]);
    }

    /// A label that is neither a row of the head nor ignored is the caller's bug.
    pub(crate) fn check_labels(&self, labels: &[i32]) {
        assert_eq!(labels.len(), self.tokens(), "one label per token");
        for (token, &label) in labels.iter().enumerate() {
            let known = usize::try_from(label).is_ok_and(|label| label < self.vocabulary);
            assert!(known || label == IGNORED, "label {label} of token {token}, vocabulary {}", self.vocabulary);
        }
    }
}

/// `x`, with any NaN replaced by the canonical NaN.
#[inline(always)]
pub(crate) fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(CANONICAL_NAN_BITS) } else { x }
}

/// Loss, log-sum-exp and best token for each token.
pub struct HeadLossForward<'a, M: Memory> {
    pub loss: &'a mut F32<M>,
    pub lse: &'a mut F32<M>,
    pub best: &'a mut U32<M>,
    pub h: &'a M::Rows,
    pub head: Matrix<'a, M>,
    pub labels: &'a I32<M>,
    pub p: HeadLoss<'a>,
}

impl<M: Memory> Op<M> for HeadLossForward<'_, M> {
    const NAME: &'static str = "head_loss_forward";

    fn check(&self) {
        let per_token = [
            ("loss", self.loss.len()),
            ("lse", self.lse.len()),
            ("best", self.best.len()),
            ("labels", self.labels.len()),
        ];
        self.p.check(Self::NAME, self.h.shape(), self.head, &per_token);
    }

    fn multiply_adds(&self) -> usize {
        self.p.multiply_adds()
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.head_loss(&self.p)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.loss), Output::F32(self.lse), Output::U32(self.best)]
    }
}

/// Gradient of the hidden states, and of the head if requested.
pub struct HeadLossBackward<'a, M: Memory> {
    pub dh: &'a mut F32<M>,
    pub dhead: Option<&'a mut F32<M>>,
    /// The hidden states, sliced.
    pub rows: &'a M::Rows,
    pub h: &'a F32<M>,
    pub head: Matrix<'a, M>,
    pub labels: &'a I32<M>,
    pub lse: &'a F32<M>,
    pub weight: &'a F32<M>,
    pub p: HeadLoss<'a>,
}

impl<M: Memory> Op<M> for HeadLossBackward<'_, M> {
    const NAME: &'static str = "head_loss_backward";

    fn check(&self) {
        let p = &self.p;
        let per_token = [("labels", self.labels.len()), ("lse", self.lse.len()), ("weight", self.weight.len())];
        p.check(Self::NAME, self.rows.shape(), self.head, &per_token);
        p.check_gradient(Self::NAME, self.h.len(), self.dh.len());
        if let Some(dhead) = &self.dhead {
            lengths(Self::NAME, &[("dhead", dhead.len(), p.vocabulary * p.hidden)]);
        }
    }

    fn multiply_adds(&self) -> usize {
        // Recomputed logits, the gradient of the hidden states, that of the head.
        self.p.multiply_adds() * if self.dhead.is_some() { 3 } else { 2 }
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.head_loss(&self.p)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        let mut outputs = vec![Output::F32(self.dh)];
        outputs.extend(self.dhead.as_deref_mut().map(Output::F32));
        outputs
    }
}

/// `head_loss_forward`, then `head_loss_backward` without a gradient of the head.
pub struct HeadLossStep<'a, M: Memory> {
    pub loss: &'a mut F32<M>,
    pub lse: &'a mut F32<M>,
    pub best: &'a mut U32<M>,
    pub dh: &'a mut F32<M>,
    /// The hidden states, sliced.
    pub rows: &'a M::Rows,
    pub h: &'a F32<M>,
    pub head: Matrix<'a, M>,
    pub labels: &'a I32<M>,
    pub weight: &'a F32<M>,
    pub p: HeadLoss<'a>,
}

impl<M: Memory> HeadLossStep<'_, M> {
    pub(crate) fn forward(&mut self) -> HeadLossForward<'_, M> {
        let Self { rows: h, head, labels, p, .. } = *self;
        HeadLossForward { loss: self.loss, lse: self.lse, best: self.best, h, head, labels, p }
    }

    /// Call after `forward`.
    pub(crate) fn backward(&mut self) -> HeadLossBackward<'_, M> {
        let Self { rows, h, head, labels, weight, p, .. } = *self;
        HeadLossBackward { dh: self.dh, dhead: None, rows, h, head, labels, lse: self.lse, weight, p }
    }
}

impl<M: Memory> Op<M> for HeadLossStep<'_, M> {
    const NAME: &'static str = "head_loss_step";

    fn check(&self) {
        let per_token = [
            ("loss", self.loss.len()),
            ("lse", self.lse.len()),
            ("best", self.best.len()),
            ("labels", self.labels.len()),
            ("weight", self.weight.len()),
        ];
        self.p.check(Self::NAME, self.rows.shape(), self.head, &per_token);
        self.p.check_gradient(Self::NAME, self.h.len(), self.dh.len());
    }

    fn multiply_adds(&self) -> usize {
        3 * self.p.multiply_adds()
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.head_loss_step(&self.p)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.loss), Output::F32(self.lse), Output::U32(self.best), Output::F32(self.dh)]
    }
}
