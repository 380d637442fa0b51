//! Tiles of low-rank products (`low_rank.rs`) hand-written for AVX-512: there are so few
//! multiply-adds that compiled code for the steps after them (a tree per sum, a scattered gradient)
//! would take as long.
//!
//! `contract` adds sixteen trees at once, with lanes of different sums side by side; `outer` reads
//! its rows in place and transposes its sums in registers. Every addition is the one that
//! `docs/numerics.md` specifies, with the same operands.

use super::path::{Path, Vector, prefetch};
use super::pool::SharedMut;
use crate::op::{FactorLayout, LowRank, TOKEN_BLOCK};
use isobit_numerics::lanes::LANES;
use std::arch::x86_64::*;
use std::ops::Range;

/// Tokens and ranks per tile of `contract`: sixteen sums, one per lane of a register.
const SIDE: usize = 4;
/// Tokens multiplied by a few rows of the factor before the next rows: together they fit the L2
/// cache.
const CONTRACT_TOKENS: usize = 24;
/// Elements per register.
const WIDE: usize = 16;
/// Ranks per tile of `outer`.
const OUTER_RANKS: usize = 8;
/// Registers per rank.
const OUTER_VECTORS: usize = 2;
/// Columns per tile of `outer`.
const OUTER_COLUMNS: usize = OUTER_VECTORS * WIDE;
/// Rows that `outer` prefetches ahead: they are a whole width apart, which hardware prefetchers may
/// not follow.
const OUTER_AHEAD: usize = 8;

type ContractTile = [[__m512; SIDE]; SIDE];
type OuterTile = [[__m512; OUTER_VECTORS]; OUTER_RANKS];

/// Mask of a register's lanes for the remaining elements.
fn mask_of(elements: usize) -> __mmask16 {
    ((1u32 << elements.min(WIDE)) - 1) as u16
}

/// Lane sums of every row of `x` with every row of the factor `[rank, width]`.
pub(super) fn contract_rows(path: Path, u: &mut [f32], x: &[f32], factor: &[f32], p: &LowRank) {
    assert_eq!(path.vector(), Vector::Avx512, "tiles of AVX-512");
    let tokens = u.len() / p.rank;
    assert_eq!([u.len(), x.len(), factor.len()], [tokens * p.rank, tokens * p.width, p.rank * p.width], "rows");
    // SAFETY: a `Cpu` holds a path only after checking its features; the lengths were checked
    // above.
    unsafe { contract_rows_avx512(u, x, factor, p) }
}

/// Adds one block of tokens to some columns of the gradient of a factor, which starts at `origin`.
///
/// # Safety
/// The caller has these columns of this gradient for itself ([`SharedMut::slice`]); other threads
/// may have others.
pub(super) unsafe fn outer_block(
    path: Path,
    (dfactor, origin): (&SharedMut<f32>, usize),
    u: &[f32],
    x: &[f32],
    p: &LowRank,
    block: Range<usize>,
    columns: Range<usize>,
) {
    assert_eq!(path.vector(), Vector::Avx512, "tiles of AVX-512");
    assert!(block.len() <= TOKEN_BLOCK && columns.end <= p.width, "a block of tokens, columns of the factor");
    let u = &u[block.start * p.rank..block.end * p.rank];
    let x = &x[block.start * p.width..block.end * p.width];
    // An address, not a slice: other threads' columns lie in between.
    let dfactor = dfactor.pointer_to(origin..origin + p.factor_length());
    // SAFETY: a `Cpu` holds a path only after checking its features. `u` and `x` are whole tokens
    // of one block, and the whole factor is inside, all checked above; the columns are the caller's
    // own.
    unsafe { outer_block_avx512(dfactor, u, x, p, columns) }
}

