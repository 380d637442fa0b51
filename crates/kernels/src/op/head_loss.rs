//! Fused LM head and cross-entropy (`docs/numerics.md`, "Head and loss"): the logits never exist as a whole.
//!
//! Logit `z[t, v]` is the forward slice product of hidden state and head row. Forward, over vocabulary blocks of 512:
//! - `m_b = max z` over the block, starting from −∞ with `z > m ? z : m` (a NaN never becomes the maximum), and `s_b` = lane
//!   sum of `exp(z − m_b)`, lane = index in the block mod 32. A NaN logit makes `s_b` NaN.
//! - `m = max m_b` and `s` = lane sum of the rounded products `s_b·exp(m_b − m)`, lane = block index mod 32.
//! - `lse = m + ln(s)`, `loss = lse − z[label]`, or +0 where the label is [`IGNORED`]. A NaN `lse` or `loss` is the canonical
//!   one. `best` is the smallest `v` with `z[v] = m`, and 0 if there is none (every logit NaN).
//!
//! `lse` and `best` are given for every token, ignored or not. A token with a NaN or +∞ logit, or with a block of nothing
//! but −∞, has a NaN `lse`; nothing is hidden by the maximum.
//!
//! Backward: `dz[t, v] = (exp(z − lse) − [v = label])·weight[t]`, the difference rounded, then the product; +0 for all of an
//! ignored token. `dh` is the input-gradient slice product of `dz` and the head (`dz·unit_head[v]` rounded, sliced per token
//! and 512 of the vocabulary, chunks folded ascending from zero); an ignored token's `dh` is +0 whatever the head holds.
//! `dhead`, if asked for, accumulates the weight-gradient slice product of `dz` and `h` over token chunks of 512 that
//! restart at row starts; ignored tokens take part with their zeros.

use isobit_numerics::elementary::CANONICAL_NAN_BITS;
use isobit_numerics::slices::Profile;

/// Label of a token that is not a target.
pub const IGNORED: i32 = -100;
/// Vocabulary rows whose maximum and sum are formed together: one chunk of the slice product.
pub const VOCABULARY_BLOCK: usize = 512;

#[derive(Clone, Copy, Debug)]
pub struct HeadLoss<'a> {
    pub row_starts: &'a [usize],
    pub hidden: usize,
    pub vocabulary: usize,
    pub profile: Profile,
}

impl HeadLoss<'_> {
    pub fn tokens(&self) -> usize {
        self.row_starts[self.row_starts.len() - 1]
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

/// `x`, any NaN replaced by the canonical one.
#[inline(always)]
pub(crate) fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(CANONICAL_NAN_BITS) } else { x }
}
