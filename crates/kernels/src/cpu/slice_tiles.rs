//! Slices of a row chunk (`slices.rs`) hand-written for AVX-512: the compiler packs bytes one slice
//! and sixteen numbers at a time.
//!
//! A number's integer is offset so that its slices are its bytes: with 128 added for every slice
//! below the first, no slice borrows from the next, and each of those bytes is its slice with the
//! top bit flipped.

use super::path::{Path, Vector};
use super::pool::SharedMut;
use super::slices::{CHUNK_TILES, LeftLayout, LeftRow, TILE_DEPTH, left_bias};
use crate::op::SliceShape;
use isobit_numerics::slices::{CHUNK, Profile, Quantiser};
use std::arch::x86_64::*;
use std::ops::Range;

/// Numbers per register.
const WIDE: usize = 16;
/// Registers per tile row.
const PARTS: usize = TILE_DEPTH / WIDE;

/// Slices one chunk of a row (times `factors`) into its left tiles, which the caller owns, and
/// returns its scale.
pub(super) fn slice_chunk<const SLICES: usize>(path: Path, to: &LeftRow, x: &[f32], factors: Option<&[f32]>) -> f32 {
    assert_eq!(path.vector(), Vector::Avx512, "tiles of AVX-512");
    assert!(x.len() <= CHUNK && factors.is_none_or(|factors| factors.len() == x.len()), "a chunk and its factors");
    if x.is_empty() {
        return 0.0;
    }
    // Columns and slices ascend: if the last one is inside, all are.
    let last = to.at + (x.len() - 1) / TILE_DEPTH * to.column_stride + (SLICES - 1) * to.slice_stride;
    let _ = to.tiles.pointer_to(last..last + TILE_DEPTH);
    // SAFETY: a `Cpu` holds the path only after checking AVX-512; all tiles of the row are inside
    // and there are as many factors as numbers (checked above), and the row is the caller's own
    // (`LeftRow`).
    unsafe {
        match factors {
            None => slice_chunk_avx512::<SLICES, false>(to, x, x),
            Some(factors) => slice_chunk_avx512::<SLICES, true>(to, x, factors),
        }
    }
}

/// # Safety
/// The machine has these features; the tiles of the row are inside and the caller's own; with
/// `FACTORS` there are as many as numbers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn slice_chunk_avx512<const SLICES: usize, const FACTORS: bool>(
    to: &LeftRow,
    x: &[f32],
    factors: &[f32],
) -> f32 {
    let (tiles, strides) = (to.tiles.pointer().wrapping_add(to.at), [to.column_stride, to.slice_stride]);
    // SAFETY: features, factors and tiles are as the caller promises; `tiles` is the address of the
    // row's first byte, from which strides lead to the others.
    unsafe {
        let quantiser = quantiser_of::<SLICES, FACTORS>(x, factors);
        store::<SLICES, FACTORS>(tiles, strides, x, factors, quantiser.multiplier, to.bias);
        quantiser.scale
    }
}

/// Slices some rows of `x` (times `factors`), each in chunks, into their left tiles and `scales`,
/// which the caller owns.
pub(super) fn slice_rows(
    path: Path,
    (tiles, scales): (&SharedMut<i8>, &mut [f32]),
    layout: &LeftLayout,
    shape: SliceShape,
    rows: Range<usize>,
    x: &[f32],
    factors: Option<&[f32]>,
) {
    assert_eq!(path.vector(), Vector::Avx512, "tiles of AVX-512");
    assert_eq!(scales.len(), rows.len() * shape.width.div_ceil(CHUNK), "a scale for every chunk");
    assert!(rows.end <= shape.rows && shape.rows * shape.width <= x.len(), "rows to slice");
    assert!(factors.is_none_or(|factors| shape.width <= factors.len()), "a factor for every column");
    assert!(
        shape.rows <= layout.rows_padded && layout.columns == shape.width.div_ceil(TILE_DEPTH),
        "layout of the shape"
    );
    if scales.is_empty() {
        return;
    }
    let whole = tiles.pointer_to(0..layout.bytes());
    let into = Rows { tiles: whole, layout, width: shape.width, bias: left_bias(path) };
    // SAFETY: a `Cpu` holds the path only after checking AVX-512. The whole operand is inside, the
    // layout has all rows and columns, and there is a scale for every chunk and a factor for every
    // column (all checked above); the rows are the caller's own.
    unsafe {
        match (shape.profile, factors) {
            (Profile::X2, None) => slice_rows_avx512::<2, false>(&into, scales, rows, x, x),
            (Profile::X2, Some(factors)) => slice_rows_avx512::<2, true>(&into, scales, rows, x, factors),
            (Profile::X3, None) => slice_rows_avx512::<3, false>(&into, scales, rows, x, x),
            (Profile::X3, Some(factors)) => slice_rows_avx512::<3, true>(&into, scales, rows, x, factors),
        }
    }
}

