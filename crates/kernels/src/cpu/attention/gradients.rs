//! One tile of the backward pass: 128 queries by 128 keys of one head.
//!
//! Probabilities `P` and score gradients `G = P·(dP − D)` of the tile are computed block by block
//! and kept as float32. Their rows, sliced, are the left operand of dQ. Their columns, sliced, are
//! the *right* operand of dK and dV: groups of four rows interleave into right tiles without a
//! transpose, and the sums come out as `[width][key]`.

use super::along::Panel;
use super::operands::{ROWS, SQUARE, as_tiles};
use super::tile::{
    Columns, State, accumulate_columns, accumulate_rows, clear, column_tiles, gather, grad_block, slice_rows,
};
use super::{TILE, Tensor, part};
use crate::cpu::block::{LeftView, RightView, Sums, block_sums};
use crate::cpu::path::Path;
use crate::cpu::pool::SharedMut;
use crate::cpu::slices::{BLOCK, TILE_BYTES, TILE_DEPTH, left_bias};
use crate::op::Attention;
use isobit_numerics::slices::Profile;
use std::ops::Range;

/// One operand and its forms in the workspace.
#[derive(Clone, Copy)]
pub(super) struct SlicedTensor<'a> {
    pub(super) tensor: Tensor<'a>,
    /// Left tiles of queries, right tiles of keys.
    pub(super) straight: &'a [i8],
    /// Transposed tiles, for contractions along the rows; `v` has none.
    pub(super) transposed: &'a [i8],
    pub(super) scales: &'a [f32],
}

/// All operands of a call.
pub(super) struct Operands<'a> {
    pub(super) q: SlicedTensor<'a>,
    pub(super) k: SlicedTensor<'a>,
    pub(super) v: SlicedTensor<'a>,
    pub(super) d_o: SlicedTensor<'a>,
    /// Laid out per block, like scales.
    pub(super) lse: &'a [f32],
    pub(super) delta: &'a [f32],
}

/// All operands and outputs of a call.
pub(super) struct Gradients<'a> {
    pub(super) path: Path,
    pub(super) p: &'a Attention<'a>,
    pub(super) operands: Operands<'a>,
    pub(super) dq: SharedMut<'a, f32>,
    /// `[head][block][width][64 keys]`
    pub(super) key_partials: SharedMut<'a, f32>,
    pub(super) value_partials: SharedMut<'a, f32>,
}

/// A tile and which gradients to compute. Positions count from the span's first.
pub(super) struct Tile {
    pub(super) span: usize,
    pub(super) head: usize,
    pub(super) first_query: usize,
    pub(super) first_key: usize,
    pub(super) queries: bool,
    pub(super) keys: bool,
}

/// Rows of one block of a left operand from row `first` of a span.
fn left<'s>(tensor: Tensor, bytes: &'s [i8], head: usize, span: usize, first: usize) -> LeftView<'s> {
    let shape = tensor.shape;
    let at = tensor.index(head, tensor.blocks.of(span).start + first / ROWS) * shape.block_bytes();
    LeftView {
        bytes: &bytes[at + first % ROWS * TILE_DEPTH..at + shape.block_bytes()],
        column_stride: shape.slices() * SQUARE,
        slice_stride: SQUARE,
    }
}

