//! Per-thread state for a query block of the forward pass, and the float arithmetic on it.
//!
//! Every function here is compiled per instruction set and works on rows of 32 places. `forward.rs`
//! calls them.

use super::along::Panel;
use super::operands::{ROWS, SQUARE, quantise_row};
use super::{TILE, lanes, split};
use crate::cpu::block::Sums;
use crate::cpu::epilogue::chunk_value;
use crate::cpu::path::{Path, multiversion};
use crate::cpu::slices::{BLOCK, TILE_DEPTH};
use crate::op::attention::HEAD_WIDTH_MAX;
use isobit_numerics::elementary::{SoftCap, exp2, ln};
use isobit_numerics::lanes::{LANES, max};
use isobit_numerics::slices::{Profile, Quantiser, magnitude_bits};
use std::ops::Range;

/// Per-thread state for one query block.
pub(super) struct State<'a> {
    pub(super) panel: Panel,
    pub(super) sums: Sums,
    /// Running maximum and denominator; for the current tile, the factor that rescales earlier sums
    /// and the scale of the weights.
    pub(super) m: [f32; ROWS],
    pub(super) l: [f32; ROWS],
    pub(super) alpha: [f32; ROWS],
    pub(super) scale: [f32; ROWS],
    /// Visible places of the current tile, per row.
    pub(super) visible: [(usize, usize); ROWS],
    /// Values of 32 rows to be reduced over lanes.
    pub(super) lanes: lanes::Rows<f32>,
    pub(super) magnitudes: lanes::Rows<u32>,
    pub(super) z: &'a mut [f32; ROWS * TILE],
    /// `[64 of the tile's keys][slice][row][64]`
    pub(super) weights: &'a mut [i8; 2 * 3 * SQUARE],
    pub(super) o: &'a mut [f32; ROWS * HEAD_WIDTH_MAX],
}

impl<'a> State<'a> {
    pub(super) const BYTES: usize = 2 * 3 * SQUARE;
    pub(super) const FLOATS: usize = ROWS * TILE + ROWS * HEAD_WIDTH_MAX;

    pub(super) fn new(path: Path, profile: Profile, (bytes, floats): (&'a mut [i8], &'a mut [f32])) -> Self {
        let (z, floats) = split(floats);
        Self {
            panel: Panel::new(path, profile),
            sums: Sums::new(),
            m: [0.0; ROWS],
            l: [0.0; ROWS],
            alpha: [0.0; ROWS],
            scale: [0.0; ROWS],
            visible: [(0, 0); ROWS],
            lanes: [[0.0; LANES]; BLOCK],
            magnitudes: [[0; LANES]; BLOCK],
            z,
            weights: split(bytes).0,
            o: split(floats).0,
        }
    }
}

multiversion! {
    /// Scores of a block from its sums; rows of `z` are a tile apart.
    pub(super) fn score_block<F, const PLANES: usize>(z: &mut [f32], sums: &Sums, q_scales: &[f32], k_scales: &[f32], softmax_scale: f32) {
        let Ok(k_scales) = <&[f32; BLOCK]>::try_from(k_scales) else { unreachable!("a panel of scales") };
        for (row, q_scale) in q_scales.iter().enumerate() {
            let q_scale = q_scale * softmax_scale;
            let (first, second, third) = (&sums.0[0][row], &sums.0[1][row], &sums.0[2][row]);
            let z = &mut z[row * TILE..][..BLOCK];
            for column in 0..BLOCK {
                let value = chunk_value::<F, PLANES>([first[column], second[column], third[column]]);
                z[column] = value * (q_scale * k_scales[column]);
            }
        }
    }
}

multiversion! {
    /// Caps the scores of so many rows of a block.
    pub(super) fn cap_block<F>(z: &mut [f32], rows: usize, cap: SoftCap) {
        for row in 0..rows {
            for z in &mut z[row * TILE..][..BLOCK] {
                *z = cap.apply::<F>(*z);
            }
        }
    }
}

// From the scores of a tile to sliced weights in three steps, each of which runs over all rows: the
// trees between them reduce 32 rows at once. `rows` are among 32 from a multiple of 32. Per-row
// values are computed for all 32 rows, so these loops have a constant length; rows without a place
// in the tile keep their values.

multiversion! {
    /// Largest visible scores, lane by lane.
    pub(super) fn score_maxima<_F>(state: &mut State, rows: Range<usize>) {
        let State { visible, z, lanes, .. } = state;
        let (z, _) = z.as_chunks::<BLOCK>();
        for row in rows {
            let mut most = [f32::NEG_INFINITY; LANES];
            for block in visible[row].0 / BLOCK..visible[row].1.div_ceil(BLOCK) {
                let z = &z[row * (TILE / BLOCK) + block];
                let seen = Seen::of(block, visible[row]);
                // Without branching between fully and partly visible blocks: the compiler
                // vectorizes this form.
                for lane in 0..LANES {
                    most[lane] = max(most[lane], if seen.has(lane) { z[lane] } else { f32::NEG_INFINITY });
                }
            }
            lanes[row % BLOCK] = most;
        }
    }
}