/// Destination of the rows' bytes.
struct Rows<'a> {
    tiles: *mut i8,
    layout: &'a LeftLayout,
    width: usize,
    bias: u8,
}

/// # Safety
/// The machine has these features; `rows`, not empty, are rows of `x` and of the layout, whose
/// tiles are inside and the caller's own in these rows; with `FACTORS` there is one for every
/// column.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn slice_rows_avx512<const SLICES: usize, const FACTORS: bool>(
    into: &Rows,
    scales: &mut [f32],
    rows: Range<usize>,
    x: &[f32],
    factors: &[f32],
) {
    let chunks = into.width.div_ceil(CHUNK);
    let chunk_of = |row: usize, chunk: usize| {
        let columns = chunk * CHUNK..((chunk + 1) * CHUNK).min(into.width);
        (&x[row * into.width..][columns.clone()], if FACTORS { &factors[columns] } else { x })
    };
    // SAFETY: these features are enabled here, and `chunk_of` gives as many factors as numbers.
    let quantiser_at = |(x, factors): (&[f32], &[f32])| unsafe { quantiser_of::<SLICES, FACTORS>(x, factors) };
    let mut quantiser = quantiser_at(chunk_of(rows.start, 0));
    let (mut row, mut chunk) = (rows.start, 0);
    for scale in scales {
        // The next quantiser, a long chain of maxima and divisions, is computed while these numbers
        // are rounded.
        let next = if chunk + 1 < chunks { (row, chunk + 1) } else { (row + 1, 0) };
        let next_quantiser = if next.0 < rows.end { quantiser_at(chunk_of(next.0, next.1)) } else { quantiser };
        let (x, factors) = chunk_of(row, chunk);
        let at = chunk * CHUNK_TILES * into.layout.column_stride() + row * TILE_DEPTH;
        let strides = [into.layout.column_stride(), into.layout.slice_stride()];
        // SAFETY: these features are enabled here; row and chunk are those of the layout, whose
        // tiles are inside and in this row the caller's own; `chunk_of` gives as many factors as
        // numbers.
        unsafe { store::<SLICES, FACTORS>(into.tiles.add(at), strides, x, factors, quantiser.multiplier, into.bias) };
        *scale = quantiser.scale;
        (row, chunk) = next;
        quantiser = next_quantiser;
    }
}

/// The quantiser of the numbers, times their factors.
///
/// # Safety
/// The machine has these features; with `FACTORS` there are at least as many as numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn quantiser_of<const SLICES: usize, const FACTORS: bool>(x: &[f32], factors: &[f32]) -> Quantiser {
    let mut largest = [_mm512_setzero_si512(); PARTS];
    for first in (0..x.len()).step_by(TILE_DEPTH) {
        // SAFETY: `first` is below the length, and the caller has as many factors as numbers.
        let parts = unsafe { load::<FACTORS>(x, factors, first) };
        for part in 0..PARTS {
            let magnitude = _mm512_and_si512(_mm512_castps_si512(parts[part]), _mm512_set1_epi32(i32::MAX));
            largest[part] = _mm512_max_epu32(largest[part], magnitude);
        }
    }
    let [a, b, c, d] = largest;
    let bits = _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_max_epu32(a, b), _mm512_max_epu32(c, d)));
    Quantiser::of(if SLICES == 2 { Profile::X2 } else { Profile::X3 }, bits)
}

