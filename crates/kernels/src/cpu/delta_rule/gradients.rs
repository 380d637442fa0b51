//! One chunk backward. First, panel by panel, the gradients carried between chunks: those of `δ`,
//! `v` and the state. Then, from both states and independent of other chunks, the gradients summed
//! over the value width: those of `q`, `k`, `g`, `beta`.

use super::scratch::{GradScratch, Scratch, Shape};
use super::tile::{
    Left, PANEL, ROWS, Right, ZERO, add, chain, chain_down, columns, columns_mut, product, scale, start, store,
    transpose,
};
use crate::cpu::path::multiversion;
use crate::op::delta_rule::CHUNK;
use isobit_numerics::Fma;
use isobit_numerics::lanes::{dot, sum};

/// A panel of columns of a chunk of `n` tokens.
#[derive(Clone, Copy)]
pub(super) struct PanelAt {
    pub(super) shape: Shape,
    pub(super) n: usize,
    pub(super) panel: usize,
}

multiversion! {
    /// `A·q` and `-(A·k)`.
    pub(super) fn decayed<_F>(grads: &mut GradScratch, scratch: &Scratch, shape: Shape) {
        for i in 0..CHUNK {
            let (decay, row) = (scratch.decay[i], i * shape.key_padded..(i + 1) * shape.key_padded);
            for (out, q) in grads.q_decayed[row.clone()].iter_mut().zip(&scratch.q[row.clone()]) {
                *out = decay * q;
            }
            for (out, k) in grads.k_decayed[row.clone()].iter_mut().zip(&scratch.k[row]) {
                *out = -(decay * k);
            }
        }
    }
}

multiversion! {
    /// Gradients of `δ` and of `Y` (which is that of `v`) for one panel, from the rows of `dO` in
    /// `scratch.values` and the gradient of the state after the chunk (zeros if absent); then the
    /// gradient of the state before it, if requested.
    pub(super) fn panel_backward<F>(
        grads: &mut GradScratch,
        scratch: &Scratch,
        at: PanelAt,
        after: Option<&[f32]>,
        before: Option<&mut [f32]>,
    ) {
        let PanelAt { shape, n, panel } = at;
        corrections_back::<F>(grads, scratch, shape, n, panel, after);
        if let Some(before) = before {
            state_back(before, grads, scratch, shape, n, panel, after);
        }
    }
}

#[inline(always)]
fn corrections_back<F: Fma>(
    grads: &mut GradScratch,
    scratch: &Scratch,
    shape: Shape,
    n: usize,
    panel: usize,
    after: Option<&[f32]>,
) {
    let (path, stride, column) = (shape.path, shape.value_padded, panel * PANEL);
    let k = Left { x: scratch.k, row: shape.key_padded, step: 1 };
    let p = Left { x: scratch.p, row: 1, step: CHUNK };
    let minus_m = Left { x: scratch.minus_m, row: 1, step: CHUNK };
    let after = after.map(|x| Right { x, stride: PANEL });
    let d_o = Right { x: &scratch.values[column..], stride };
    for row in (0..n).step_by(ROWS).rev() {
        let end = (row + ROWS).min(n);
        let mut tile = ZERO;
        if let Some(after) = after {
            product(path, &mut tile, k.from(row), after, shape.key);
        }
        for r in 0..ROWS {
            for c in 0..PANEL {
                tile[r][c] *= scratch.rest[row + r];
            }
        }
        // ORDER: ascending, so the tile's own rows come before the later ones.
        for i in row..end {
            for j in row..=i {
                add::<F>(&mut tile[j - row], scratch.p[i * CHUNK + j], columns(scratch.values, i * stride + column));
            }
        }
        chain(path, &mut tile, p.from(row), d_o, end..n);
        // ORDER: descending, so the tile's own rows come after the later ones.
        chain_down(path, &mut tile, minus_m.from(row), Right { x: &grads.dy[column..], stride }, end..n);
        let mut dy = ZERO;
        for r in (0..end - row).rev() {
            scale(&mut dy[r], &tile[r], scratch.beta[row + r]);
            for earlier in 0..r {
                add::<F>(&mut tile[earlier], scratch.minus_m[(row + r) * CHUNK + row + earlier], &dy[r]);
            }
        }
        store(&tile, grads.d_delta, row * stride + column, stride);
        store(&dy, grads.dy, row * stride + column, stride);
    }
}

#[inline(always)]
fn state_back(
    before: &mut [f32],
    grads: &GradScratch,
    scratch: &Scratch,
    shape: Shape,
    n: usize,
    panel: usize,
    after: Option<&[f32]>,
) {
    let q = Left { x: grads.q_decayed, row: 1, step: shape.key_padded };
    let k = Left { x: grads.k_decayed, row: 1, step: shape.key_padded };
    let d_o = Right { x: &scratch.values[panel * PANEL..], stride: shape.value_padded };
    let dy = Right { x: &grads.dy[panel * PANEL..], stride: shape.value_padded };
    let mut tile = ZERO;
    for row in (0..shape.key_padded).step_by(ROWS) {
        start(&mut tile, after, row, scratch.decay[n - 1]);
        chain(shape.path, &mut tile, q.from(row), d_o, 0..n);
        chain(shape.path, &mut tile, k.from(row), dy, 0..n);
        store(&tile, before, row * PANEL, PANEL);
    }
}

