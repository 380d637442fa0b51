//! Attention (`docs/numerics.md`, "Attention"): causal, grouped heads, optional window, one span
//! per document.
//!
//! Layouts: `q[t, heads, key_width]`, `k[t, kv_heads, key_width]`, `v[t, kv_heads, value_width]`,
//! `o[t, heads, value_width]`, `lse[t, heads]` (base 2); each gradient has the layout of its
//! tensor. Query head `h` uses key head `h / (heads / kv_heads)`. Nothing a query computes depends
//! on later keys, on other spans, or on where its span lies in the buffers: tiles count from the
//! span's first key. Rows of the buffers that belong to no span are neither read nor written.
//!
//! # What the bits are
//!
//! Float32, round to nearest even, every operation below rounded once; `fma` is one operation.
//! *Slicing* a vector follows "Slices" of `docs/numerics.md` with the whole vector as one chunk:
//! integers `[x]` and one scale. `⟨a, b⟩` is the chunk value of the exact integer sums over the
//! products that the profile keeps, as in the slice product. Sums written `lanes` have the shape of
//! `numerics::lanes`: 32 lanes, then halves. Positions `i` (queries) and `j` (keys) count from the
//! span's first key; key `j` is visible to query `i` iff `j ≤ i` and, with a window,
//! `j + window > i`. Keys that are not visible take no part in any step.
//!
//! Every row `q[i,h,:]`, `k[j,g,:]`, `v[j,g,:]` and (backward) `dO[i,h,:]` is sliced over its
//! width: scales `sq sk sv sdo`.
//!
//! Score, base 2: `z = ⟨q_i, k_j⟩ · ((sq_i · softmax_scale2) · sk_j)` with
//! `softmax_scale2 = f32(f64(softmax_scale) · log2 e)`. With a cap `c`, "Soft-capping" of that with
//! the limit `c · log2 e`; then `g` below is also multiplied by the slope at `z_ij`.
//!
//! Forward, per query, from `m = −∞`, `l = 0`, `O = 0`. Over the tiles of [`KEY_TILE`] keys,
//! ascending, that hold a visible key:
//!
//! ```text
//! m'  = max(m, z_j over the tile's visible keys)
//! a   = exp2(m - m')
//! p_j = exp2(z_j - m')
//! l   = fma(l, a, lanes Σ p_j)                lane = (j mod 128) mod 32; places without a visible key add +0
//! w   = slices of (p_j · sv_j) over the tile's visible keys, scale sw
//! O_d = fma(⟨w, v_:d⟩, sw, O_d · a)            integers of v; their scales are in w
//! m   = m'
//! ```
//!
//! and at the end `inverse = 1 / l`, `o_d = O_d · inverse`, `lse = m + ln(l) · f32(log2 e)`.
//!
//! Backward, per query head:
//!
//! ```text
//! D_i  = lanes Σ_d fma(dO_id, o_id, ·)
//! p_ij = exp2(z_ij - lse_i)
//! g_ij = p_ij · fma(⟨dO_i, v_j⟩, sdo_i · sv_j, -D_i)        with a cap: (…) · slope(z_ij)
//! dQ_i: from 0, key tiles ascending;            weights g_ij · (sk_j · softmax_scale) sliced over the tile's visible keys, scale sw:
//!       dQ_id = fma(⟨w, k_:d⟩, sw, dQ_id)
//! dK_j: from 0, tiles of QUERY_TILE ascending;  weights g_ij · (sq_i · softmax_scale) sliced over the tile's queries that see j:
//!       dK_jd = fma(⟨w, q_:d⟩, sw, dK_jd)
//! dV_j: likewise;                               weights p_ij · sdo_i:
//!       dV_jd = fma(⟨w, dO_:d⟩, sw, dV_jd)
//! ```
//!
//! Gradients of a key head are those of its query heads added in ascending order, starting from the
//! first one's value. Maxima and integer sums are exact, so their order is free; signed zeros of
//! `m` cannot reach a result. If a visible row holds a non-finite number, the results that use it
//! are NaN with unspecified payload.