multiversion! {
    /// Computes maxima and factors from the tile's largest scores, then the weights, with their
    /// sums and magnitudes lane by lane.
    pub(super) fn weigh<F>(state: &mut State, rows: Range<usize>, most: &[f32; BLOCK], v_scales: &[f32; TILE]) {
        let State { m, alpha, visible, z, lanes, magnitudes, .. } = state;
        let (z, _) = z.as_chunks_mut::<BLOCK>();
        let start = rows.start / BLOCK * BLOCK;
        let (m, alpha) = (half_mut(m, start), half_mut(alpha, start));
        for row in 0..BLOCK {
            let new = if rows.contains(&(start + row)) { max(m[row], most[row]) } else { m[row] };
            alpha[row] = exp2::<F>(m[row] - new);
            m[row] = new;
        }
        for row in rows {
            let m = m[row - start];
            let mut total = [0.0f32; LANES];
            let mut magnitude = [0u32; LANES];
            for block in visible[row].0 / BLOCK..visible[row].1.div_ceil(BLOCK) {
                let z = &mut z[row * (TILE / BLOCK) + block];
                let Some(scales) = v_scales[block * BLOCK..].first_chunk::<BLOCK>() else { unreachable!("scales of a tile") };
                let seen = Seen::of(block, visible[row]);
                if seen.count == BLOCK as u32 {
                    for lane in 0..LANES {
                        let p = exp2::<F>(z[lane] - m);
                        let w = p * scales[lane];
                        total[lane] += p;
                        magnitude[lane] = magnitude[lane].max(magnitude_bits(w));
                        z[lane] = w;
                    }
                } else {
                    for lane in 0..LANES {
                        let p = exp2::<F>(z[lane] - m);
                        // A hidden key's scale may be NaN.
                        let (p, w) = if seen.has(lane) { (p, p * scales[lane]) } else { (0.0, 0.0) };
                        total[lane] += p;
                        magnitude[lane] = magnitude[lane].max(magnitude_bits(w));
                        z[lane] = w;
                    }
                }
            }
            (lanes[row % BLOCK], magnitudes[row % BLOCK]) = (total, magnitude);
        }
    }
}

multiversion! {
    /// Computes denominators and scales from the sums and magnitudes, then slices the weights into
    /// bytes.
    pub(super) fn slice_weights<F, const SLICES: usize>(
        state: &mut State,
        rows: Range<usize>,
        places: &Range<usize>,
        reduced: (&[f32; BLOCK], &[u32; BLOCK]),
        bias: i8,
    ) {
        let State { l, alpha, scale, visible, z, weights, .. } = state;
        let (z, _) = z.as_chunks::<BLOCK>();
        let start = rows.start / BLOCK * BLOCK;
        let (l, alpha, scale) = (half_mut(l, start), half_mut(alpha, start), half_mut(scale, start));
        let profile = if SLICES == 2 { Profile::X2 } else { Profile::X3 };
        let mut multipliers = [0.0f32; BLOCK];
        for row in 0..BLOCK {
            l[row] = if rows.contains(&(start + row)) { F::fma(l[row], alpha[row], reduced.0[row]) } else { l[row] };
            let quantiser = Quantiser::of(profile, reduced.1[row]);
            (scale[row], multipliers[row]) = (quantiser.scale, quantiser.multiplier);
        }
        for row in rows {
            let seen = visible[row].0 / BLOCK..visible[row].1.div_ceil(BLOCK);
            for block in places.start / TILE_DEPTH * 2..places.end.div_ceil(TILE_DEPTH) * 2 {
                let mut bytes = [[bias; BLOCK]; SLICES];
                if seen.contains(&block) {
                    bytes = quantise_row::<SLICES, BLOCK>(&z[row * (TILE / BLOCK) + block], multipliers[row - start], bias);
                }
                for slice in 0..SLICES {
                    let at = (block / 2 * SLICES + slice) * SQUARE + row * TILE_DEPTH + block % 2 * BLOCK;
                    weights[at..at + BLOCK].copy_from_slice(&bytes[slice]);
                }
            }
        }
    }
}

/// The values of 32 of 64 rows.
#[inline(always)]
fn half_mut<T>(of: &mut [T; ROWS], start: usize) -> &mut [T; BLOCK] {
    let Some(half) = of[start..].first_chunk_mut() else { unreachable!("half of the rows") };
    half
}

/// Which of a block's 32 places a row sees: all of them, except in its first and last block.
struct Seen {
    from: u32,
    count: u32,
}

impl Seen {
    #[inline(always)]
    fn of(block: usize, (from, to): (usize, usize)) -> Self {
        let first = block * BLOCK;
        let from = from.max(first) - first;
        Self { from: from as u32, count: ((to - first).min(BLOCK) - from) as u32 }
    }

    #[inline(always)]
    fn has(&self, lane: usize) -> bool {
        (lane as u32).wrapping_sub(self.from) < self.count
    }
}

multiversion! {
    /// Adds a block of the product with the values to the running sum.
    pub(super) fn value_block<F, const PLANES: usize>(state: &mut State, rows: Range<usize>, first: usize, stride: usize) {
        for row in rows {
            let (scale, alpha) = (state.scale[row], state.alpha[row]);
            let (one, two, three) = (&state.sums.0[0][row % BLOCK], &state.sums.0[1][row % BLOCK], &state.sums.0[2][row % BLOCK]);
            let o = &mut state.o[row * stride + first..][..BLOCK];
            for column in 0..BLOCK {
                let value = chunk_value::<F, PLANES>([one[column], two[column], three[column]]);
                o[column] = F::fma(value, scale, o[column] * alpha);
            }
        }
    }
}

multiversion! {
    /// Computes `lse`; leaves the inverse of the denominator in `l`.
    pub(super) fn finish<F>(state: &mut State, lse: &mut [f32; ROWS]) {
        let State { m, l, .. } = state;
        for row in 0..ROWS {
            lse[row] = m[row] + ln::<F>(l[row]) * std::f32::consts::LOG2_E;
            l[row] = 1.0 / l[row];
        }
    }
}

multiversion! {
    pub(super) fn divide<_F>(o: &mut [f32], sum: &[f32], inverse: f32) {
        for (o, sum) in o.iter_mut().zip(sum) {
            *o = sum * inverse;
        }
    }
}
