//! Per-thread state for a tile of the backward pass, and the float arithmetic on it.
//!
//! Every function here is compiled per instruction set and works on rows of 32 places.
//! `gradients.rs` calls them.

use super::along::Panel;
use super::operands::{ROWS, SQUARE, pack_columns, quantise_row};
use super::{TILE, Tensor, split};
use crate::cpu::block::Sums;
use crate::cpu::epilogue::chunk_value;
use crate::cpu::path::{Path, multiversion};
use crate::cpu::slices::{BLOCK, TILE_BYTES, TILE_DEPTH};
use crate::op::attention::HEAD_WIDTH_MAX;
use isobit_numerics::elementary::{SoftCap, exp2};
use isobit_numerics::slices::{Profile, Quantiser, magnitude_bits};
use std::ops::Range;

/// Per-query values of the tile: scales of q and dO, and products with them.
pub(super) struct Queries {
    /// `sq·softmax_scale2`, `sq·softmax_scale`
    pub(super) score_scale: [f32; TILE],
    pub(super) grad_scale: [f32; TILE],
    pub(super) d_o_scale: [f32; TILE],
    pub(super) lse: [f32; TILE],
    pub(super) delta: [f32; TILE],
}

/// Scales of the tile's keys.
pub(super) struct Keys {
    pub(super) k: [f32; TILE],
    /// `sk·softmax_scale`
    pub(super) k_grad: [f32; TILE],
    pub(super) v: [f32; TILE],
}

/// Per-thread state.
pub(super) struct State<'a> {
    pub(super) panels: [Panel; 2],
    pub(super) score_sums: Sums,
    pub(super) value_sums: Sums,
    pub(super) queries: Queries,
    pub(super) keys: Keys,
    pub(super) cap: Option<SoftCap>,
    pub(super) p: &'a mut [f32; TILE * TILE],
    pub(super) g: &'a mut [f32; TILE * TILE],
    /// Largest magnitudes of the columns of `p·sdo` and of `g·sq·softmax_scale`.
    pub(super) p_most: [u32; TILE],
    pub(super) g_most: [u32; TILE],
    /// Visible places of the current block's rows.
    pub(super) visible: [(usize, usize); BLOCK],
    pub(super) row_scales: [f32; TILE],
    pub(super) dq: &'a mut [f32; TILE * HEAD_WIDTH_MAX],
    /// `[64 of the tile's keys][slice][query][64]`
    pub(super) rows: &'a mut [i8; 2 * 3 * 2 * SQUARE],
    /// `[2 × 16 keys][64 of the tile's queries][slice]`
    pub(super) columns: [u32; 2 * 2 * 3 * TILE_BYTES / 4],
}

const ZERO: [f32; TILE] = [0.0; TILE];

impl<'a> State<'a> {
    pub(super) const BYTES: usize = 2 * 3 * 2 * SQUARE;
    pub(super) const FLOATS: usize = 2 * TILE * TILE + TILE * HEAD_WIDTH_MAX;

    pub(super) fn new(path: Path, profile: Profile, (bytes, floats): (&'a mut [i8], &'a mut [f32])) -> Self {
        let (p, floats) = split(floats);
        let (g, floats) = split(floats);
        Self {
            panels: [Panel::new(path, profile), Panel::new(path, profile)],
            score_sums: Sums::new(),
            value_sums: Sums::new(),
            queries: Queries { score_scale: ZERO, grad_scale: ZERO, d_o_scale: ZERO, lse: ZERO, delta: ZERO },
            keys: Keys { k: ZERO, k_grad: ZERO, v: ZERO },
            cap: None,
            p,
            g,
            p_most: [0; TILE],
            g_most: [0; TILE],
            visible: [(0, 0); BLOCK],
            row_scales: ZERO,
            dq: split(floats).0,
            rows: split(bytes).0,
            columns: [0; 2 * 2 * 3 * TILE_BYTES / 4],
        }
    }
}

/// Values of up to 128 rows of a span from `first`, times `factor`; zero past the span's last
/// block.
pub(super) fn gather(
    out: &mut [f32; TILE],
    tensor: Tensor,
    values: &[f32],
    head: usize,
    span: usize,
    first: usize,
    factor: f32,
) {
    let blocks = tensor.blocks.of(span);
    let count = TILE.min(blocks.len() * ROWS - first);
    let from = tensor.index(head, blocks.start) * ROWS + first;
    out[count..].fill(0.0);
    for (out, value) in out.iter_mut().zip(&values[from..from + count]) {
        *out = value * factor;
    }
}

/// Writes zeros where no query sees a key.
pub(super) fn clear(state: &mut State, rows: Range<usize>, column: usize) {
    for row in rows {
        state.p[row * TILE + column..][..BLOCK].fill(0.0);
        state.g[row * TILE + column..][..BLOCK].fill(0.0);
    }
}

