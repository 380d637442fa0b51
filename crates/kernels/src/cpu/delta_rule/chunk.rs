//! One chunk forward: scores of the key head, decays of the value head, then panel by panel `Y`,
//! `δ`, `o` and the next state.

use super::scratch::{Scratch, Shape};
use super::tile::{
    Left, PANEL, ROWS, Right, ZERO, add, chain, columns, columns_mut, product, scale, start, store, transpose,
};
use crate::cpu::path::multiversion;
use crate::op::delta_rule::CHUNK;
use isobit_numerics::elementary::exp;

/// Rows of a tensor `[token, heads, width]` for one head.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) x: &'a [f32],
    pub(super) first: usize,
    pub(super) step: usize,
    pub(super) width: usize,
}

impl Rows<'_> {
    #[inline(always)]
    fn row(&self, i: usize) -> &[f32] {
        &self.x[self.first + i * self.step..][..self.width]
    }

    /// Copies the first `n` rows, padded with zeros.
    #[inline(always)]
    pub(super) fn pack(&self, out: &mut [f32], n: usize) {
        let stride = out.len() / CHUNK;
        for (i, out) in out.chunks_exact_mut(stride).enumerate() {
            if i < n {
                out[..self.width].copy_from_slice(self.row(i));
                out[self.width..].fill(0.0);
            } else {
                out.fill(0.0);
            }
        }
    }
}

multiversion! {
    /// Packs the key head's rows and forms `kk`, and `qk` if there are queries, up to the diagonal.
    pub(super) fn scores<_F>(scratch: &mut Scratch, shape: Shape, n: usize, q: Option<Rows>, k: Rows) {
        let padded = shape.key_padded;
        if let Some(q) = q {
            q.pack(scratch.q, n);
        }
        k.pack(scratch.k, n);
        transpose(scratch.k_transposed, CHUNK, scratch.k, padded, CHUNK, padded);
        let right = Right { x: scratch.k_transposed, stride: CHUNK };
        let mut tile = ZERO;
        let both = [(&*scratch.k, &mut *scratch.kk), (&*scratch.q, &mut *scratch.qk)];
        for (left, out) in both.into_iter().take(1 + usize::from(q.is_some())) {
            let left = Left { x: left, row: padded, step: 1 };
            for row in (0..n).step_by(ROWS) {
                for column in (0..row + ROWS).step_by(PANEL) {
                    product(shape.path, &mut tile, left.from(row), right.from(column), shape.key);
                    store(&tile, out, row * CHUNK + column, CHUNK);
                }
            }
        }
    }
}

multiversion! {
    /// Decays of a value head and the matrices they scale. Entries above the diagonal are
    /// arbitrary.
    pub(super) fn decays<F>(scratch: &mut Scratch, shape: Shape, n: usize, g: Rows, beta: Rows) {
        let mut row = [0.0f32; CHUNK];
        let mut from_start = 1.0;
        for i in 0..CHUNK {
            let a = if i < n { exp::<F>(g.row(i)[0]) } else { 0.0 };
            from_start = if i == 0 { a } else { from_start * a };
            scratch.decay[i] = from_start;
            scratch.beta[i] = if i < n { beta.row(i)[0] } else { 0.0 };
            for j in 0..CHUNK {
                row[j] *= a;
            }
            row[i] = 1.0;
            if i + 1 == n {
                scratch.rest.copy_from_slice(&row);
                scratch.rest[n..].fill(0.0);
            }
            let at = i * CHUNK;
            *columns_mut(scratch.between, at) = row;
            let (kk, qk) = (columns::<CHUNK>(scratch.kk, at), columns::<CHUNK>(scratch.qk, at));
            let minus_m = columns_mut::<CHUNK>(scratch.minus_m, at);
            for j in 0..CHUNK {
                minus_m[j] = -(kk[j] * row[j]);
            }
            let p = columns_mut::<CHUNK>(scratch.p, at);
            for j in 0..CHUNK {
                p[j] = qk[j] * row[j];
            }
        }
        for i in 0..CHUNK {
            let (rest, at) = (scratch.rest[i], i * shape.key_padded);
            let k = &scratch.k[at..at + shape.key_padded];
            for (out, k) in scratch.k_rest[at..at + shape.key_padded].iter_mut().zip(k) {
                *out = rest * k;
            }
        }
    }
}

multiversion! {
    /// `Y` and `δ` of one panel into the scratch, and `o` in place of `v` if wanted. An absent
    /// state counts as zeros.
    pub(super) fn corrections<F>(
        scratch: &mut Scratch,
        shape: Shape,
        n: usize,
        panel: usize,
        state: Option<&[f32]>,
        outputs: bool,
    ) {
        let (path, stride, column) = (shape.path, shape.value_padded, panel * PANEL);
        let k = Left { x: scratch.k, row: shape.key_padded, step: 1 };
        let q = Left { x: scratch.q, row: shape.key_padded, step: 1 };
        let minus_m = Left { x: scratch.minus_m, row: CHUNK, step: 1 };
        let p = Left { x: scratch.p, row: CHUNK, step: 1 };
        let state = state.map(|x| Right { x, stride: PANEL });
        for row in (0..n).step_by(ROWS) {
            let mut y = ZERO;
            if let Some(state) = state {
                product(path, &mut y, k.from(row), state, shape.key);
            }
            for r in 0..ROWS {
                let v = columns::<PANEL>(scratch.values, (row + r) * stride + column);
                for c in 0..PANEL {
                    y[r][c] = F::fma(-scratch.decay[row + r], y[r][c], v[c]);
                }
            }
            chain(path, &mut y, minus_m.from(row), Right { x: &scratch.delta[column..], stride }, 0..row);
            let mut delta = ZERO;
            // ORDER: every row takes the rows before it in ascending order; rows after one are
            // independent of each other.
            for r in 0..ROWS {
                scale(&mut delta[r], &y[r], scratch.beta[row + r]);
                for later in r + 1..ROWS {
                    add::<F>(&mut y[later], scratch.minus_m[(row + later) * CHUNK + row + r], &delta[r]);
                }
            }
            store(&y, scratch.y, row * stride + column, stride);
            store(&delta, scratch.delta, row * stride + column, stride);
            if !outputs {
                continue;
            }
            let mut o = ZERO;
            if let Some(state) = state {
                product(path, &mut o, q.from(row), state, shape.key);
                for r in 0..ROWS {
                    for c in 0..PANEL {
                        o[r][c] *= scratch.decay[row + r];
                    }
                }
            }
            chain(path, &mut o, p.from(row), Right { x: &scratch.delta[column..], stride }, 0..row);
            for at in 0..ROWS {
                for r in at..ROWS {
                    add::<F>(&mut o[r], scratch.p[(row + r) * CHUNK + row + at], &delta[at]);
                }
            }
            store(&o, scratch.values, row * stride + column, stride);
        }
    }
}

multiversion! {
    /// The next state of one panel.
    pub(super) fn advance<_F>(next: &mut [f32], scratch: &Scratch, shape: Shape, n: usize, panel: usize, state: Option<&[f32]>) {
        let k = Left { x: scratch.k_rest, row: 1, step: shape.key_padded };
        let delta = Right { x: &scratch.delta[panel * PANEL..], stride: shape.value_padded };
        let mut tile = ZERO;
        for row in (0..shape.key_padded).step_by(ROWS) {
            start(&mut tile, state, row, scratch.decay[n - 1]);
            chain(shape.path, &mut tile, k.from(row), delta, 0..n);
            store(&tile, next, row * PANEL, PANEL);
        }
    }
}
