//! Attention, the definition (`op/attention.rs` states it in words): plain loops over spans, heads,
//! queries, tiles.
//!
//! Integer sums are exact, so order matters only in the loops over tiles and the lane sums.

use super::product::chunk_value;
use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::attention::{KEY_TILE, QUERY_TILE};
use crate::op::{Attention, AttentionBackward, AttentionForward};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::{SoftCap, exp2, ln};
use isobit_numerics::fma::fma;
use isobit_numerics::lanes::{dot, max, sum};
use isobit_numerics::slices::{Profile, Quantiser, magnitude_bits};
use std::ops::Range;

/// A vector as one chunk: integers and their scale.
struct Sliced {
    integers: Vec<i32>,
    scale: f32,
}

impl Sliced {
    fn new(profile: Profile, x: &[f32]) -> Self {
        let quantiser = Quantiser::of(profile, x.iter().map(|&x| magnitude_bits(x)).max().unwrap_or(0));
        Self { integers: x.iter().map(|&x| quantiser.quantise(profile, x)).collect(), scale: quantiser.scale }
    }

    /// Rows `rows` of head `head` of a `[t, heads, width]` tensor.
    fn rows(profile: Profile, x: &[f32], rows: &Range<usize>, head: usize, heads: usize, width: usize) -> Vec<Self> {
        rows.clone().map(|t| Self::new(profile, &x[(t * heads + head) * width..][..width])).collect()
    }
}

/// `Σ_d a[d]·b[d]` before the scales of both.
fn inner(profile: Profile, a: &Sliced, b: &Sliced) -> f32 {
    chunk_value(profile, a.integers.iter().copied().zip(b.integers.iter().copied()))
}

/// `Σ_j weights[j]·rows[j][d]` before the scale of the weights; the rows' scales are already part
/// of the weights.
fn combine(profile: Profile, weights: &Sliced, rows: &[Sliced], d: usize) -> f32 {
    chunk_value(profile, weights.integers.iter().zip(rows).map(|(&w, row)| (w, row.integers[d])))
}

/// Score of query and key, base 2.
fn score(p: &Attention, q: &Sliced, k: &Sliced) -> f32 {
    let score = inner(p.profile, q, k) * ((q.scale * p.softmax_scale_base2()) * k.scale);
    p.cap_base2().map_or(score, |cap| cap.apply::<SoftFma>(score))
}

impl Run<AttentionForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut AttentionForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let AttentionForward { o, lse, q, k, v, p } = op;
        for span in p.spans {
            for h in 0..p.heads {
                let kv = h / p.group();
                let q = Sliced::rows(p.profile, q, &span.queries, h, p.heads, p.key_width);
                let k = Sliced::rows(p.profile, k, &span.keys, kv, p.kv_heads, p.key_width);
                let v = Sliced::rows(p.profile, v, &span.keys, kv, p.kv_heads, p.value_width);
                for (index, q) in q.iter().enumerate() {
                    let visible = p.visible(span.first_position() + index);
                    let row = (span.queries.start + index) * p.heads + h;
                    lse[row] = query_forward(&mut o[row * p.value_width..][..p.value_width], q, &k, &v, &visible, p);
                }
            }
        }
    }
}

/// One query: running maximum `m`, denominator `l` and weighted sum `o` over the tiles that hold a
/// visible key.
fn query_forward(o: &mut [f32], q: &Sliced, k: &[Sliced], v: &[Sliced], visible: &Range<usize>, p: &Attention) -> f32 {
    let (mut m, mut l) = (f32::NEG_INFINITY, 0.0);
    o.fill(0.0);
    for (keys, tile) in tiles(visible, KEY_TILE) {
        let z: Vec<f32> = keys.clone().map(|j| score(p, q, &k[j])).collect();
        let m_new = z.iter().fold(m, |m, &z| max(m, z));
        let alpha = exp2::<SoftFma>(m - m_new);
        let probabilities: Vec<f32> = z.iter().map(|z| exp2::<SoftFma>(z - m_new)).collect();
        // ORDER: the lane of a key is its place in the tile; places that hold no visible key add
        // +0.
        let mut places = [0.0; KEY_TILE];
        places[keys.start - tile..keys.end - tile].copy_from_slice(&probabilities);
        l = fma(l, alpha, sum(&places));
        let folded: Vec<f32> = keys.clone().zip(&probabilities).map(|(j, p)| p * v[j].scale).collect();
        let weights = Sliced::new(p.profile, &folded);
        for (d, o) in o.iter_mut().enumerate() {
            *o = fma(combine(p.profile, &weights, &v[keys.clone()], d), weights.scale, *o * alpha);
        }
        m = m_new;
    }
    let inverse = 1.0 / l;
    for o in o.iter_mut() {
        *o *= inverse;
    }
    m + ln::<SoftFma>(l) * std::f32::consts::LOG2_E
}

/// `range` split at multiples of `size`, ascending, each part with its tile's first index.
fn tiles(range: &Range<usize>, size: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
    let range = range.clone();
    (range.start / size..range.end.div_ceil(size))
        .map(move |tile| (range.start.max(tile * size)..range.end.min((tile + 1) * size), tile * size))
}