multiversion! {
    /// Probabilities and score gradients of a block from its sums, at `(row, column)` of the tile.
    pub(super) fn grad_block<F, const PLANES: usize>(state: &mut State, row: usize, column: usize) {
        let State { score_sums, value_sums, queries, keys, cap, p, g, p_most, g_most, visible, .. } = state;
        let (mut k_scale, mut v_scale) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
        k_scale.copy_from_slice(&keys.k[column..column + BLOCK]);
        v_scale.copy_from_slice(&keys.v[column..column + BLOCK]);
        let (mut p_largest, mut g_largest) = ([0u32; BLOCK], [0u32; BLOCK]);
        p_largest.copy_from_slice(&p_most[column..column + BLOCK]);
        g_largest.copy_from_slice(&g_most[column..column + BLOCK]);
        for r in 0..BLOCK {
            let at = row + r;
            let (score_scale, lse, delta) = (queries.score_scale[at], queries.lse[at], queries.delta[at]);
            let (d_o_scale, grad_scale) = (queries.d_o_scale[at], queries.grad_scale[at]);
            let (s1, s2, s3) = (&score_sums.0[0][r], &score_sums.0[1][r], &score_sums.0[2][r]);
            let (d1, d2, d3) = (&value_sums.0[0][r], &value_sums.0[1][r], &value_sums.0[2][r]);
            let mut p_row = [0.0f32; BLOCK];
            let mut g_row = [0.0f32; BLOCK];
            for lane in 0..BLOCK {
                let z = chunk_value::<F, PLANES>([s1[lane], s2[lane], s3[lane]]) * (score_scale * k_scale[lane]);
                let d_p = chunk_value::<F, PLANES>([d1[lane], d2[lane], d3[lane]]);
                p_row[lane] = exp2::<F>(z - lse);
                g_row[lane] = p_row[lane] * F::fma(d_p, d_o_scale * v_scale[lane], -delta);
            }
            if let Some(cap) = *cap {
                for lane in 0..BLOCK {
                    let z = chunk_value::<F, PLANES>([s1[lane], s2[lane], s3[lane]]) * (score_scale * k_scale[lane]);
                    let d_p = chunk_value::<F, PLANES>([d1[lane], d2[lane], d3[lane]]);
                    let z = cap.apply::<F>(z);
                    p_row[lane] = exp2::<F>(z - lse);
                    let g = p_row[lane] * F::fma(d_p, d_o_scale * v_scale[lane], -delta);
                    g_row[lane] = g * cap.slope::<F>(z);
                }
            }
            let (from, to) = (visible[r].0 as u32, visible[r].1 as u32);
            if (from, to) == (0, BLOCK as u32) {
                for lane in 0..BLOCK {
                    p_largest[lane] = p_largest[lane].max(magnitude_bits(p_row[lane] * d_o_scale));
                    g_largest[lane] = g_largest[lane].max(magnitude_bits(g_row[lane] * grad_scale));
                }
            } else {
                for lane in 0..BLOCK {
                    // Masked entries are zero even if the row's scales are NaN.
                    let seen = lane as u32 >= from && (lane as u32) < to;
                    let sizes = (magnitude_bits(p_row[lane] * d_o_scale), magnitude_bits(g_row[lane] * grad_scale));
                    p_largest[lane] = p_largest[lane].max(if seen { sizes.0 } else { 0 });
                    g_largest[lane] = g_largest[lane].max(if seen { sizes.1 } else { 0 });
                    p_row[lane] = if seen { p_row[lane] } else { 0.0 };
                    g_row[lane] = if seen { g_row[lane] } else { 0.0 };
                }
            }
            p[at * TILE + column..][..BLOCK].copy_from_slice(&p_row);
            g[at * TILE + column..][..BLOCK].copy_from_slice(&g_row);
        }
        p_most[column..column + BLOCK].copy_from_slice(&p_largest);
        g_most[column..column + BLOCK].copy_from_slice(&g_largest);
    }
}

