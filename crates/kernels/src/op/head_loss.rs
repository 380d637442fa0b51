//! Fused LM head and cross-entropy (`docs/numerics.md`, "Head and loss"): the logits never exist as a whole.
//!
//! Logit `z[t, v]` is the forward slice product of hidden state and head row. Forward, over vocabulary blocks of 512:
//! `m_b = max z`, `s_b` = lane sum of `exp(z − m_b)`; then over blocks `m = max m_b`, `s` = lane sum of `s_b·exp(m_b − m)`;
//! `lse = m + ln(s)`; `loss = lse − z[label]`, zero where the label is ignored. `best` is the largest logit's index, the
//! smallest index among equals.
//!
//! Backward: `dz = (exp(z − lse) − [v = label])·weight[t]` (two roundings), +0 for ignored tokens; `dh` is the input-gradient
//! slice product of `dz` and the head; `dhead` the weight-gradient slice product of `dz` and `h`.

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
}