/// Writes the slices of the numbers, times their factors, to tiles from `to` on.
///
/// # Safety
/// The machine has these features; with `FACTORS` there are at least as many as numbers. For every
/// 64 numbers begun and every slice, 64 bytes at its strides from `to` are the caller's own.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn store<const SLICES: usize, const FACTORS: bool>(
    mut to: *mut i8,
    [column_stride, slice_stride]: [usize; 2],
    x: &[f32],
    factors: &[f32],
    multiplier: f32,
    bias: u8,
) {
    for first in (0..x.len()).step_by(TILE_DEPTH) {
        let bytes = if multiplier == 0.0 {
            // Only tiny numbers, or a non-finite one.
            [_mm512_set1_epi8(bias as i8); SLICES]
        } else {
            // SAFETY: the loop keeps `first` below the length, and there are as many factors as
            // numbers.
            slices_of::<SLICES>(unsafe { load::<FACTORS>(x, factors, first) }, multiplier, bias)
        };
        for slice in 0..SLICES {
            // SAFETY: the 64 bytes of this column and slice are the caller's own.
            unsafe { _mm512_storeu_si512(to.wrapping_add(slice * slice_stride).cast(), bytes[slice]) };
        }
        to = to.wrapping_add(column_stride);
    }
}

/// A tile's worth of numbers, times their factors; zeros past the end.
///
/// # Safety
/// The machine has AVX-512; `first` is inside; with `FACTORS` there are at least as many as
/// numbers.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load<const FACTORS: bool>(x: &[f32], factors: &[f32], first: usize) -> [__m512; PARTS] {
    if x.len() - first >= TILE_DEPTH {
        // SAFETY: 64 numbers from `first` are inside, and as many factors.
        unsafe { load_masked::<FACTORS>(x, factors, first, u64::MAX) }
    } else {
        // SAFETY: the mask has a bit for each of the fewer than 64 numbers that are left, and no
        // other.
        unsafe { load_masked::<FACTORS>(x, factors, first, (1 << (x.len() - first)) - 1) }
    }
}

/// The numbers of a tile selected by the mask.
///
/// # Safety
/// The machine has AVX-512; the numbers of the mask, counted from `first`, are inside, and with
/// `FACTORS` as many of those.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_masked<const FACTORS: bool>(x: &[f32], factors: &[f32], first: usize, mask: u64) -> [__m512; PARTS] {
    let mut parts = [_mm512_setzero_ps(); PARTS];
    for part in 0..PARTS {
        let (at, mask) = (first + part * WIDE, (mask >> (part * WIDE)) as __mmask16);
        // SAFETY: a masked load reads the numbers of its mask alone, which are inside by the
        // caller's promise.
        unsafe {
            parts[part] = _mm512_maskz_loadu_ps(mask, x.as_ptr().wrapping_add(at));
            if FACTORS {
                let factors = _mm512_maskz_loadu_ps(mask, factors.as_ptr().wrapping_add(at));
                parts[part] = _mm512_mul_ps(parts[part], factors);
            }
        }
    }
    parts
}