multiversion! {
    /// Unpacks a kept panel into rows, plain and times `beta`: `Y` and `δ`, or the gradients of `δ`
    /// and of `Y`.
    pub(super) fn unpack<_F>(
        plain: &mut [f32],
        scaled: &mut [f32],
        beta: &[f32],
        at: PanelAt,
        kept: &[f32],
    ) {
        let PanelAt { shape, n, panel } = at;
        for i in 0..n.next_multiple_of(ROWS) {
            let at = i * shape.value_padded + panel * PANEL;
            let row = columns::<PANEL>(kept, i * PANEL);
            *columns_mut(plain, at) = *row;
            scale(columns_mut(scaled, at), row, beta[i]);
        }
    }
}

multiversion! {
    /// A panel of a state, transposed to panels along the key width.
    pub(super) fn transpose_state<_F>(out: &mut [f32], shape: Shape, panel: usize, state: &[f32]) {
        for keys in 0..shape.key_padded / PANEL {
            let out = &mut out[keys * shape.value_padded * PANEL + panel * PANEL * PANEL..];
            transpose(out, PANEL, &state[keys * PANEL * PANEL..], PANEL, PANEL, PANEL);
        }
    }
}

multiversion! {
    /// `chain over d of after·before` for each column of a panel.
    pub(super) fn state_product<F>(out: &mut [f32], shape: Shape, before: &[f32], after: &[f32]) {
        let mut sums = [0.0; PANEL];
        for d in 0..shape.key {
            let (before, after) = (columns::<PANEL>(before, d * PANEL), columns::<PANEL>(after, d * PANEL));
            for c in 0..PANEL {
                sums[c] = F::fma(after[c], before[c], sums[c]);
            }
        }
        out.copy_from_slice(&sums);
    }
}

multiversion! {
    /// The gradients summed over the value width. Leaves `dq` in `from_q`, `dk` in `from_k`, `dg`
    /// in `reads` and `dbeta` in `ends`. `states` is the sum over both states' products, undecayed;
    /// `has` flags which exist: the state before and the gradient after.
    pub(super) fn chunk_backward<F>(
        grads: &mut GradScratch,
        scratch: &Scratch,
        shape: Shape,
        n: usize,
        states: f32,
        has: [bool; 2],
    ) {
        weights(grads, scratch, shape, n);
        through_states(grads, scratch, shape, n, has);
        inner_products::<F>(grads, scratch, shape, n);
        through_weights::<F>(grads, scratch, shape, n);
        decay_gradients::<F>(grads, scratch, shape, n, states);
    }
}

/// `Wq` up to the diagonal, and `-W` of the keys on both sides of it.
#[inline(always)]
fn weights(grads: &mut GradScratch, scratch: &Scratch, shape: Shape, n: usize) {
    let stride = shape.value_padded;
    transpose(grads.delta_transposed, CHUNK, scratch.delta, stride, CHUNK, stride);
    let right = Right { x: grads.delta_transposed, stride: CHUNK };
    let mut tile = ZERO;
    for (left, out) in [(&*scratch.values, &mut *grads.wq), (&*grads.dy, &mut *grads.wk)] {
        let left = Left { x: left, row: stride, step: 1 };
        for row in (0..n).step_by(ROWS) {
            for column in (0..row + ROWS).step_by(PANEL) {
                product(shape.path, &mut tile, left.from(row), right.from(column), shape.value);
                for r in 0..ROWS {
                    let between = columns::<PANEL>(scratch.between, (row + r) * CHUNK + column);
                    for c in 0..PANEL {
                        tile[r][c] *= between[c];
                    }
                }
                store(&tile, out, row * CHUNK + column, CHUNK);
            }
        }
    }
    for i in 0..n {
        grads.wk[i * CHUNK + i] = -0.0;
        for j in 0..i {
            let minus = -grads.wk[i * CHUNK + j];
            grads.wk[i * CHUNK + j] = minus;
            grads.wk[j * CHUNK + i] = minus;
        }
    }
}

/// Contributions to `q` and `k` through the states before and after the chunk.
#[inline(always)]
fn through_states(grads: &mut GradScratch, scratch: &Scratch, shape: Shape, n: usize, has: [bool; 2]) {
    let (stride, keys) = (shape.value_padded, shape.key_padded);
    let d_o = Left { x: scratch.values, row: stride, step: 1 };
    let dy = Left { x: grads.dy, row: stride, step: 1 };
    let delta = Left { x: scratch.delta, row: stride, step: 1 };
    for column in (0..keys).step_by(PANEL) {
        let before = has[0].then(|| Right { x: &grads.state_transposed[column * stride..], stride: PANEL });
        let after = has[1].then(|| Right { x: &grads.grad_transposed[column * stride..], stride: PANEL });
        for row in (0..n).step_by(ROWS) {
            let at = row * keys + column;
            through(grads.from_q, d_o.from(row), before, &scratch.decay[row..], 1.0, at, shape);
            through(grads.from_k, dy.from(row), before, &scratch.decay[row..], -1.0, at, shape);
            through(grads.from_end, delta.from(row), after, &scratch.rest[row..], 1.0, at, shape);
        }
    }
}