/// # Safety
/// The machine has these features; `u` is `[tokens, rank]`, `x` `[tokens, width]`, `factor`
/// `[rank, width]`.
#[target_feature(enable = "avx512f,avx512dq,avx512vl,fma")]
unsafe fn contract_rows_avx512(u: &mut [f32], x: &[f32], factor: &[f32], p: &LowRank) {
    let tokens = u.len() / p.rank;
    for start in (0..tokens).step_by(CONTRACT_TOKENS) {
        let end = (start + CONTRACT_TOKENS).min(tokens);
        for rank in (0..p.rank).step_by(SIDE) {
            // Past the last token or rank a tile repeats it and drops the result.
            let factor_rows = std::array::from_fn(|j| factor[(rank + j).min(p.rank - 1) * p.width..].as_ptr());
            for token in (start..end).step_by(SIDE) {
                let x_rows = std::array::from_fn(|t| x[(token + t).min(end - 1) * p.width..].as_ptr());
                let mut sums = [0.0; SIDE * SIDE];
                // SAFETY: every one of the eight rows starts inside its matrix (indexed above) and
                // has `width` elements there, by the caller's lengths; `sums` has 16 elements.
                unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), contract_tile(x_rows, factor_rows, p.width)) };
                let count = SIDE.min(p.rank - rank);
                for (token, sums) in (token..end).zip(sums.as_chunks::<SIDE>().0) {
                    let u = &mut u[token * p.rank + rank..][..count];
                    if let Some(u) = u.as_mut_array::<SIDE>() {
                        *u = *sums;
                    } else {
                        u.copy_from_slice(&sums[..count]);
                    }
                }
            }
        }
    }
}

/// Sums of four rows with four rows, those of the first row of `x` first. Lanes are independent
/// before the tree, so they are computed in two halves: then each of the sixteen sums has one
/// register.
///
/// # Safety
/// The machine has these features; every row has `width` readable elements.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl,fma")]
unsafe fn contract_tile(x: [*const f32; SIDE], m: [*const f32; SIDE], width: usize) -> __m512 {
    // SAFETY: features and rows by the caller's promise; halves start at lane 0 and 16.
    let (low, high) = unsafe { (contract_half(x, m, width, 0), contract_half(x, m, width, WIDE)) };
    let mut quads = [_mm512_setzero_ps(); SIDE];
    for j in 0..SIDE {
        let mut rows = [_mm512_setzero_ps(); SIDE];
        for t in 0..SIDE {
            rows[t] = _mm512_add_ps(low[t][j], high[t][j]);
        }
        let [a, b, c, d] = rows;
        quads[j] = add_fours(add_eights(a, b), add_eights(c, d));
    }
    let [a, b, c, d] = quads;
    add_ones(add_twos(a, b), add_twos(c, d))
}

/// Sixteen lanes of every sum, the first of which is `first`.
///
/// # Safety
/// The machine has these features; every row has `width` readable elements; `first` is 0 or 16.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl,fma")]
unsafe fn contract_half(x: [*const f32; SIDE], m: [*const f32; SIDE], width: usize, first: usize) -> ContractTile {
    let mut acc = [[_mm512_setzero_ps(); SIDE]; SIDE];
    let whole = width / LANES * LANES;
    let mut at = first;
    while at < whole {
        // SAFETY: `at` is `first` within a whole block of 32 lanes, so 16 elements from it are
        // inside rows of `width` elements.
        unsafe { contract_step(&mut acc, x, m, at, u16::MAX) };
        // Prefetch the next tile's rows: hardware prefetchers see only four short streams and half
        // of their lines at a time.
        for row in x {
            prefetch(row.wrapping_add(at + SIDE * width));
        }
        at += LANES;
    }
    // A tail touches only its own lanes: a product with zero could change the others.
    if at < width {
        // SAFETY: the mask has a bit for each of the `width - at` elements that are left, up to 16,
        // and masked loads touch no others.
        unsafe { contract_step(&mut acc, x, m, at, mask_of(width - at)) };
    }
    acc
}

/// One fused multiply-add of every lane in the mask.
///
/// # Safety
/// The machine has these features; every row has readable elements from `at` on for the lanes of
/// the mask.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl,fma")]
unsafe fn contract_step(
    acc: &mut ContractTile,
    x: [*const f32; SIDE],
    m: [*const f32; SIDE],
    at: usize,
    mask: __mmask16,
) {
    let mut x_lanes = [_mm512_setzero_ps(); SIDE];
    for t in 0..SIDE {
        // SAFETY: a masked load reads the lanes of the mask alone, which are inside row `t` of `x`
        // by the caller's promise.
        x_lanes[t] = unsafe { _mm512_maskz_loadu_ps(mask, x[t].add(at)) };
    }
    for j in 0..SIDE {
        // SAFETY: a masked load reads the lanes of the mask alone, which are inside row `j` of the
        // factor by the caller's promise.
        let m_lanes = unsafe { _mm512_maskz_loadu_ps(mask, m[j].add(at)) };
        for t in 0..SIDE {
            acc[t][j] = _mm512_mask3_fmadd_ps(x_lanes[t], m_lanes, acc[t][j], mask);
        }
    }
}

