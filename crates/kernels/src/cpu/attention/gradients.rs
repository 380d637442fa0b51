//! One tile of the backward pass: 128 queries by 128 keys of one head.
//!
//! Probabilities `P` and score gradients `G = P·(dP − D)` of the tile are made block by block and kept as float32. Their rows,
//! sliced, are the left operand of dQ. Their columns, sliced, are the *right* operand of dK and dV: groups of four
//! rows interleave into right tiles without a transpose, and the sums come out as `[width][key]`.

use super::operands::{ROWS, SQUARE, as_tiles, pack_columns, quantise_row, tree_max};
use super::{TILE, Tensor, part};
use crate::cpu::block::{LeftView, Prepared, RightView, Sums, block_sums};
use crate::cpu::path::{Path, multiversion};
use crate::cpu::pool::SharedMut;
use crate::cpu::product::chunk_value;
use crate::cpu::slices::{BLOCK, TILE_BYTES, TILE_DEPTH, left_bias};
use crate::op::Attention;
use crate::op::attention::HEAD_WIDTH_MAX;
use isobit_numerics::elementary::exp2;
use isobit_numerics::slices::{Profile, Scale, magnitude_bits};
use std::ops::Range;

/// All operands of a call and where the results go.
pub(super) struct Gradients<'a> {
    pub(super) path: Path,
    pub(super) p: &'a Attention<'a>,
    pub(super) q: Tensor<'a>,
    pub(super) k: Tensor<'a>,
    pub(super) v: Tensor<'a>,
    pub(super) d_o: Tensor<'a>,
    pub(super) q_left: &'a [i8],
    pub(super) q_turned: &'a [i8],
    pub(super) q_units: &'a [f32],
    pub(super) k_right: &'a [i8],
    pub(super) k_turned: &'a [i8],
    pub(super) k_units: &'a [f32],
    pub(super) v_right: &'a [i8],
    pub(super) v_units: &'a [f32],
    pub(super) d_o_left: &'a [i8],
    pub(super) d_o_turned: &'a [i8],
    pub(super) d_o_units: &'a [f32],
    /// Per block like units.
    pub(super) lse: &'a [f32],
    pub(super) delta: &'a [f32],
    pub(super) dq: SharedMut<'a, f32>,
    /// `[head][block][width][64 keys]`
    pub(super) key_partials: SharedMut<'a, f32>,
    pub(super) value_partials: SharedMut<'a, f32>,
}

/// A tile and what is wanted of it. Positions count from the span's first.
pub(super) struct Tile {
    pub(super) span: usize,
    pub(super) head: usize,
    pub(super) first_query: usize,
    pub(super) first_key: usize,
    pub(super) queries: bool,
    pub(super) keys: bool,
}

/// Numbers of the tile's queries: units of q and dO, and what they are multiplied into.
struct Queries {
    /// `sq·scale2`, `sq·scale`
    score_unit: [f32; TILE],
    grad_unit: [f32; TILE],
    d_o_unit: [f32; TILE],
    lse: [f32; TILE],
    delta: [f32; TILE],
}

struct Keys {
    k_unit: [f32; TILE],
    /// `sk·scale`
    grad_unit: [f32; TILE],
    v_unit: [f32; TILE],
}

/// What a thread holds: 370 KiB of its stack.
pub(super) struct State {
    prepared: [Prepared; 2],
    score_sums: Sums,
    value_sums: Sums,
    queries: Queries,
    keys: Keys,
    p: [f32; TILE * TILE],
    g: [f32; TILE * TILE],
    /// Largest magnitudes of the columns of `p·sdo` and of `g·sq·scale`.
    p_most: [u32; TILE],
    g_most: [u32; TILE],
    /// Visible places of the current block's rows.
    visible: [(usize, usize); BLOCK],
    row_units: [f32; TILE],
    dq: [f32; TILE * HEAD_WIDTH_MAX],
    /// `[64 of the tile's keys][slice][query][64]`
    rows: [i8; 2 * 3 * 2 * SQUARE],
    /// `[2 × 16 keys][64 of the tile's queries][slice]`
    columns: [u32; 2 * 2 * 3 * TILE_BYTES / 4],
}