/// A tile of a product over the value width, each row times `sign` times its factor, into rows at
/// `at`.
#[inline(always)]
fn through(out: &mut [f32], left: Left, right: Option<Right>, factors: &[f32], sign: f32, at: usize, shape: Shape) {
    let mut tile = ZERO;
    if let Some(right) = right {
        product(shape.path, &mut tile, left, right, shape.value);
    }
    for r in 0..ROWS {
        // Factors of ±1 are exact.
        scale(columns_mut(out, at + r * shape.key_padded), &tile[r], sign * factors[r]);
    }
}

/// Adds the contributions to `q` and `k` from within the chunk.
#[inline(always)]
fn through_weights<F: Fma>(grads: &mut GradScratch, scratch: &Scratch, shape: Shape, n: usize) {
    let (path, keys) = (shape.path, shape.key_padded);
    let wq = Left { x: grads.wq, row: CHUNK, step: 1 };
    let wq_transposed = Left { x: grads.wq, row: 1, step: CHUNK };
    let wk = Left { x: grads.wk, row: CHUNK, step: 1 };
    for column in (0..keys).step_by(PANEL) {
        let k = Right { x: &scratch.k[column..], stride: keys };
        let q = Right { x: &scratch.q[column..], stride: keys };
        for row in (0..n).step_by(ROWS) {
            let (end, at) = ((row + ROWS).min(n), row * keys + column);
            let mut dq = ZERO;
            for r in 0..ROWS {
                dq[r] = *columns(grads.from_q, at + r * keys);
            }
            chain(path, &mut dq, wq.from(row), k, 0..row);
            for j in row..end {
                for i in j..end {
                    add::<F>(&mut dq[i - row], grads.wq[i * CHUNK + j], columns(scratch.k, j * keys + column));
                }
            }
            store(&dq, grads.from_q, at, keys);
            let mut dk = ZERO;
            for r in 0..ROWS {
                let from_k = columns::<PANEL>(grads.from_k, at + r * keys);
                let from_end = columns::<PANEL>(grads.from_end, at + r * keys);
                for c in 0..PANEL {
                    dk[r][c] = from_k[c] + from_end[c];
                }
            }
            for l in row..end {
                for i in row..=l {
                    add::<F>(&mut dk[i - row], grads.wq[l * CHUNK + i], columns(scratch.q, l * keys + column));
                }
            }
            chain(path, &mut dk, wq_transposed.from(row), q, end..n);
            chain(path, &mut dk, wk.from(row), k, 0..n);
            store(&dk, grads.from_k, at, keys);
        }
    }
}

/// Gradients of the logarithms of `A` and of the last row of `Γ`, before the weights are added.
#[inline(always)]
fn inner_products<F: Fma>(grads: &mut GradScratch, scratch: &Scratch, shape: Shape, n: usize) {
    for i in 0..n {
        let row = i * shape.key_padded..i * shape.key_padded + shape.key;
        let (q, k) = (&scratch.q[row.clone()], &scratch.k[row.clone()]);
        grads.reads[i] = dot::<F>(q, &grads.from_q[row.clone()]) + dot::<F>(k, &grads.from_k[row.clone()]);
        grads.ends[i] = dot::<F>(k, &grads.from_end[row]);
    }
}

#[inline(always)]
fn decay_gradients<F: Fma>(grads: &mut GradScratch, scratch: &Scratch, shape: Shape, n: usize, states: f32) {
    let mut earlier = [0.0; CHUNK];
    for m in 1..n {
        earlier[m] = earlier[m - 1] + grads.ends[m - 1];
    }
    let mut later = scratch.decay[n - 1] * states;
    grads.crossing.fill(0.0);
    for m in (0..n).rev() {
        let row = m * CHUNK..m * CHUNK + m;
        let crossing = &mut grads.crossing[..m];
        let (wq, wk) = (&grads.wq[row.clone()], &grads.wk[row.clone()]);
        let (qk, kk) = (&scratch.qk[row.clone()], &scratch.kk[row]);
        for j in 0..m {
            crossing[j] += F::fma(wq[j], qk[j], wk[j] * kk[j]);
        }
        later += grads.reads[m];
        grads.reads[m] = (sum(crossing) + later) + earlier[m];
    }
    for i in 0..n {
        let row = i * shape.value_padded..i * shape.value_padded + shape.value;
        grads.ends[i] = dot::<F>(&grads.d_delta[row.clone()], &scratch.y[row]);
    }
}