// Steps of the tree, each for two registers at once: lanes `l` and `l + 8`, then 4, 2 and 1 apart.
// Four sums that were added as `(a, b), (c, d)` have a quarter of a register each after the second
// step, and sixteen of them a lane each after the last.

#[inline]
#[target_feature(enable = "avx512f")]
fn add_eights(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_f32x4::<0b0100_0100>(a, b), _mm512_shuffle_f32x4::<0b1110_1110>(a, b))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add_fours(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_f32x4::<0b1000_1000>(a, b), _mm512_shuffle_f32x4::<0b1101_1101>(a, b))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add_twos(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_ps::<0b0100_0100>(a, b), _mm512_shuffle_ps::<0b1110_1110>(a, b))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add_ones(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_ps::<0b1000_1000>(a, b), _mm512_shuffle_ps::<0b1101_1101>(a, b))
}

/// # Safety
/// The machine has these features; `u` is `[tokens, rank]` and `x` `[tokens, width]` of at most a
/// block of tokens, `columns` are below `width`; a factor lies at `dfactor`, and these columns of
/// it are the caller's own.
#[target_feature(enable = "avx512f,avx512dq,avx512vl,fma")]
unsafe fn outer_block_avx512(dfactor: *mut f32, u: &[f32], x: &[f32], p: &LowRank, columns: Range<usize>) {
    for rank in (0..p.rank).step_by(OUTER_RANKS) {
        let ranks = OUTER_RANKS.min(p.rank - rank);
        let mask = (u8::MAX) >> (OUTER_RANKS - ranks);
        // `alpha·u`; results of padding ranks are not stored.
        let mut scaled = [[0.0; OUTER_RANKS]; TOKEN_BLOCK];
        for (scaled, u) in scaled.iter_mut().zip(u.chunks_exact(p.rank)) {
            let u = &u[rank..][..ranks];
            // SAFETY: the mask has a bit for each of the `ranks` elements of `u`, and a masked load
            // reads no others; `scaled` has eight elements.
            unsafe {
                let product = _mm256_mul_ps(_mm256_set1_ps(p.alpha), _mm256_maskz_loadu_ps(mask, u.as_ptr()));
                _mm256_storeu_ps(scaled.as_mut_ptr(), product);
            }
        }
        let scaled = &scaled[..u.len() / p.rank];
        for first in columns.clone().step_by(OUTER_COLUMNS) {
            let count = OUTER_COLUMNS.min(columns.end - first);
            // SAFETY: from `first`, `count` columns of every row are below `width`, and `scaled`
            // has as many tokens as `x` has rows.
            let sums = unsafe {
                let x = x.as_ptr().add(first);
                if count == OUTER_COLUMNS {
                    outer_tile::<true>(scaled, x, p.width, count)
                } else {
                    outer_tile::<false>(scaled, x, p.width, count)
                }
            };
            // SAFETY: `count` columns from `first` and `ranks` ranks from `rank` are inside the
            // factor in either layout, and the columns are the caller's own.
            unsafe {
                match p.layout {
                    FactorLayout::RankMajor => {
                        add_rows(dfactor.add(rank * p.width + first), &sums, p.width, ranks, count);
                    }
                    FactorLayout::WidthMajor => {
                        add_transposed(dfactor.add(first * p.rank + rank), &sums, p.rank, mask, count);
                    }
                }
            }
        }
    }
}