use crate::backend::{F32, Length, Memory, Workspaces};
use crate::op::{Op, Output, lengths};
use isobit_numerics::elementary::SoftCap;
use isobit_numerics::slices::Profile;
use std::ops::Range;

/// Keys per tile: the granularity of the running softmax and of slicing probabilities.
pub const KEY_TILE: usize = 128;
/// Queries per tile: the granularity of slicing probabilities in the gradients of keys and values.
pub const QUERY_TILE: usize = 128;
/// Widest head, for keys and for values.
pub const HEAD_WIDTH_MAX: usize = 256;

/// One document: its queries are the last `queries.len()` of its positions, its keys are all of
/// them.
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
    /// Query rows of different spans do not overlap; in the backward pass key rows do not either.
    pub spans: &'a [Span],
    pub heads: usize,
    pub kv_heads: usize,
    pub key_width: usize,
    pub value_width: usize,
    /// Multiplies the scores; usually `1 / sqrt(key_width)`.
    pub softmax_scale: f32,
    /// Key `j` is visible to query `i` iff `j <= i` and `j + window > i`.
    pub window: Option<usize>,
    /// Scores stay between plus and minus this.
    pub cap: Option<f32>,
    pub profile: Profile,
}

impl Attention<'_> {
    /// Query heads that share one key head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// The scale of base-2 scores.
    pub fn softmax_scale_base2(&self) -> f32 {
        (f64::from(self.softmax_scale) * std::f64::consts::LOG2_E) as f32
    }

    /// The cap of base-2 scores.
    pub fn cap_base2(&self) -> Option<SoftCap> {
        self.cap.map(|cap| SoftCap::new(f64::from(cap) * std::f64::consts::LOG2_E))
    }

    /// Positions of the keys that the query at `position` sees.
    pub fn visible(&self, position: usize) -> Range<usize> {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1
    }

    /// Visible (query, key) pairs of one head.
    pub(crate) fn pairs(&self) -> usize {
        let positions = self.spans.iter().flat_map(|span| span.first_position()..span.keys.len());
        positions.map(|position| self.visible(position).len()).sum()
    }

    /// Panics unless `q`, `o`, `lse` hold whole tokens up to the last query, `k` and `v` up to the
    /// last key.
    pub(crate) fn check_lengths(&self, op: &'static str, [q, o, lse]: [usize; 3], [k, v]: [usize; 2]) {
        let (queries, keys) = (lse / self.heads, k / (self.kv_heads * self.key_width));
        let (q_want, o_want) = (queries * self.heads * self.key_width, queries * self.heads * self.value_width);
        let (k_want, v_want) = (keys * self.kv_heads * self.key_width, keys * self.kv_heads * self.value_width);
        let lse_want = queries * self.heads;
        lengths(op, &[("q", q, q_want), ("o", o, o_want), ("lse", lse, lse_want), ("k", k, k_want), ("v", v, v_want)]);
        for span in self.spans {
            assert!(span.queries.end <= queries && span.keys.end <= keys, "{op}: {span:?} lies within the tensors");
        }
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
            self.kv_heads > 0 && self.heads > 0 && self.heads.is_multiple_of(self.kv_heads),
            "{} query heads share {} key heads evenly",
            self.heads,
            self.kv_heads
        );
        assert!(self.cap.is_none_or(|cap| cap.is_normal() && cap > 0.0), "a cap is positive, not {:?}", self.cap);
        assert!(self.window != Some(0), "a window holds at least the query's own key");
        check_disjoint("queries", self.spans.iter().map(|span| span.queries.clone()));
        for span in self.spans {
            assert!(
                span.queries.len() <= span.keys.len(),
                "queries are the last positions of their document: {span:?}"
            );
        }
    }

    /// Panics unless every position of every document is a query, as the gradients of keys require.
    pub fn check_backward(&self) {
        check_disjoint("keys", self.spans.iter().map(|span| span.keys.clone()));
        for span in self.spans {
            assert_eq!(span.queries.len(), span.keys.len(), "in the backward pass all positions are queries: {span:?}");
        }
    }
}