impl State {
    pub(super) fn new(path: Path, profile: Profile) -> Self {
        const ZERO: [f32; TILE] = [0.0; TILE];
        Self {
            prepared: [Prepared::new(path, profile), Prepared::new(path, profile)],
            score_sums: Sums::new(),
            value_sums: Sums::new(),
            queries: Queries { score_unit: ZERO, grad_unit: ZERO, d_o_unit: ZERO, lse: ZERO, delta: ZERO },
            keys: Keys { k_unit: ZERO, grad_unit: ZERO, v_unit: ZERO },
            p: [0.0; TILE * TILE],
            g: [0.0; TILE * TILE],
            p_most: [0; TILE],
            g_most: [0; TILE],
            visible: [(0, 0); BLOCK],
            row_units: ZERO,
            dq: [0.0; TILE * HEAD_WIDTH_MAX],
            rows: [0; 2 * 3 * 2 * SQUARE],
            columns: [0; 2 * 2 * 3 * TILE_BYTES / 4],
        }
    }
}

/// Numbers of up to 128 rows from `first` of a span; zero past its last block.
fn gather(out: &mut [f32; TILE], tensor: Tensor, values: &[f32], head: usize, span: usize, first: usize, factor: f32) {
    let blocks = tensor.blocks.of(span);
    let count = TILE.min(blocks.len() * ROWS - first);
    let from = tensor.index(head, blocks.start) * ROWS + first;
    out[count..].fill(0.0);
    for (out, value) in out.iter_mut().zip(&values[from..from + count]) {
        *out = value * factor;
    }
}

/// Positions as differences: whether a query that is `distance` behind a key sees it.
fn sees(p: &Attention, queries: &Range<usize>, keys: &Range<usize>) -> bool {
    !queries.is_empty()
        && !keys.is_empty()
        && keys.start < queries.end
        && p.window.is_none_or(|window| keys.end - 1 + window > queries.start)
}

