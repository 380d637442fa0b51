//! The gated delta rule as loops, one value head of one document at a time, chunk by chunk.

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::delta_rule::chunks;
use crate::op::{DeltaRule, DeltaRuleBackward, DeltaRuleForward};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::exp;
use isobit_numerics::fma::fma;
use isobit_numerics::lanes::{dot, sum};
use std::ops::Range;

/// `q`, `k`, `v`, `g`, `beta`.
type Inputs<'a> = [&'a [f32]; 5];

/// The tokens of one chunk as one value head sees them; rows count from the chunk's first token.
struct Chunk {
    n: usize,
    q: Vec<Vec<f32>>,
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
    beta: Vec<f32>,
    /// `A_i`.
    decay: Vec<f32>,
    /// `Γ_ij`, zero above the diagonal.
    between: Vec<Vec<f32>>,
    kk: Vec<Vec<f32>>,
    qk: Vec<Vec<f32>>,
}

/// The chain of `a_i·b_i` after `first`.
fn chain(first: f32, pairs: impl Iterator<Item = (f32, f32)>) -> f32 {
    pairs.fold(first, |acc, (a, b)| fma(a, b, acc))
}

fn product(a: &[f32], b: &[f32]) -> f32 {
    chain(0.0, a.iter().copied().zip(b.iter().copied()))
}

impl Chunk {
    fn new([q, k, v, g, beta]: Inputs, tokens: Range<usize>, head: usize, p: &DeltaRule) -> Self {
        let n = tokens.len();
        let rows = |x: &[f32], heads: usize, head: usize, width: usize| -> Vec<Vec<f32>> {
            tokens.clone().map(|t| x[(t * heads + head) * width..][..width].to_vec()).collect()
        };
        let scalar = |x: &[f32]| -> Vec<f32> { tokens.clone().map(|t| x[t * p.value_heads + head]).collect() };
        let q = rows(q, p.key_heads, head / p.group(), p.key_width);
        let k = rows(k, p.key_heads, head / p.group(), p.key_width);
        let a: Vec<f32> = scalar(g).into_iter().map(exp::<SoftFma>).collect();
        let mut decay = a.clone();
        let mut between = vec![vec![0.0; n]; n];
        for i in 0..n {
            if i > 0 {
                decay[i] = decay[i - 1] * a[i];
            }
            for j in 0..i {
                between[i][j] = between[i - 1][j] * a[i];
            }
            between[i][i] = 1.0;
        }
        let scores = |left: &[Vec<f32>]| -> Vec<Vec<f32>> {
            (0..n).map(|i| (0..=i).map(|j| product(&left[i], &k[j])).collect()).collect()
        };
        let (kk, qk) = (scores(&k), scores(&q));
        let v = rows(v, p.value_heads, head, p.value_width);
        Self { n, q, k, v, beta: scalar(beta), decay, between, kk, qk }
    }

    fn m(&self, i: usize, j: usize) -> f32 {
        self.kk[i][j] * self.between[i][j]
    }

    fn p(&self, i: usize, j: usize) -> f32 {
        self.qk[i][j] * self.between[i][j]
    }

    /// The decay from token `i` to the chunk's end.
    fn rest(&self, i: usize) -> f32 {
        self.between[self.n - 1][i]
    }

    /// `Y` and `δ`.
    fn corrections(&self, s: &[Vec<f32>]) -> [Vec<Vec<f32>>; 2] {
        let [mut y, mut delta] = [self.v.clone(), self.v.clone()];
        for i in 0..self.n {
            for c in 0..self.v[i].len() {
                let read = chain(0.0, self.k[i].iter().zip(s).map(|(&k, s)| (k, s[c])));
                let first = fma(-self.decay[i], read, self.v[i][c]);
                y[i][c] = chain(first, (0..i).map(|j| (-self.m(i, j), delta[j][c])));
                delta[i][c] = self.beta[i] * y[i][c];
            }
        }
        [y, delta]
    }

    fn output(&self, s: &[Vec<f32>], delta: &[Vec<f32>], i: usize, c: usize) -> f32 {
        let read = chain(0.0, self.q[i].iter().zip(s).map(|(&q, s)| (q, s[c])));
        chain(self.decay[i] * read, (0..=i).map(|j| (self.p(i, j), delta[j][c])))
    }

