//! Attention (`docs/numerics.md`, "Attention"): causal, grouped heads, optional window, one span per document.
//!
//! Layouts: `q[t, heads, key_width]`, `k[t, kv_heads, key_width]`, `v[t, kv_heads, value_width]`, `o[t, heads, value_width]`,
//! `lse[t, heads]` (base 2). Query head `h` uses key head `h / (heads / kv_heads)`. Nothing a query computes depends on
//! later keys, on other spans, or on where its span lies in the buffers: key tiles count from the span's first key.

use isobit_numerics::slices::Profile;
use std::ops::Range;

/// Keys of one tile: the unit of the running softmax and of the slices of probabilities.
pub const KEY_TILE: usize = 128;
/// Queries of one tile: the unit of the slices of probabilities in the gradients of keys and values.
pub const QUERY_TILE: usize = 128;
/// Widest head, for keys and for values.
pub const HEAD_WIDTH_MAX: usize = 256;

/// One document: its queries are the last `queries.len()` of its positions, its keys are all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    pub queries: Range<usize>,
    pub keys: Range<usize>,
}

impl Span {
    /// Position of the first query inside the document.
    pub fn first_position(&self) -> usize {
        self.keys.len() - self.queries.len()
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    pub spans: &'a [Span],
    pub heads: usize,
    pub kv_heads: usize,
    pub key_width: usize,
    pub value_width: usize,
    /// Multiplies the scores; usually `1 / sqrt(key_width)`.
    pub scale: f32,
    /// Key `j` is visible to query `i` iff `j <= i` and `j + window > i`.
    pub window: Option<usize>,
    pub profile: Profile,
}