/// Operands of the backward pass of one (span, query head); indices are positions in the document.
struct Head {
    q: Vec<Sliced>,
    k: Vec<Sliced>,
    v: Vec<Sliced>,
    d_o: Vec<Sliced>,
    lse: Vec<f32>,
    /// `Σ_d dO·o` per query.
    delta: Vec<f32>,
}

impl Head {
    fn probability(&self, p: &Attention, i: usize, j: usize) -> f32 {
        exp2::<SoftFma>(score(p, &self.q[i], &self.k[j]) - self.lse[i])
    }

    /// Gradient of the score before its softmax scale: `P·(dP − D)`, times the slope of a cap.
    fn grad_score(&self, p: &Attention, i: usize, j: usize) -> f32 {
        let (d_o, v) = (&self.d_o[i], &self.v[j]);
        let grad = self.probability(p, i, j) * fma(inner(p.profile, d_o, v), d_o.scale * v.scale, -self.delta[i]);
        let slope = |cap: SoftCap| cap.slope::<SoftFma>(score(p, &self.q[i], &self.k[j]));
        p.cap_base2().map_or(grad, |cap| grad * slope(cap))
    }
}

impl Run<AttentionBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut AttentionBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let AttentionBackward { dq, dk, dv, d_o, q, k, v, o, lse, p } = op;
        let (kw, vw) = (p.key_width, p.value_width);
        for span in p.spans {
            for h in 0..p.heads {
                let kv = h / p.group();
                let row = |index: usize| (span.queries.start + index) * p.heads + h;
                let head = Head {
                    q: Sliced::rows(p.profile, q, &span.queries, h, p.heads, kw),
                    k: Sliced::rows(p.profile, k, &span.keys, kv, p.kv_heads, kw),
                    v: Sliced::rows(p.profile, v, &span.keys, kv, p.kv_heads, vw),
                    d_o: Sliced::rows(p.profile, d_o, &span.queries, h, p.heads, vw),
                    lse: (0..span.queries.len()).map(|i| lse[row(i)]).collect(),
                    delta: (0..span.queries.len())
                        .map(|i| dot::<SoftFma>(&d_o[row(i) * vw..][..vw], &o[row(i) * vw..][..vw]))
                        .collect(),
                };
                for i in 0..span.queries.len() {
                    query_backward(&mut dq[row(i) * kw..][..kw], &head, i, p);
                }
                // ORDER: heads of a group ascend; the first one's value is stored, the others are
                // added to it.
                let first = h % p.group() == 0;
                for j in 0..span.keys.len() {
                    let row = (span.keys.start + j) * p.kv_heads + kv;
                    let (key, value) = key_backward(&head, j, p);
                    let add = |into: &mut [f32], from: &[f32]| {
                        into.iter_mut()
                            .zip(from)
                            .for_each(|(into, from)| *into = if first { *from } else { *into + from });
                    };
                    add(&mut dk[row * kw..][..kw], &key);
                    add(&mut dv[row * vw..][..vw], &value);
                }
            }
        }
    }
}

/// Gradient of one query: key tiles ascend.
fn query_backward(dq: &mut [f32], head: &Head, i: usize, p: &Attention) {
    dq.fill(0.0);
    for (keys, _) in tiles(&p.visible(i), KEY_TILE) {
        let folded: Vec<f32> =
            keys.clone().map(|j| head.grad_score(p, i, j) * (head.k[j].scale * p.softmax_scale)).collect();
        let weights = Sliced::new(p.profile, &folded);
        for (d, dq) in dq.iter_mut().enumerate() {
            *dq = fma(combine(p.profile, &weights, &head.k[keys.clone()], d), weights.scale, *dq);
        }
    }
}

/// One query head's contribution to the gradients of one key and its value: query tiles ascend.
fn key_backward(head: &Head, j: usize, p: &Attention) -> (Vec<f32>, Vec<f32>) {
    let (mut dk, mut dv) = (vec![0.0; p.key_width], vec![0.0; p.value_width]);
    let seen_by = j..p.window.map_or(head.q.len(), |window| head.q.len().min(j + window));
    for (queries, _) in tiles(&seen_by, QUERY_TILE) {
        let folded =
            |weight: &dyn Fn(usize) -> f32| Sliced::new(p.profile, &queries.clone().map(weight).collect::<Vec<_>>());
        let keys = folded(&|i| head.grad_score(p, i, j) * (head.q[i].scale * p.softmax_scale));
        for (d, dk) in dk.iter_mut().enumerate() {
            *dk = fma(combine(p.profile, &keys, &head.q[queries.clone()], d), keys.scale, *dk);
        }
        let values = folded(&|i| head.probability(p, i, j) * head.d_o[i].scale);
        for (d, dv) in dv.iter_mut().enumerate() {
            *dv = fma(combine(p.profile, &values, &head.d_o[queries.clone()], d), values.scale, *dv);
        }
    }
    (dk, dv)
}