impl Gradients<'_> {
    fn length(&self, tile: &Tile) -> usize {
        self.p.spans[tile.span].keys.len()
    }

    /// Floats between rows of the state's dQ: whole panels of 32.
    fn row_stride(&self) -> usize {
        self.p.key_width.next_multiple_of(BLOCK)
    }

    /// dQ of a tile of queries starts from zero.
    pub(super) fn start_queries(&self, state: &mut State) {
        state.dq[..TILE * self.row_stride()].fill(0.0);
    }

    /// dQ of a tile of queries is complete.
    pub(super) fn store_queries(&self, state: &State, span: usize, head: usize, rows: Range<usize>) {
        for (index, row) in rows.enumerate() {
            let at = (self.p.spans[span].queries.start + row) * self.p.heads + head;
            // SAFETY: these rows of this head are the calling task's alone.
            let out = unsafe { part(&self.dq, at, self.p.key_width) };
            out.copy_from_slice(&state.dq[index * self.row_stride()..][..self.p.key_width]);
        }
    }

    pub(super) fn tile(&self, state: &mut State, tile: &Tile) {
        let (span, head, kv) = (tile.span, tile.head, tile.head / self.p.group());
        let (query, key) = (tile.first_query, tile.first_key);
        let (p, q) = (self.p, &mut state.queries);
        gather(&mut q.score_unit, self.q, self.q_units, head, span, query, p.scale_base2());
        gather(&mut q.grad_unit, self.q, self.q_units, head, span, query, p.scale);
        gather(&mut q.d_o_unit, self.d_o, self.d_o_units, head, span, query, 1.0);
        gather(&mut q.lse, self.d_o, self.lse, head, span, query, 1.0);
        gather(&mut q.delta, self.d_o, self.delta, head, span, query, 1.0);
        let k = &mut state.keys;
        gather(&mut k.k_unit, self.k, self.k_units, kv, span, key, 1.0);
        gather(&mut k.grad_unit, self.k, self.k_units, kv, span, key, p.scale);
        gather(&mut k.v_unit, self.v, self.v_units, kv, span, key, 1.0);
        self.probabilities(state, tile);
        if tile.queries {
            self.query_gradients(state, tile);
        }
        if tile.keys {
            self.key_gradients(state, tile);
        }
    }

    /// Rows of one block of a left operand from row `first` of a span.
    fn left<'s>(&self, tensor: Tensor, bytes: &'s [i8], head: usize, span: usize, first: usize) -> LeftView<'s> {
        let shape = tensor.shape;
        let at = tensor.index(head, tensor.blocks.of(span).start + first / ROWS) * shape.block_bytes();
        LeftView {
            bytes: &bytes[at + first % ROWS * TILE_DEPTH..at + shape.block_bytes()],
            column_stride: shape.slices() * SQUARE,
            slice_stride: SQUARE,
        }
    }

    /// Fills `p`, `g` and the magnitudes of their columns; whatever no query sees is zero.
    fn probabilities(&self, state: &mut State, tile: &Tile) {
        let (p, length, kv) = (self.p, self.length(tile), tile.head / self.p.group());
        state.p_most.fill(0);
        state.g_most.fill(0);
        let query_end = length.min(tile.first_query + TILE);
        let key_end = length.min(tile.first_key + TILE);
        for first_key in (tile.first_key..key_end.next_multiple_of(ROWS)).step_by(BLOCK) {
            let keys = first_key..(first_key + BLOCK).min(key_end).max(first_key);
            let column = first_key - tile.first_key;
            if !keys.is_empty() {
                let right = [
                    self.k.right_panel(self.k_right, kv, tile.span, first_key),
                    self.v.right_panel(self.v_right, kv, tile.span, first_key),
                ];
                state.prepared[0].prepare(self.path, right[0], self.k.shape.columns(), p.profile);
                state.prepared[1].prepare(self.path, right[1], self.v.shape.columns(), p.profile);
                for first in (tile.first_query..query_end).step_by(BLOCK) {
                    let queries = first..query_end.min(first + BLOCK);
                    if sees(p, &queries, &keys) {
                        self.block(state, tile, right, &queries, &keys);
                    } else {
                        clear(state, first - tile.first_query..first - tile.first_query + BLOCK, column);
                    }
                }
                let done = (query_end - tile.first_query).next_multiple_of(BLOCK);
                clear(state, done..done.next_multiple_of(ROWS), column);
            } else {
                clear(state, 0..(query_end - tile.first_query).next_multiple_of(ROWS), column);
            }
        }
    }

    /// One block of up to 32 queries by 32 keys, some of which see each other.
    fn block(
        &self,
        state: &mut State,
        tile: &Tile,
        right: [RightView; 2],
        queries: &Range<usize>,
        keys: &Range<usize>,
    ) {
        let p = self.p;
        let (row, column) = (queries.start - tile.first_query, keys.start - tile.first_key);
        let q = self.left(self.q, self.q_left, tile.head, tile.span, queries.start);
        let d_o = self.left(self.d_o, self.d_o_left, tile.head, tile.span, queries.start);
        let (key_columns, value_columns) = (self.k.shape.columns(), self.v.shape.columns());
        let count = queries.len();
        block_sums(self.path, &mut state.score_sums, q, count, right[0], &state.prepared[0], key_columns, p.profile);
        block_sums(
            self.path,
            &mut state.value_sums,
            d_o,
            count,
            right[1],
            &state.prepared[1],
            value_columns,
            p.profile,
        );
        for (row, visible) in state.visible.iter_mut().enumerate() {
            let seen = p.visible(queries.start + row);
            let place = |key: usize| key.clamp(keys.start, keys.start + BLOCK) - keys.start;
            *visible = if row < count { (place(seen.start), place(seen.end)) } else { (0, 0) };
        }
        match p.profile {
            Profile::X2 => grad_block::<2>(self.path, state, row, column),
            Profile::X3 => grad_block::<3>(self.path, state, row, column),
        }
    }

    fn query_gradients(&self, state: &mut State, tile: &Tile) {
        let (p, length, kv) = (self.p, self.length(tile), tile.head / self.p.group());
        let rows_end = length.min(tile.first_query + TILE) - tile.first_query;
        // Rows that see something of the tile: those after lost it out of their window.
        let rows_end = p.window.map_or(rows_end, |window| {
            rows_end.min((tile.first_key + TILE + window - 1).saturating_sub(tile.first_query))
        });
        let (shape, bias) = (self.k.shape, left_bias(self.path) as i8);
        let column_stride = shape.slices() * 2 * SQUARE;
        for first in (0..rows_end).step_by(ROWS) {
            let rows = first..rows_end.min(first + ROWS);
            // 64-key columns that some of these rows sees.
            let seen_first = p.visible(tile.first_query + rows.start).start.max(tile.first_key) - tile.first_key;
            let seen_end = (tile.first_query + rows.end).min(tile.first_key + TILE) - tile.first_key;
            let columns = seen_first / TILE_DEPTH..seen_end.div_ceil(TILE_DEPTH);
            match p.profile {
                Profile::X2 => slice_rows::<2>(self.path, state, rows.clone(), columns.clone(), bias),
                Profile::X3 => slice_rows::<3>(self.path, state, rows.clone(), columns.clone(), bias),
            }
            for panel in 0..shape.groups().div_ceil(2) {
                let index = tile.first_key / ROWS + columns.start;
                let right = self.k.turned_panel(self.k_turned, kv, tile.span, index, panel);
                state.prepared[0].prepare(self.path, right, columns.len(), p.profile);
                for row in rows.clone().step_by(BLOCK) {
                    let bytes = &state.rows[columns.start * column_stride + row * TILE_DEPTH..];
                    let left = LeftView { bytes, column_stride, slice_stride: 2 * SQUARE };
                    let count = BLOCK.min(rows.end - row);
                    let sums = &mut state.score_sums;
                    block_sums(self.path, sums, left, count, right, &state.prepared[0], columns.len(), p.profile);
                    let units = &state.row_units[row..row + count];
                    let out = &mut state.dq[row * self.row_stride() + panel * BLOCK..];
                    match p.profile {
                        Profile::X2 => fold_rows::<2>(self.path, out, sums, units, self.row_stride()),
                        Profile::X3 => fold_rows::<3>(self.path, out, sums, units, self.row_stride()),
                    }
                }
            }
        }
    }

    fn key_gradients(&self, state: &mut State, tile: &Tile) {
        let (p, length) = (self.p, self.length(tile));
        let query_end = length.min(tile.first_query + TILE);
        let key_end = length.min(tile.first_key + TILE);
        for first in (tile.first_key..key_end).step_by(BLOCK) {
            let keys = first..key_end.min(first + BLOCK);
            // Queries that see some of these keys, as 64-query columns.
            let seen_first = keys.start.max(tile.first_query);
            let seen_end = p.window.map_or(query_end, |window| query_end.min(keys.end - 1 + window));
            if seen_first >= seen_end {
                continue;
            }
            let columns =
                (seen_first - tile.first_query) / TILE_DEPTH..(seen_end - tile.first_query).div_ceil(TILE_DEPTH);
            // Keys before this one have left the window of the tile's first query.
            let active = p.window.map_or(0, |window| (tile.first_query + 1).saturating_sub(window + first));
            for values in [false, true] {
                let (tensor, turned, partials) = if values {
                    (self.d_o, self.d_o_turned, &self.value_partials)
                } else {
                    (self.q, self.q_turned, &self.key_partials)
                };
                let units = match p.profile {
                    Profile::X2 => column_tiles::<2>(self.path, state, first - tile.first_key, columns.clone(), values),
                    Profile::X3 => column_tiles::<3>(self.path, state, first - tile.first_key, columns.clone(), values),
                };
                let shape = tensor.shape;
                let block_stride = 2 * shape.slices() * TILE_BYTES;
                let tiles = &as_tiles(&state.columns)[columns.start * shape.slices() * TILE_BYTES..];
                let right = RightView { tiles, block_stride, blocks: 2 };
                state.prepared[0].prepare(self.path, right, columns.len(), p.profile);
                let block = self.q.blocks.of(tile.span).start + tile.first_query / ROWS + columns.start;
                let key_block = tensor.index(tile.head, tensor.blocks.of(tile.span).start + first / ROWS);
                for row in (0..shape.width).step_by(BLOCK) {
                    let at = tensor.index(tile.head, block) * shape.turned_bytes() + row * TILE_DEPTH;
                    let left = LeftView {
                        bytes: &turned[at..],
                        column_stride: shape.turned_bytes(),
                        slice_stride: shape.groups() * TILE_BYTES,
                    };
                    let count = BLOCK.min(shape.width - row);
                    let sums = &mut state.score_sums;
                    block_sums(self.path, sums, left, count, right, &state.prepared[0], columns.len(), p.profile);
                    let at = (key_block * shape.width + row) * ROWS;
                    // SAFETY: partial sums of this block of keys are this task's alone.
                    let out = unsafe { partials.slice(at..at + count * ROWS) };
                    let from_zero = tile.first_query == tile.first_key;
                    let target = Columns { place: first % ROWS, active, from_zero };
                    match p.profile {
                        Profile::X2 => fold_columns::<2>(self.path, out, sums, &units, &target),
                        Profile::X3 => fold_columns::<3>(self.path, out, sums, &units, &target),
                    }
                }
            }
        }
    }
}