/// Panics if two ranges overlap: backends give the spans to different threads.
fn check_disjoint(what: &str, ranges: impl Iterator<Item = Range<usize>>) {
    let mut ranges: Vec<Range<usize>> = ranges.filter(|range| !range.is_empty()).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    for pair in ranges.windows(2) {
        assert!(pair[0].end <= pair[1].start, "{what} of two spans overlap: {pair:?}");
    }
}

/// `o`, and the logarithm of each query's denominator.
pub struct AttentionForward<'a, M: Memory> {
    pub o: &'a mut F32<M>,
    /// Base 2, for the backward pass.
    pub lse: &'a mut F32<M>,
    pub q: &'a F32<M>,
    pub k: &'a F32<M>,
    pub v: &'a F32<M>,
    pub p: Attention<'a>,
}

impl<M: Memory> Op<M> for AttentionForward<'_, M> {
    const NAME: &'static str = "attention_forward";

    fn check(&self) {
        self.p.check();
        self.p.check_lengths(Self::NAME, [self.q.len(), self.o.len(), self.lse.len()], [self.k.len(), self.v.len()]);
    }

    fn multiply_adds(&self) -> usize {
        self.p.pairs() * self.p.heads * (self.p.key_width + self.p.value_width)
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.attention(&self.p)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.o), Output::Kept(self.lse)]
    }
}

/// Gradients of queries, keys and values.
pub struct AttentionBackward<'a, M: Memory> {
    pub dq: &'a mut F32<M>,
    pub dk: &'a mut F32<M>,
    pub dv: &'a mut F32<M>,
    pub d_o: &'a F32<M>,
    pub q: &'a F32<M>,
    pub k: &'a F32<M>,
    pub v: &'a F32<M>,
    pub o: &'a F32<M>,
    pub lse: &'a F32<M>,
    pub p: Attention<'a>,
}

impl<M: Memory> Op<M> for AttentionBackward<'_, M> {
    const NAME: &'static str = "attention_backward";

    fn check(&self) {
        self.p.check();
        self.p.check_backward();
        self.p.check_lengths(Self::NAME, [self.q.len(), self.o.len(), self.lse.len()], [self.k.len(), self.v.len()]);
        lengths(
            Self::NAME,
            &[
                ("dq", self.dq.len(), self.q.len()),
                ("dk", self.dk.len(), self.k.len()),
                ("dv", self.dv.len(), self.v.len()),
                ("d_o", self.d_o.len(), self.o.len()),
            ],
        );
    }

    fn multiply_adds(&self) -> usize {
        // Recomputed scores, dP and dV, dQ and dK.
        self.p.pairs() * self.p.heads * (3 * self.p.key_width + 2 * self.p.value_width)
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.attention(&self.p)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dq), Output::F32(self.dk), Output::F32(self.dv)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attention(spans: &[Span]) -> Attention<'_> {
        Attention {
            spans,
            heads: 1,
            kv_heads: 1,
            key_width: 4,
            value_width: 4,
            softmax_scale: 0.5,
            window: None,
            cap: None,
            profile: Profile::X2,
        }
    }

    #[test]
    fn spans_in_any_order_with_empty_ones() {
        let span = |start: usize, end: usize| Span { queries: start..end, keys: start..end };
        attention(&[span(4, 7), span(0, 4), span(2, 2), span(7, 9)]).check();
        attention(&[span(4, 7), span(0, 4), span(2, 2), span(7, 9)]).check_backward();
    }

    #[test]
    #[should_panic(expected = "queries of two spans overlap: [0..4, 3..7]")]
    fn queries_of_two_spans() {
        attention(&[Span { queries: 3..7, keys: 3..7 }, Span { queries: 0..4, keys: 0..4 }]).check();
    }

    #[test]
    #[should_panic(expected = "keys of two spans overlap: [0..4, 0..4]")]
    fn keys_of_two_spans() {
        let spans = [Span { queries: 0..4, keys: 0..4 }, Span { queries: 4..8, keys: 0..4 }];
        attention(&spans).check();
        attention(&spans).check_backward();
    }
}