/// Whether any of the queries sees any of the keys.
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

    /// Starts dQ of a query tile from zero.
    pub(super) fn start_queries(&self, state: &mut State) {
        state.dq[..TILE * self.row_stride()].fill(0.0);
    }

    /// Stores the complete dQ of a query tile.
    pub(super) fn store_queries(&self, state: &State, span: usize, head: usize, rows: Range<usize>) {
        for (index, row) in rows.enumerate() {
            let at = (self.p.spans[span].queries.start + row) * self.p.heads + head;
            // SAFETY: a task that computes gradients of queries has these rows of this head alone:
            // it is the whole head of a span or a tile of its queries.
            let out = unsafe { part(&self.dq, at, self.p.key_width) };
            out.copy_from_slice(&state.dq[index * self.row_stride()..][..self.p.key_width]);
        }
    }

    pub(super) fn tile(&self, state: &mut State, tile: &Tile) {
        let (span, head, kv) = (tile.span, tile.head, tile.head / self.p.group());
        let (query, key) = (tile.first_query, tile.first_key);
        state.cap = self.p.cap_base2();
        let (p, q) = (self.p, &mut state.queries);
        let x = &self.operands;
        gather(&mut q.score_scale, x.q.tensor, x.q.scales, head, span, query, p.softmax_scale_base2());
        gather(&mut q.grad_scale, x.q.tensor, x.q.scales, head, span, query, p.softmax_scale);
        gather(&mut q.d_o_scale, x.d_o.tensor, x.d_o.scales, head, span, query, 1.0);
        gather(&mut q.lse, x.d_o.tensor, x.lse, head, span, query, 1.0);
        gather(&mut q.delta, x.d_o.tensor, x.delta, head, span, query, 1.0);
        let k = &mut state.keys;
        gather(&mut k.k, x.k.tensor, x.k.scales, kv, span, key, 1.0);
        gather(&mut k.k_grad, x.k.tensor, x.k.scales, kv, span, key, p.softmax_scale);
        gather(&mut k.v, x.v.tensor, x.v.scales, kv, span, key, 1.0);
        self.probabilities(state, tile);
        if tile.queries {
            self.query_gradients(state, tile);
        }
        if tile.keys {
            self.key_gradients(state, tile);
        }
    }

    /// Fills `p`, `g` and the magnitudes of their columns; entries that no query sees are zero.
    fn probabilities(&self, state: &mut State, tile: &Tile) {
        let (p, length, kv) = (self.p, self.length(tile), tile.head / self.p.group());
        state.p_most.fill(0);
        state.g_most.fill(0);
        let query_end = length.min(tile.first_query + TILE);
        let key_end = length.min(tile.first_key + TILE);
        for first_key in (tile.first_key..key_end.next_multiple_of(ROWS)).step_by(BLOCK) {
            let keys = first_key..(first_key + BLOCK).min(key_end).max(first_key);
            let column = first_key - tile.first_key;
            let rows_end = (query_end - tile.first_query).next_multiple_of(ROWS);
            if keys.is_empty() {
                clear(state, 0..rows_end, column);
                continue;
            }
            let right = [
                self.operands.k.tensor.right_panel(self.operands.k.straight, kv, tile.span, first_key),
                self.operands.v.tensor.right_panel(self.operands.v.straight, kv, tile.span, first_key),
            ];
            state.panels[0].prepare(self.path, self.operands.k.tensor.shape, right[0]);
            state.panels[1].prepare(self.path, self.operands.v.tensor.shape, right[1]);
            for row in (0..rows_end).step_by(BLOCK) {
                let first = tile.first_query + row;
                let queries = first..query_end.min(first + BLOCK).max(first);
                if sees(p, &queries, &keys) {
                    self.block(state, tile, right, &queries, &keys);
                } else {
                    clear(state, row..row + BLOCK, column);
                }
            }
        }
    }

    /// One block of up to 32 queries by 32 keys, with at least one visible pair.
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
        let q = left(self.operands.q.tensor, self.operands.q.straight, tile.head, tile.span, queries.start);
        let d_o = left(self.operands.d_o.tensor, self.operands.d_o.straight, tile.head, tile.span, queries.start);
        let count = queries.len();
        state.panels[0].sums(self.path, self.operands.k.tensor.shape, &mut state.score_sums, q, count, right[0]);
        state.panels[1].sums(self.path, self.operands.v.tensor.shape, &mut state.value_sums, d_o, count, right[1]);
        let block = keys.start..keys.start + BLOCK;
        let (first, last) = (p.visible(queries.start), p.visible(queries.end - 1));
        if count == BLOCK && first.end >= block.end && last.start <= block.start {
            state.visible.fill((0, BLOCK));
        } else {
            for (row, visible) in state.visible.iter_mut().enumerate() {
                let seen = p.visible(queries.start + row);
                let place = |key: usize| key.clamp(block.start, block.end) - block.start;
                *visible = if row < count { (place(seen.start), place(seen.end)) } else { (0, 0) };
            }
        }
        match p.profile {
            Profile::X2 => grad_block::<2>(self.path, state, row, column),
            Profile::X3 => grad_block::<3>(self.path, state, row, column),
        }
    }

    /// Products of up to 32 rows with a panel, contracted along keys or queries.
    fn sums(&self, sums: &mut Sums, panel: &Panel, left: LeftView, rows: usize, right: RightView, columns: usize) {
        block_sums(self.path, sums, left, rows, right, &panel.prepared, columns);
    }

    fn query_gradients(&self, state: &mut State, tile: &Tile) {
        let (p, length, kv) = (self.p, self.length(tile), tile.head / self.p.group());
        let rows_end = length.min(tile.first_query + TILE) - tile.first_query;
        // Rows that see part of the tile: it is outside the window of later rows.
        let rows_end = p.window.map_or(rows_end, |window| {
            rows_end.min((tile.first_key + TILE + window - 1).saturating_sub(tile.first_query))
        });
        let (shape, bias) = (self.operands.k.tensor.shape, left_bias(self.path) as i8);
        let column_stride = shape.slices() * 2 * SQUARE;
        for first in (0..rows_end).step_by(ROWS) {
            let rows = first..rows_end.min(first + ROWS);
            // 64-key columns visible to any of these rows.
            let seen_first = p.visible(tile.first_query + rows.start).start.max(tile.first_key) - tile.first_key;
            let seen_end = (tile.first_query + rows.end).min(tile.first_key + TILE) - tile.first_key;
            let columns = seen_first / TILE_DEPTH..seen_end.div_ceil(TILE_DEPTH);
            match p.profile {
                Profile::X2 => slice_rows::<2>(self.path, state, rows.clone(), columns.clone(), bias),
                Profile::X3 => slice_rows::<3>(self.path, state, rows.clone(), columns.clone(), bias),
            }
            for panel in 0..shape.groups().div_ceil(2) {
                let index = tile.first_key / ROWS + columns.start;
                let right =
                    self.operands.k.tensor.transposed_panel(self.operands.k.transposed, kv, tile.span, index, panel);
                state.panels[0].prepared.prepare(self.path, right, columns.len());
                for row in rows.clone().step_by(BLOCK) {
                    let bytes = &state.rows[columns.start * column_stride + row * TILE_DEPTH..];
                    let left = LeftView { bytes, column_stride, slice_stride: 2 * SQUARE };
                    let count = BLOCK.min(rows.end - row);
                    let sums = &mut state.score_sums;
                    self.sums(sums, &state.panels[0], left, count, right, columns.len());
                    let scales = &state.row_scales[row..row + count];
                    let out = &mut state.dq[row * self.row_stride() + panel * BLOCK..];
                    match p.profile {
                        Profile::X2 => accumulate_rows::<2>(self.path, out, sums, scales, self.row_stride()),
                        Profile::X3 => accumulate_rows::<3>(self.path, out, sums, scales, self.row_stride()),
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
            // Queries that see any of these keys, as 64-query columns.
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
                let (tensor, transposed, partials) = if values {
                    (self.operands.d_o.tensor, self.operands.d_o.transposed, &self.value_partials)
                } else {
                    (self.operands.q.tensor, self.operands.q.transposed, &self.key_partials)
                };
                let scales = match p.profile {
                    Profile::X2 => column_tiles::<2>(self.path, state, first - tile.first_key, columns.clone(), values),
                    Profile::X3 => column_tiles::<3>(self.path, state, first - tile.first_key, columns.clone(), values),
                };
                let shape = tensor.shape;
                let block_stride = 2 * shape.slices() * TILE_BYTES;
                let tiles = &as_tiles(&state.columns)[columns.start * shape.slices() * TILE_BYTES..];
                let right = RightView { tiles, block_stride, blocks: 2 };
                state.panels[0].prepared.prepare(self.path, right, columns.len());
                let block = self.operands.q.tensor.blocks.of(tile.span).start + tile.first_query / ROWS + columns.start;
                let key_block = tensor.index(tile.head, tensor.blocks.of(tile.span).start + first / ROWS);
                for row in (0..shape.width).step_by(BLOCK) {
                    let at = tensor.index(tile.head, block) * shape.transposed_bytes() + row * TILE_DEPTH;
                    let left = LeftView {
                        bytes: &transposed[at..],
                        column_stride: shape.transposed_bytes(),
                        slice_stride: shape.groups() * TILE_BYTES,
                    };
                    let count = BLOCK.min(shape.width - row);
                    let sums = &mut state.score_sums;
                    self.sums(sums, &state.panels[0], left, count, right, columns.len());
                    let at = (key_block * shape.width + row) * ROWS;
                    // SAFETY: a task that computes gradients of keys has this block of this head
                    // alone: it is the whole head of a span or a tile of its keys.
                    let out = unsafe { partials.slice(at..at + count * ROWS) };
                    let from_zero = tile.first_query == tile.first_key;
                    let target = Columns { place: first % ROWS, active, from_zero };
                    match p.profile {
                        Profile::X2 => accumulate_columns::<2>(self.path, out, sums, &scales, &target),
                        Profile::X3 => accumulate_columns::<3>(self.path, out, sums, &scales, &target),
                    }
                }
            }
        }
    }
}