/// Zeros where no query sees a key.
fn clear(state: &mut State, rows: Range<usize>, column: usize) {
    for row in rows {
        state.p[row * TILE + column..][..BLOCK].fill(0.0);
        state.g[row * TILE + column..][..BLOCK].fill(0.0);
    }
}

multiversion! {
    /// Probabilities and score gradients of a block from its sums, at `(row, column)` of the tile.
    fn grad_block<F, const PLANES: usize>(state: &mut State, row: usize, column: usize) {
        let State { score_sums, value_sums, queries, keys, p, g, p_most, g_most, visible, .. } = state;
        let panel = |values: &[f32; TILE]| -> [f32; BLOCK] { std::array::from_fn(|lane| values[column + lane]) };
        let (k_unit, v_unit) = (panel(&keys.k_unit), panel(&keys.v_unit));
        let mut p_largest: [u32; BLOCK] = std::array::from_fn(|lane| p_most[column + lane]);
        let mut g_largest: [u32; BLOCK] = std::array::from_fn(|lane| g_most[column + lane]);
        for r in 0..BLOCK {
            let at = row + r;
            let (score_unit, lse, delta) = (queries.score_unit[at], queries.lse[at], queries.delta[at]);
            let (d_o_unit, grad_unit) = (queries.d_o_unit[at], queries.grad_unit[at]);
            let [s1, s2, s3] = [0, 1, 2].map(|plane| &score_sums.0[plane][r]);
            let [d1, d2, d3] = [0, 1, 2].map(|plane| &value_sums.0[plane][r]);
            let mut p_row = [0.0f32; BLOCK];
            let mut g_row = [0.0f32; BLOCK];
            for lane in 0..BLOCK {
                let z = chunk_value::<F, PLANES>([s1[lane], s2[lane], s3[lane]]) * (score_unit * k_unit[lane]);
                let d_p = chunk_value::<F, PLANES>([d1[lane], d2[lane], d3[lane]]);
                p_row[lane] = exp2::<F>(z - lse);
                g_row[lane] = p_row[lane] * F::fma(d_p, d_o_unit * v_unit[lane], -delta);
            }
            let (from, to) = visible[r];
            if (from, to) != (0, BLOCK) {
                for lane in 0..BLOCK {
                    let seen = lane >= from && lane < to;
                    p_row[lane] = if seen { p_row[lane] } else { 0.0 };
                    g_row[lane] = if seen { g_row[lane] } else { 0.0 };
                }
            }
            for lane in 0..BLOCK {
                p_largest[lane] = p_largest[lane].max(magnitude_bits(p_row[lane] * d_o_unit));
                g_largest[lane] = g_largest[lane].max(magnitude_bits(g_row[lane] * grad_unit));
            }
            p[at * TILE + column..][..BLOCK].copy_from_slice(&p_row);
            g[at * TILE + column..][..BLOCK].copy_from_slice(&g_row);
        }
        p_most[column..column + BLOCK].copy_from_slice(&p_largest);
        g_most[column..column + BLOCK].copy_from_slice(&g_largest);
    }
}