    /// The state after the chunk.
    fn advance(&self, s: &mut [Vec<f32>], delta: &[Vec<f32>]) {
        for (d, row) in s.iter_mut().enumerate() {
            for (c, s) in row.iter_mut().enumerate() {
                let first = self.decay[self.n - 1] * *s;
                *s = chain(first, (0..self.n).map(|i| (self.rest(i) * self.k[i][d], delta[i][c])));
            }
        }
    }
}

impl Run<DeltaRuleForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut DeltaRuleForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let DeltaRuleForward { o, final_state, q, k, v, g, beta, initial_state, p } = op;
        let inputs: Inputs = [q, k, v, g, beta];
        let state_length = p.key_width * p.value_width;
        for document in 0..p.documents() {
            for head in 0..p.value_heads {
                let at = (document * p.value_heads + head) * state_length;
                let mut s = vec![vec![0.0; p.value_width]; p.key_width];
                if let Some(initial) = *initial_state {
                    s = initial[at..at + state_length].chunks(p.value_width).map(<[f32]>::to_vec).collect();
                }
                for tokens in chunks(p.document(document)) {
                    let chunk = Chunk::new(inputs, tokens.clone(), head, p);
                    let [_, delta] = chunk.corrections(&s);
                    for (i, t) in tokens.enumerate() {
                        for c in 0..p.value_width {
                            o[(t * p.value_heads + head) * p.value_width + c] = chunk.output(&s, &delta, i, c);
                        }
                    }
                    chunk.advance(&mut s, &delta);
                }
                if let Some(last) = final_state {
                    last[at..at + state_length].copy_from_slice(&s.concat());
                }
            }
        }
    }
}

/// One value head's contribution to the gradients of a chunk.
struct Gradients {
    q: Vec<Vec<f32>>,
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
    g: Vec<f32>,
    beta: Vec<f32>,
}

/// Turns `ds`, the gradient of the state after the chunk, into that of the state `s` before it.
fn backward_chunk(chunk: &Chunk, ds: &mut [Vec<f32>], s: &[Vec<f32>], d_o: &[Vec<f32>]) -> Gradients {
    let n = chunk.n;
    let [y, delta] = chunk.corrections(s);
    let width = y[0].len();
    let mut grads =
        Gradients { q: chunk.q.clone(), k: chunk.k.clone(), v: y.clone(), g: vec![0.0; n], beta: vec![0.0; n] };
    for j in (0..n).rev() {
        let mut d_delta = vec![0.0; width];
        for c in 0..width {
            let read = chain(0.0, chunk.k[j].iter().zip(&*ds).map(|(&k, ds)| (k, ds[c])));
            let seen = chain(chunk.rest(j) * read, (j..n).map(|i| (chunk.p(i, j), d_o[i][c])));
            d_delta[c] = chain(seen, (j + 1..n).rev().map(|i| (-chunk.m(i, j), grads.v[i][c])));
            grads.v[j][c] = chunk.beta[j] * d_delta[c];
        }
        grads.beta[j] = dot::<SoftFma>(&d_delta, &y[j]);
    }
    let dy = &grads.v;
    let weights = |left: &[Vec<f32>], i: usize, j: usize| product(&left[i], &delta[j]) * chunk.between[i][j];
    let triangle = |left: &[Vec<f32>], diagonal: usize| -> Vec<Vec<f32>> {
        (0..n).map(|i| (0..n).map(|j| if j < i + diagonal { weights(left, i, j) } else { 0.0 }).collect()).collect()
    };
    let (wq, wk) = (triangle(d_o, 1), triangle(dy, 0));
    let by_columns = |x: &[f32], state: &[f32]| product(x, state);
    let (mut reads, mut ends) = (vec![0.0; n], vec![0.0; n]);
    for i in 0..n {
        let from_q: Vec<f32> = s.iter().map(|s| chunk.decay[i] * by_columns(&d_o[i], s)).collect();
        let from_k: Vec<f32> = s.iter().map(|s| -(chunk.decay[i] * by_columns(&dy[i], s))).collect();
        let from_end: Vec<f32> = ds.iter().map(|ds| chunk.rest(i) * by_columns(&delta[i], ds)).collect();
        reads[i] = dot::<SoftFma>(&chunk.q[i], &from_q) + dot::<SoftFma>(&chunk.k[i], &from_k);
        ends[i] = dot::<SoftFma>(&chunk.k[i], &from_end);
        for d in 0..chunk.k[i].len() {
            grads.q[i][d] = chain(from_q[d], (0..=i).map(|j| (wq[i][j], chunk.k[j][d])));
            let queries = chain(from_k[d] + from_end[d], (i..n).map(|l| (wq[l][i], chunk.q[l][d])));
            let symmetric = |j: usize| if j < i { wk[i][j] } else { wk[j][i] };
            grads.k[i][d] = chain(queries, (0..n).map(|j| (-symmetric(j), chunk.k[j][d])));
        }
    }
    let columns: Vec<f32> = (0..width).map(|c| chain(0.0, s.iter().zip(&*ds).map(|(s, ds)| (ds[c], s[c])))).collect();
    let mut later = chunk.decay[n - 1] * sum(&columns);
    let mut crossing = vec![0.0; n];
    for m in (0..n).rev() {
        for j in 0..m {
            crossing[j] += fma(wq[m][j], chunk.qk[m][j], -(wk[m][j] * chunk.kk[m][j]));
        }
        later += reads[m];
        let earlier = ends[..m].iter().fold(0.0, |acc, end| acc + end);
        grads.g[m] = (sum(&crossing[..m]) + later) + earlier;
    }
    for (d, row) in ds.iter_mut().enumerate() {
        for (c, ds) in row.iter_mut().enumerate() {
            let queries = (0..n).map(|i| (chunk.decay[i] * chunk.q[i][d], d_o[i][c]));
            let keys = (0..n).map(|i| (-(chunk.decay[i] * chunk.k[i][d]), dy[i][c]));
            *ds = chain(chunk.decay[n - 1] * *ds, queries.chain(keys));
        }
    }
    grads
}