/// Slices of 64 numbers, the highest first.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn slices_of<const SLICES: usize>(x: [__m512; PARTS], multiplier: f32, bias: u8) -> [__m512i; SLICES] {
    // Bytes of four integers side by side, the lowest of each first.
    let gather = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    let mut parts = [_mm512_setzero_si512(); PARTS];
    for part in 0..PARTS {
        let scaled = _mm512_mul_ps(x[part], _mm512_set1_ps(multiplier));
        let raised = if SLICES == 2 {
            // Below 2²² the sum with 1.5·2²³ ends in the nearest integer, ties to even; the 128 is
            // added in the same step.
            _mm512_castps_si512(_mm512_add_ps(scaled, _mm512_set1_ps(12582912.0 + 128.0)))
        } else {
            const NEAREST_EVEN: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            _mm512_add_epi32(_mm512_cvt_roundps_epi32::<NEAREST_EVEN>(scaled), _mm512_set1_epi32(0x8080))
        };
        parts[part] = _mm512_shuffle_epi8(raised, gather);
    }
    let [a, b, c, d] = parts;
    // Now 32-bit lane `i` of every quarter has four bytes of place `i`: quarters of one place are
    // joined across the parts, then put in the order of the numbers.
    let (ab_low, cd_low) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
    let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
    let places = [
        _mm512_unpacklo_epi64(ab_low, cd_low),
        _mm512_unpackhi_epi64(ab_low, cd_low),
        _mm512_unpacklo_epi64(ab_high, cd_high),
    ];
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let mut slices = [_mm512_setzero_si512(); SLICES];
    for slice in 0..SLICES {
        let flipped = if slice == 0 { bias } else { bias ^ 0x80 };
        let bytes = _mm512_permutexvar_epi32(order, places[SLICES - 1 - slice]);
        slices[slice] = _mm512_xor_si512(bytes, _mm512_set1_epi8(flipped as i8));
    }
    slices
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::slices::slice_chunk_any;

    type ChunkSlicer<'a> = dyn Fn(&LeftRow, &[f32], Option<&[f32]>) -> f32 + 'a;

    fn number(i: usize) -> f32 {
        let x = f32::from_bits((i as u32).wrapping_mul(2654435769) >> 8 | 0x3e00_0000);
        if i.is_multiple_of(3) { -x } else { x }
    }

    /// Tiles and scales of all rows: by rows, by chunks, and by scalar code.
    fn check<const SLICES: usize>(path: Path, shape: SliceShape, x: &[f32], factors: Option<&[f32]>) {
        let layout = LeftLayout::new(shape);
        let chunks = shape.width.div_ceil(CHUNK);
        let by_chunks = |slice: &ChunkSlicer| {
            let mut tiles = vec![77; layout.bytes()];
            let shared = SharedMut::new(&mut tiles);
            let mut scales = Vec::new();
            for (row, x) in x.chunks_exact(shape.width).enumerate() {
                for (chunk, x) in x.chunks(CHUNK).enumerate() {
                    let to = LeftRow {
                        tiles: &shared,
                        at: chunk * CHUNK_TILES * layout.column_stride() + row * TILE_DEPTH,
                        column_stride: layout.column_stride(),
                        slice_stride: layout.slice_stride(),
                        bias: left_bias(path),
                    };
                    let factors = factors.map(|factors| &factors[chunk * CHUNK..][..x.len()]);
                    scales.push(slice(&to, x, factors).to_bits());
                }
            }
            (tiles, scales)
        };
        let want = by_chunks(&|to, x, factors| slice_chunk_any::<SLICES>(Path::Scalar, to, x, factors));
        assert_eq!(by_chunks(&|to, x, factors| slice_chunk::<SLICES>(path, to, x, factors)), want, "{path} {shape:?}");
        let (mut tiles, mut scales) = (vec![77; layout.bytes()], vec![1.0f32; shape.rows * chunks]);
        let shared = SharedMut::new(&mut tiles);
        let (first, second) = scales.split_at_mut(chunks);
        slice_rows(path, (&shared, first), &layout, shape, 0..1, x, factors);
        slice_rows(path, (&shared, second), &layout, shape, 1..shape.rows, x, factors);
        let scales: Vec<_> = scales.iter().map(|scale| scale.to_bits()).collect();
        assert_eq!((tiles, scales), want, "{path} {shape:?}");
    }

    /// Both paths, which differ in the bias; the int8 unit is not needed here.
    #[test]
    fn agrees_with_plain_code() {
        if !Path::Avx512.is_available() {
            return;
        }
        for width in [1, 15, 17, 63, 64, 65, 256, 511, 512, 513, 700, 1088] {
            let rows = 7;
            let mut x: Vec<f32> = (0..rows * width).map(number).collect();
            let factors: Vec<f32> = (0..width).map(|i| number(i + 1000)).collect();
            for (row, last) in [0.0, 1e-38, f32::INFINITY, f32::NAN].into_iter().enumerate() {
                x[(row + 1) * width - 1] = last;
            }
            // Half steps, which round to even.
            for (i, x) in x[4 * width..5 * width].iter_mut().enumerate() {
                *x = if i == 0 { 32512.0 } else { i as f32 - 99.5 };
            }
            for path in [Path::Avx512, Path::Amx] {
                for factors in [None, Some(&factors[..])] {
                    check::<2>(path, SliceShape { rows, width, profile: Profile::X2 }, &x, factors);
                    check::<3>(path, SliceShape { rows, width, profile: Profile::X3 }, &x, factors);
                }
            }
        }
    }
}