multiversion! {
    /// Slices rows of `g·(sk·scale)` over the tile's keys, for the 64-key columns named.
    fn slice_rows<_F, const SLICES: usize>(state: &mut State, rows: Range<usize>, columns: Range<usize>, bias: i8) {
        let profile = if SLICES == 2 { Profile::X2 } else { Profile::X3 };
        for row in rows {
            let mut folded = [0.0f32; TILE];
            let mut largest = [0u32; BLOCK];
            for block in 2 * columns.start..2 * columns.end {
                let g = &state.g[row * TILE + block * BLOCK..][..BLOCK];
                let units = &state.keys.grad_unit[block * BLOCK..][..BLOCK];
                for lane in 0..BLOCK {
                    // A hidden key's unit may be NaN.
                    let x = if g[lane] == 0.0 { 0.0 } else { g[lane] * units[lane] };
                    folded[block * BLOCK + lane] = x;
                    largest[lane] = largest[lane].max(magnitude_bits(x));
                }
            }
            let scale = Scale::of(profile, tree_max(largest, u32::max));
            state.row_units[row] = scale.unit;
            for column in columns.clone() {
                let Some(folded) = folded[column * TILE_DEPTH..].first_chunk::<TILE_DEPTH>() else { unreachable!() };
                let bytes = quantise_row::<SLICES, TILE_DEPTH>(folded, scale.multiplier, bias);
                for slice in 0..SLICES {
                    let at = (column * SLICES + slice) * 2 * SQUARE + row * TILE_DEPTH;
                    state.rows[at..at + TILE_DEPTH].copy_from_slice(&bytes[slice]);
                }
            }
        }
    }
}