impl Run<DeltaRuleBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut DeltaRuleBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let DeltaRuleBackward { dq, dk, dv, dg, dbeta, d_o, q, k, v, g, beta, p } = op;
        let inputs: Inputs = [q, k, v, g, beta];
        let (kw, vw) = (p.key_width, p.value_width);
        for document in 0..p.documents() {
            for head in 0..p.value_heads {
                let mut states = vec![vec![vec![0.0; vw]; kw]];
                for tokens in chunks(p.document(document)) {
                    let chunk = Chunk::new(inputs, tokens, head, p);
                    let mut s = states[states.len() - 1].clone();
                    let [_, delta] = chunk.corrections(&s);
                    chunk.advance(&mut s, &delta);
                    states.push(s);
                }
                let mut ds = vec![vec![0.0; vw]; kw];
                for (tokens, s) in chunks(p.document(document)).zip(&states).rev() {
                    let chunk = Chunk::new(inputs, tokens.clone(), head, p);
                    let row = |t: usize| (t * p.value_heads + head) * vw;
                    let d_o: Vec<Vec<f32>> = tokens.clone().map(|t| d_o[row(t)..][..vw].to_vec()).collect();
                    let grads = backward_chunk(&chunk, &mut ds, s, &d_o);
                    for (i, t) in tokens.enumerate() {
                        dv[row(t)..][..vw].copy_from_slice(&grads.v[i]);
                        dg[t * p.value_heads + head] = grads.g[i];
                        dbeta[t * p.value_heads + head] = grads.beta[i];
                        let at = (t * p.key_heads + head / p.group()) * kw;
                        for (out, new) in [(&mut *dq, &grads.q[i]), (&mut *dk, &grads.k[i])] {
                            let out = &mut out[at..][..kw];
                            // ORDER: value heads ascend; the first one's value is the start of the
                            // sum.
                            if head.is_multiple_of(p.group()) {
                                out.copy_from_slice(new);
                            } else {
                                out.iter_mut().zip(new).for_each(|(out, new)| *out += new);
                            }
                        }
                    }
                }
            }
        }
    }
}