multiversion! {
    /// Slices rows of `g·(sk·softmax_scale)` over the tile's keys, for the 64-key columns named.
    /// Each stage runs over all rows, so the short dependency chains at the end of a row overlap
    /// with other rows; the products are cheap enough to compute twice.
    pub(super) fn slice_rows<_F, const SLICES: usize>(state: &mut State, rows: Range<usize>, columns: Range<usize>, bias: i8) {
        let State { g, keys, row_scales, rows: bytes, .. } = state;
        let (g, _) = g.as_chunks::<TILE_DEPTH>();
        let (scales, _) = keys.k_grad.as_chunks::<TILE_DEPTH>();
        let mut largest = [0u32; TILE];
        for row in rows.clone() {
            let mut most = 0u32;
            for column in columns.clone() {
                let (g, scales) = (&g[row * (TILE / TILE_DEPTH) + column], &scales[column]);
                for lane in 0..TILE_DEPTH {
                    most = most.max(magnitude_bits(fold_scale(g[lane], scales[lane])));
                }
            }
            largest[row] = most;
        }
        let profile = if SLICES == 2 { Profile::X2 } else { Profile::X3 };
        let mut multipliers = [0.0f32; TILE];
        for row in rows.clone() {
            let quantiser = Quantiser::of(profile, largest[row]);
            (row_scales[row], multipliers[row]) = (quantiser.scale, quantiser.multiplier);
        }
        for row in rows {
            for column in columns.clone() {
                let (g, scales) = (&g[row * (TILE / TILE_DEPTH) + column], &scales[column]);
                let mut folded = [0.0f32; TILE_DEPTH];
                for lane in 0..TILE_DEPTH {
                    folded[lane] = fold_scale(g[lane], scales[lane]);
                }
                let sliced = quantise_row::<SLICES, TILE_DEPTH>(&folded, multipliers[row], bias);
                for slice in 0..SLICES {
                    let at = (column * SLICES + slice) * 2 * SQUARE + row * TILE_DEPTH;
                    bytes[at..at + TILE_DEPTH].copy_from_slice(&sliced[slice]);
                }
            }
        }
    }
}

/// `weight·scale`, or zero if the weight is zero: a masked key's scale may be NaN.
#[inline(always)]
fn fold_scale(weight: f32, scale: f32) -> f32 {
    if weight == 0.0 { 0.0 } else { weight * scale }
}

/// Right tiles of 32 keys from `first` of the tile, contracted along queries; returns the keys'
/// scales.
pub(super) fn column_tiles<const SLICES: usize>(
    path: Path,
    state: &mut State,
    first: usize,
    columns: Range<usize>,
    values: bool,
) -> [f32; BLOCK] {
    let State { queries, p, g, p_most, g_most, columns: tiles, .. } = state;
    let (weights, most, factors) =
        if values { (p, p_most, &queries.d_o_scale) } else { (g, g_most, &queries.grad_scale) };
    let mut multipliers = [0.0; BLOCK];
    let mut scales = [0.0; BLOCK];
    column_scales::<SLICES>(path, &mut multipliers, &mut scales, &most[first..first + BLOCK]);
    pack_columns::<SLICES>(path, tiles, &weights[..], first, columns, factors, &multipliers);
    scales
}

multiversion! {
    fn column_scales<_F, const SLICES: usize>(multipliers: &mut [f32; BLOCK], scales: &mut [f32; BLOCK], most: &[u32]) {
        let profile = if SLICES == 2 { Profile::X2 } else { Profile::X3 };
        for lane in 0..BLOCK {
            let quantiser = Quantiser::of(profile, most[lane]);
            (multipliers[lane], scales[lane]) = (quantiser.multiplier, quantiser.scale);
        }
    }
}

multiversion! {
    /// Adds a block to dQ, with one scale per row.
    pub(super) fn accumulate_rows<F, const PLANES: usize>(out: &mut [f32], sums: &Sums, scales: &[f32], stride: usize) {
        for (row, scale) in scales.iter().enumerate() {
            let out = &mut out[row * stride..][..BLOCK];
            let (first, second, third) = (&sums.0[0][row], &sums.0[1][row], &sums.0[2][row]);
            for column in 0..BLOCK {
                let value = chunk_value::<F, PLANES>([first[column], second[column], third[column]]);
                out[column] = F::fma(value, *scale, out[column]);
            }
        }
    }
}

/// Which columns of a partial sum a block is added to.
pub(super) struct Columns {
    /// First of the 32 columns within the block's 64 keys.
    pub(super) place: usize,
    /// First of the 32 columns that any query of the tile sees.
    pub(super) active: usize,
    pub(super) from_zero: bool,
}

multiversion! {
    /// Adds a block to dK or dV, laid out as `[width][64 keys]`, with one scale per column.
    pub(super) fn accumulate_columns<F, const PLANES: usize>(out: &mut [f32], sums: &Sums, scales: &[f32; BLOCK], target: &Columns) {
        for (row, out) in out.chunks_exact_mut(ROWS).enumerate() {
            let out = &mut out[target.place..][..BLOCK];
            if target.from_zero {
                out.fill(0.0);
            }
            let (first, second, third) = (&sums.0[0][row], &sums.0[1][row], &sums.0[2][row]);
            for column in 0..BLOCK {
                let value = chunk_value::<F, PLANES>([first[column], second[column], third[column]]);
                let sum = F::fma(value, scales[column], out[column]);
                out[column] = if column >= target.active { sum } else { out[column] };
            }
        }
    }
}