/// Right tiles of 32 keys from `first` of the tile, contracted along queries; the result are the keys' units.
fn column_tiles<const SLICES: usize>(
    path: Path,
    state: &mut State,
    first: usize,
    columns: Range<usize>,
    values: bool,
) -> [f32; BLOCK] {
    let State { queries, p, g, p_most, g_most, columns: tiles, .. } = state;
    let (weights, most, factors) =
        if values { (p, p_most, &queries.d_o_unit) } else { (g, g_most, &queries.grad_unit) };
    let mut multipliers = [0.0; BLOCK];
    let mut units = [0.0; BLOCK];
    column_scales::<SLICES>(path, &mut multipliers, &mut units, &most[first..first + BLOCK]);
    pack_columns::<SLICES>(path, tiles, weights, first, columns, factors, &multipliers);
    units
}

multiversion! {
    fn column_scales<_F, const SLICES: usize>(multipliers: &mut [f32; BLOCK], units: &mut [f32; BLOCK], most: &[u32]) {
        let profile = if SLICES == 2 { Profile::X2 } else { Profile::X3 };
        for lane in 0..BLOCK {
            let scale = Scale::of(profile, most[lane]);
            (multipliers[lane], units[lane]) = (scale.multiplier, scale.unit);
        }
    }
}

multiversion! {
    /// Folds a block into dQ: units belong to rows.
    fn fold_rows<F, const PLANES: usize>(out: &mut [f32], sums: &Sums, units: &[f32], stride: usize) {
        for (row, unit) in units.iter().enumerate() {
            let out = &mut out[row * stride..][..BLOCK];
            let [first, second, third] = [0, 1, 2].map(|plane| &sums.0[plane][row]);
            for column in 0..BLOCK {
                let value = chunk_value::<F, PLANES>([first[column], second[column], third[column]]);
                out[column] = F::fma(value, *unit, out[column]);
            }
        }
    }
}

/// Which columns of a partial sum a block folds into.
struct Columns {
    /// First of the 32 among the 64 keys of the block.
    place: usize,
    /// First of the 32 that a query of the tile sees.
    active: usize,
    from_zero: bool,
}

multiversion! {
    /// Folds a block into dK or dV, which lie as `[width][64 keys]`: units belong to columns.
    fn fold_columns<F, const PLANES: usize>(out: &mut [f32], sums: &Sums, units: &[f32; BLOCK], target: &Columns) {
        for (row, out) in out.chunks_exact_mut(ROWS).enumerate() {
            let out = &mut out[target.place..][..BLOCK];
            if target.from_zero {
                out.fill(0.0);
            }
            let [first, second, third] = [0, 1, 2].map(|plane| &sums.0[plane][row]);
            for column in 0..BLOCK {
                let value = chunk_value::<F, PLANES>([first[column], second[column], third[column]]);
                let folded = F::fma(value, units[column], out[column]);
                out[column] = if column >= target.active { folded } else { out[column] };
            }
        }
    }
}