/// Sums over the tokens of `scaled`; `WHOLE` if `count` is all columns of a tile.
///
/// # Safety
/// The machine has these features; for every token, `count` elements are readable at `x` plus as
/// many rows of `width`.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl,fma")]
unsafe fn outer_tile<const WHOLE: bool>(
    scaled: &[[f32; OUTER_RANKS]],
    x: *const f32,
    width: usize,
    count: usize,
) -> OuterTile {
    let mut acc = [[_mm512_setzero_ps(); OUTER_VECTORS]; OUTER_RANKS];
    // ORDER: ascending tokens.
    for (t, scaled) in scaled.iter().enumerate() {
        let mut columns = [_mm512_setzero_ps(); OUTER_VECTORS];
        for vector in 0..OUTER_VECTORS {
            let at = t * width + vector * WIDE;
            prefetch(x.wrapping_add(at + OUTER_AHEAD * width));
            let mask = if WHOLE { u16::MAX } else { mask_of(count.saturating_sub(vector * WIDE)) };
            // SAFETY: row `t` has `count` readable elements by the caller's promise, and the mask
            // has no bit for those after them.
            columns[vector] = unsafe { _mm512_maskz_loadu_ps(mask, x.wrapping_add(at)) };
        }
        for j in 0..OUTER_RANKS {
            for vector in 0..OUTER_VECTORS {
                acc[j][vector] = _mm512_fmadd_ps(_mm512_set1_ps(scaled[j]), columns[vector], acc[j][vector]);
            }
        }
    }
    acc
}

/// Adds a tile to rows `width` apart.
///
/// # Safety
/// The machine has AVX-512; `count` elements of each of `ranks` rows from `dfactor` on are the
/// caller's.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add_rows(dfactor: *mut f32, sums: &OuterTile, width: usize, ranks: usize, count: usize) {
    for (j, sums) in sums.iter().enumerate().take(ranks) {
        for (vector, sum) in sums.iter().enumerate() {
            let (at, mask) =
                (dfactor.wrapping_add(j * width + vector * WIDE), mask_of(count.saturating_sub(vector * WIDE)));
            // SAFETY: `count` elements of row `j` are the caller's, and the mask has no bit for
            // those after them, which may be another thread's: masked loads and stores leave them
            // alone.
            unsafe { _mm512_mask_storeu_ps(at, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), *sum)) };
        }
    }
}

/// Adds a tile to a factor whose ranks are adjacent.
///
/// # Safety
/// The machine has these features; of each of `count` columns, `rank` elements apart from `dfactor`
/// on, the elements of the mask are the caller's.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
unsafe fn add_transposed(dfactor: *mut f32, sums: &OuterTile, rank: usize, mask: __mmask8, count: usize) {
    let [first, second] = [_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15)];
    for vector in 0..OUTER_VECTORS {
        let mut rows = [_mm512_setzero_ps(); OUTER_RANKS];
        for j in 0..OUTER_RANKS {
            rows[j] = sums[j][vector];
        }
        let [a, b, c, d, e, f, g, h] = rows;
        let (low, high) = (transpose_fours(a, b, c, d), transpose_fours(e, f, g, h));
        for i in 0..4 {
            // Quarter `q` of both belongs to column `4·q + i`.
            let (low, high) = (_mm512_castps_pd(low[i]), _mm512_castps_pd(high[i]));
            for (pair, order) in [first, second].into_iter().enumerate() {
                let both = _mm512_permutex2var_pd(low, order, high);
                let columns = [_mm512_castpd512_pd256(both), _mm512_extractf64x4_pd::<1>(both)];
                for (odd, sum) in columns.into_iter().enumerate() {
                    let column = vector * WIDE + 4 * (2 * pair + odd) + i;
                    if column < count {
                        let at = dfactor.wrapping_add(column * rank);
                        // SAFETY: `column` is one of the caller's `count`, and the mask has no bit
                        // for what is not the caller's of it.
                        unsafe {
                            let total = _mm256_add_ps(_mm256_maskz_loadu_ps(mask, at), _mm256_castpd_ps(sum));
                            _mm256_mask_storeu_ps(at, mask, total);
                        }
                    }
                }
            }
        }
    }
}

/// Transposes the 4×4 numbers of every quarter: quarter `q` of result `i` is element `4·q + i` of
/// each.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_fours(a: __m512, b: __m512, c: __m512, d: __m512) -> [__m512; 4] {
    let (ab_low, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let (cd_low, cd_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    [
        _mm512_shuffle_ps::<0b0100_0100>(ab_low, cd_low),
        _mm512_shuffle_ps::<0b1110_1110>(ab_low, cd_low),
        _mm512_shuffle_ps::<0b0100_0100>(ab_high, cd_high),
        _mm512_shuffle_ps::<0b1110_1110>(ab_high, cd_high),
    ]
}
