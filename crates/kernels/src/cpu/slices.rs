//! Sliced operands in tile order, and the code that fills them.
//!
//! A tile holds 64 elements of the contraction axis. A *left* tile is `[row][64]` bytes, and the
//! rows of one 64-wide column are contiguous, so a product may start at any row:
//! `[column][slice][row][64]`. A *right* tile is 16 rows by 64 as `[16 groups of 4][row][4]` bytes,
//! the order that AMX and VNNI multiply; tiles are laid out as `[16 rows][column][slice]`. Padding
//! bytes of right tiles are zero, so left padding contributes nothing, whatever it holds.

use super::CpuMemory;
#[cfg(target_arch = "x86_64")]
use super::path::{Path, Vector, multiversion};
use super::pool::SharedMut;
#[cfg(target_arch = "x86_64")]
use super::slice_tiles;
use crate::backend::{Checked, Device, Run, Shaped};
use crate::buffer::Buffer;
use crate::op::{QuantizedShape, SliceRows, SliceShape, SliceWeight};
use crate::plan::MemoryLayout;
use crate::{Cpu, Element, StoredMatrix};
use isobit_numerics::slices::{CHUNK, Profile, Quantiser, magnitude_bits, round_half_even, split2, split3};
use std::ops::Range;

impl Run<SliceRows<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut SliceRows<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        slice_rows(self, op.rows, op.x);
    }
}

/// Elements of the contraction axis in one tile.
pub(super) const TILE_DEPTH: usize = 64;
/// Rows of a right tile.
pub(super) const TILE_ROWS: usize = 16;
pub(super) const TILE_BYTES: usize = TILE_DEPTH * TILE_ROWS;
/// Tiles along the contraction axis in a whole chunk.
pub(super) const CHUNK_TILES: usize = CHUNK / TILE_DEPTH;
/// Rows and columns of the block that a kernel computes at a time.
pub(super) const BLOCK: usize = 32;

/// The value XORed into left bytes: VNNI multiplies unsigned by signed bytes, so that path keeps
/// the left operand 128 too large and subtracts the excess from the integer sums.
pub(super) fn left_bias(path: Path) -> u8 {
    if path == Path::Avx512 { 0x80 } else { 0 }
}

/// Sizes of a left operand.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeftLayout {
    /// Rows held, padding included, so that a block may read past the last one.
    pub(super) rows_padded: usize,
    pub(super) columns: usize,
    pub(super) slices: usize,
}

impl LeftLayout {
    pub(super) fn new(shape: SliceShape) -> Self {
        let blocks = shape.rows.div_ceil(TILE_ROWS) + 2;
        Self {
            // With an odd number of tiles, the columns of one row block do not collide in the same
            // cache sets.
            rows_padded: (blocks | 1) * TILE_ROWS,
            columns: shape.width.div_ceil(TILE_DEPTH),
            slices: shape.profile.slice_count(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.columns * self.column_stride()
    }

    pub(super) fn slice_stride(&self) -> usize {
        self.rows_padded * TILE_DEPTH
    }

    pub(super) fn column_stride(&self) -> usize {
        self.slices * self.slice_stride()
    }
}

/// Left operand: rows with one scale per (row, chunk).
pub struct SlicedRows {
    pub(super) shape: SliceShape,
    pub(super) layout: LeftLayout,
    pub(super) tiles: Buffer<i8>,
    /// `[rows, chunks]`
    pub(super) scales: Buffer<f32>,
}

/// Right operand: `count` weights with one scale per row.
pub struct SlicedWeight {
    pub(super) shape: SliceShape,
    count: usize,
    pub(super) tiles: Buffer<i8>,
    /// `[count, rows]`
    pub(super) scales: Buffer<f32>,
}

impl Shaped<SliceShape> for SlicedRows {
    fn shape(&self) -> SliceShape {
        self.shape
    }
}

impl Shaped<(usize, SliceShape)> for SlicedWeight {
    fn shape(&self) -> (usize, SliceShape) {
        (self.count, self.shape)
    }
}

impl SlicedWeight {
    /// Bytes of the slices and scales.
    pub fn bytes(&self) -> usize {
        self.tiles.len() + 4 * self.scales.len()
    }
}

/// Bytes of one block of 16 right rows.
pub(super) fn right_block_bytes(width: usize, profile: Profile) -> usize {
    width.div_ceil(TILE_DEPTH) * profile.slice_count() * TILE_BYTES
}

/// Lengths of the tiles and the scales of sliced rows.
fn rows_lengths(shape: SliceShape) -> (usize, usize) {
    (LeftLayout::new(shape).bytes(), shape.rows * shape.width.div_ceil(CHUNK))
}

/// Lengths of the tiles and the scales of sliced weights.
fn weight_lengths(count: usize, shape: SliceShape) -> (usize, usize) {
    let blocks = shape.rows.div_ceil(TILE_ROWS);
    (count * blocks * right_block_bytes(shape.width, shape.profile), count * shape.rows)
}

impl MemoryLayout for Cpu {
    fn name(&self) -> String {
        Device::name(self)
    }

    fn is_host(&self) -> bool {
        true
    }

    fn rows_bytes(&self, shape: SliceShape) -> usize {
        let (tiles, scales) = rows_lengths(shape);
        tiles + size_of::<f32>() * scales
    }

    fn weight_bytes(&self, count: usize, shape: SliceShape) -> usize {
        let (tiles, scales) = weight_lengths(count, shape);
        tiles + size_of::<f32>() * scales
    }

    fn quantized_bytes(&self, shape: QuantizedShape) -> usize {
        super::product4::quantized_bytes(shape)
    }
}

pub(super) fn rows(_cpu: &Cpu, shape: SliceShape) -> SlicedRows {
    let (tiles, scales) = rows_lengths(shape);
    SlicedRows { shape, layout: LeftLayout::new(shape), tiles: Buffer::zeros(tiles), scales: Buffer::zeros(scales) }
}

pub(super) fn slice_rows(cpu: &Cpu, out: &mut SlicedRows, x: &[f32]) {
    let left = LeftMut { shape: out.shape, layout: out.layout, tiles: &mut out.tiles, scales: &mut out.scales };
    fill_left(cpu, left, x, None);
}

/// A left operand to be filled, in a [`SlicedRows`] or in a workspace.
pub(super) struct LeftMut<'a> {
    pub(super) shape: SliceShape,
    pub(super) layout: LeftLayout,
    pub(super) tiles: &'a mut [i8],
    pub(super) scales: &'a mut [f32],
}

/// Slices every row of `x`, multiplied elementwise by `factors` (one rounding) if given.
pub(super) fn fill_left(cpu: &Cpu, out: LeftMut, x: &[f32], factors: Option<&[f32]>) {
    let LeftMut { shape, layout, tiles, scales } = out;
    let chunks = shape.width.div_ceil(CHUNK);
    let (tiles, scales) = (SharedMut::new(tiles), SharedMut::new(scales));
    let bias = left_bias(cpu.path);
    cpu.pool.run_ranges(shape.rows, 1, |range| {
        #[cfg(target_arch = "x86_64")]
        if cpu.path.vector() == Vector::Avx512 {
            // SAFETY: this thread alone has these rows.
            let scales = unsafe { scales.slice(range.start * chunks..range.end * chunks) };
            return slice_tiles::slice_rows(cpu.path, (&tiles, scales), &layout, shape, range, x, factors);
        }
        for row in range {
            let x = &x[row * shape.width..][..shape.width];
            // SAFETY: this thread alone has this row.
            let scales = unsafe { scales.slice(row * chunks..(row + 1) * chunks) };
            for (chunk, x) in x.chunks(CHUNK).enumerate() {
                let factors = factors.map(|factors| &factors[chunk * CHUNK..][..x.len()]);
                let to = LeftRow {
                    tiles: &tiles,
                    at: chunk * CHUNK_TILES * layout.column_stride() + row * TILE_DEPTH,
                    column_stride: layout.column_stride(),
                    slice_stride: layout.slice_stride(),
                    bias,
                };
                scales[chunk] = match shape.profile {
                    Profile::X2 => slice_chunk::<2>(cpu.path, &to, x, factors),
                    Profile::X3 => slice_chunk::<3>(cpu.path, &to, x, factors),
                };
            }
        }
    });
}

/// Destination of one row and chunk. Its creator has exclusive access to these tiles of the row
/// ([`SharedMut::slice`]).
pub(super) struct LeftRow<'a> {
    pub(super) tiles: &'a SharedMut<'a, i8>,
    pub(super) at: usize,
    pub(super) column_stride: usize,
    pub(super) slice_stride: usize,
    pub(super) bias: u8,
}

/// Slices one chunk of a row (times `factors`) into its left tiles, which the caller owns, and
/// returns its scale.
pub(super) fn slice_chunk<const SLICES: usize>(path: Path, to: &LeftRow, x: &[f32], factors: Option<&[f32]>) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if path.vector() == Vector::Avx512 {
        return slice_tiles::slice_chunk::<SLICES>(path, to, x, factors);
    }
    slice_chunk_any::<SLICES>(path, to, x, factors)
}

multiversion! {
    pub(super) fn slice_chunk_any<_F, const SLICES: usize>(to: &LeftRow, x: &[f32], factors: Option<&[f32]>) -> f32 {
        let mut folded;
        let mut bits = 0;
        let x = match factors {
            None => {
                for &x in x {
                    bits = bits.max(magnitude_bits(x));
                }
                x
            }
            Some(factors) => {
                folded = [0.0f32; CHUNK];
                for ((folded, x), factor) in folded.iter_mut().zip(x).zip(factors) {
                    *folded = x * factor;
                    bits = bits.max(magnitude_bits(*folded));
                }
                &folded[..x.len()]
            }
        };
        let profile = if SLICES == 2 { Profile::X2 } else { Profile::X3 };
        let quantiser = Quantiser::of(profile, bits);
        let (whole, tail) = x.as_chunks::<TILE_DEPTH>();
        let mut last = [0.0; TILE_DEPTH];
        last[..tail.len()].copy_from_slice(tail);
        let last = if tail.is_empty() { None } else { Some(&last) };
        for (column, x) in whole.iter().chain(last).enumerate() {
            let bytes = quantise_tile_row::<SLICES>(x, quantiser.multiplier, to.bias);
            for (slice, bytes) in bytes.iter().enumerate() {
                let at = to.at + column * to.column_stride + slice * to.slice_stride;
                // SAFETY: the row is the caller's own.
                unsafe { to.tiles.slice(at..at + TILE_DEPTH) }.copy_from_slice(bytes);
            }
        }
        quantiser.scale
    }
}

/// Slices of 64 numbers. A multiplier of zero (only tiny numbers, or a non-finite one) gives zeros.
#[inline(always)]
pub(super) fn quantise_tile_row<const SLICES: usize>(
    x: &[f32; TILE_DEPTH],
    multiplier: f32,
    bias: u8,
) -> [[i8; TILE_DEPTH]; SLICES] {
    let mut bytes = [[bias as i8; TILE_DEPTH]; SLICES];
    if multiplier == 0.0 {
        return bytes;
    }
    for i in 0..TILE_DEPTH {
        let slices = slices_of::<SLICES>(x[i] * multiplier);
        for slice in 0..SLICES {
            bytes[slice][i] = slices[slice] ^ bias as i8;
        }
    }
    bytes
}

/// Slices of one number, already multiplied by its chunk's multiplier and within the limit.
#[inline(always)]
pub(super) fn slices_of<const SLICES: usize>(scaled: f32) -> [i8; SLICES] {
    let mut slices = [0; SLICES];
    if SLICES == 2 {
        slices.copy_from_slice(&split2(round_small(scaled)));
    } else {
        // SAFETY: within the limit of 127·65536, so finite and far inside 32 bits.
        let q = unsafe { round_half_even(scaled).to_int_unchecked::<i32>() };
        slices.copy_from_slice(&split3(q));
    }
    slices
}

/// Nearest integer, ties to even, for |x| < 2²²: the bits of `x + 1.5·2²³` end in it.
#[inline(always)]
pub(super) fn round_small(x: f32) -> i32 {
    const SHIFT: f32 = 12582912.0;
    (x + SHIFT).to_bits().wrapping_sub(SHIFT.to_bits()) as i32
}

/// Allocated, not yet sliced.
pub(super) fn weight(count: usize, shape: SliceShape) -> SlicedWeight {
    let (tiles, scales) = weight_lengths(count, shape);
    SlicedWeight { shape, count, tiles: Buffer::zeros(tiles), scales: Buffer::zeros(scales) }
}

impl Run<SliceWeight<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut SliceWeight<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        match op.w {
            StoredMatrix::F32(w) => slice_stored(self, op.weight, w),
            StoredMatrix::Bf16(w) => slice_stored(self, op.weight, w),
            StoredMatrix::F16(w) => slice_stored(self, op.weight, w),
        }
    }
}

fn slice_stored<T: Element>(cpu: &Cpu, out: &mut SlicedWeight, w: &[T]) {
    let SliceShape { rows, width, profile } = out.shape;
    let blocks = rows.div_ceil(TILE_ROWS);
    let block_bytes = right_block_bytes(width, profile);
    let shared = SharedMut::new(&mut out.scales);
    cpu.pool.run_rows(&mut out.tiles, block_bytes.max(1), |range, tiles| {
        let mut multipliers = [0.0; TILE_ROWS];
        for (block, tiles) in range.zip(tiles.chunks_exact_mut(block_bytes)) {
            let first = block / blocks * rows + block % blocks * TILE_ROWS;
            let here = first..(first + TILE_ROWS).min((block / blocks + 1) * rows);
            // SAFETY: the rows of one block belong to one thread.
            let scales = unsafe { shared.slice(here.clone()) };
            row_scales(cpu.path, scales, &mut multipliers, &w[here.start * width..here.end * width], width, profile);
            for column in 0..width.div_ceil(TILE_DEPTH) {
                let tiles =
                    &mut tiles[column * profile.slice_count() * TILE_BYTES..][..profile.slice_count() * TILE_BYTES];
                right_tile(
                    cpu.path,
                    tiles,
                    &w[here.start * width..here.end * width],
                    width,
                    column,
                    &multipliers,
                    profile,
                );
            }
        }
    });
}

/// Scales and multipliers of whole rows.
pub(super) fn row_scales<T: Element>(
    path: Path,
    scales: &mut [f32],
    multipliers: &mut [f32],
    w: &[T],
    width: usize,
    profile: Profile,
) {
    multiversion! {
        fn max_of<_F>(x: &[f32]) -> u32 {
            x.iter().fold(0, |bits, &x| bits.max(magnitude_bits(x)))
        }
    }
    let mut values = [0.0f32; CHUNK];
    for ((scale, multiplier), row) in scales.iter_mut().zip(multipliers).zip(w.chunks_exact(width.max(1))) {
        let mut bits = 0;
        for chunk in row.chunks(CHUNK) {
            widen(path, &mut values, chunk);
            bits = bits.max(max_of(path, &values[..chunk.len()]));
        }
        let quantiser = Quantiser::of(profile, bits);
        (*scale, *multiplier) = (quantiser.scale, quantiser.multiplier);
    }
}

/// Stored numbers as float32.
#[inline]
pub(super) fn widen<T: Element>(path: Path, out: &mut [f32], x: &[T]) {
    // The element type cannot be a parameter of a multiversion function with a const one, so
    // dispatch by hand.
    #[inline(always)]
    fn body<T: Element>(out: &mut [f32], x: &[T]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x.to_f32();
        }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn avx2<T: Element>(out: &mut [f32], x: &[T]) {
        body(out, x);
    }
    #[cfg(target_arch = "x86_64")]
    if path != Path::Scalar {
        // SAFETY: every path but the scalar one has AVX2.
        return unsafe { avx2(out, x) };
    }
    let _ = path;
    body(out, x);
}

/// One right tile of every slice from up to 16 stored rows (`w` starts at the first of them) and
/// tile column `column`. Missing rows and elements past the width are zero.
pub(super) fn right_tile<T: Element>(
    path: Path,
    tiles: &mut [i8],
    w: &[T],
    width: usize,
    column: usize,
    multipliers: &[f32; TILE_ROWS],
    profile: Profile,
) {
    multiversion! {
        fn quantise<_F, const SLICES: usize>(left: &mut [[i8; TILE_BYTES]; 3], row: usize, x: &[f32; TILE_DEPTH], multiplier: f32) {
            for (slice, bytes) in quantise_tile_row::<SLICES>(x, multiplier, 0).iter().enumerate() {
                left[slice][row * TILE_DEPTH..][..TILE_DEPTH].copy_from_slice(bytes);
            }
        }
    }
    let mut left = [[0i8; TILE_BYTES]; 3];
    let at: Range<usize> = column * TILE_DEPTH..((column + 1) * TILE_DEPTH).min(width);
    for (row, w) in w.chunks_exact(width).enumerate() {
        let mut values = [0.0f32; TILE_DEPTH];
        widen(path, &mut values, &w[at.clone()]);
        match profile {
            Profile::X2 => quantise::<2>(path, &mut left, row, &values, multipliers[row]),
            Profile::X3 => quantise::<3>(path, &mut left, row, &values, multipliers[row]),
        }
    }
    for (slice, tile) in tiles.chunks_exact_mut(TILE_BYTES).enumerate() {
        left_to_right(path, tile, &left[slice]);
    }
}

/// Reorders a left tile of 16 rows (`[row][group of 4]`) into a right tile (`[group of 4][row]`).
pub(super) fn left_to_right(path: Path, right: &mut [i8], left: &[i8; TILE_BYTES]) {
    multiversion! {
        fn transpose<_F>(right: &mut [[[i8; 4]; 16]], left: &[[[i8; 4]; 16]]) {
            let (right, left) = (&mut right[..16], &left[..16]);
            for group in 0..16 {
                for row in 0..16 {
                    right[group][row] = left[row][group];
                }
            }
        }
    }
    #[cfg(target_arch = "x86_64")]
    if matches!(path, Path::Avx512 | Path::Amx) {
        assert_eq!(right.len(), TILE_BYTES, "a whole tile");
        // SAFETY: the path has AVX-512; both are 1024 bytes.
        return unsafe { left_to_right_avx512(right.as_mut_ptr(), left.as_ptr()) };
    }
    let (right, _) = right.as_chunks_mut::<4>();
    let (left, _) = left.as_chunks::<4>();
    transpose(path, right.as_chunks_mut::<16>().0, left.as_chunks::<16>().0);
}

/// A 16×16 transpose of 32-bit groups: pairs, then fours, then the 128-bit lanes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn left_to_right_avx512(right: *mut i8, left: *const i8) {
    use std::arch::x86_64::*;
    // SAFETY: the caller hands 1024 readable and 1024 writable bytes.
    unsafe {
        let rows: [__m512i; 16] = std::array::from_fn(|row| _mm512_loadu_si512(left.add(row * 64).cast()));
        let mut fours = [_mm512_setzero_si512(); 16];
        for four in 0..4 {
            let [a, b, c, d] = [0, 1, 2, 3].map(|i| rows[four * 4 + i]);
            let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            // Lane `j` of entry `i` holds rows `4·four..` of group `4·j + i`.
            fours[four] = _mm512_unpacklo_epi64(ab_low, cd_low);
            fours[4 + four] = _mm512_unpackhi_epi64(ab_low, cd_low);
            fours[8 + four] = _mm512_unpacklo_epi64(ab_high, cd_high);
            fours[12 + four] = _mm512_unpackhi_epi64(ab_high, cd_high);
        }
        for i in 0..4 {
            let [a, b, c, d] = [0, 1, 2, 3].map(|four| fours[i * 4 + four]);
            let ab_low = _mm512_shuffle_i32x4::<0b0100_0100>(a, b); // a0 a1 b0 b1
            let ab_high = _mm512_shuffle_i32x4::<0b1110_1110>(a, b); // a2 a3 b2 b3
            let cd_low = _mm512_shuffle_i32x4::<0b0100_0100>(c, d);
            let cd_high = _mm512_shuffle_i32x4::<0b1110_1110>(c, d);
            let groups = [
                _mm512_shuffle_i32x4::<0b1000_1000>(ab_low, cd_low), // a0 b0 c0 d0
                _mm512_shuffle_i32x4::<0b1101_1101>(ab_low, cd_low),
                _mm512_shuffle_i32x4::<0b1000_1000>(ab_high, cd_high),
                _mm512_shuffle_i32x4::<0b1101_1101>(ab_high, cd_high),
            ];
            for (j, group) in groups.into_iter().enumerate() {
                _mm512_storeu_si512(right.add((4 * j + i) * 64).cast(), group);
            }
        }
    }
}

/// Transposes 16 right rows × 64 into right tiles along the other axis, so the contraction runs
/// over the rows.
///
/// `source` holds the tiles (one slice) of the four row blocks that make up 64 rows, each at its
/// own 64-wide column; `quarter` picks 16 of the 64 columns. The result is one right tile whose
/// rows are those 16 columns.
pub(super) fn transpose_tile(path: Path, out: &mut [i8], source: [&[i8]; 4], quarter: usize) {
    multiversion! {
        fn transpose<_F>(out: &mut [[[i8; 4]; 16]], source: [&[[[i8; 4]; 16]]; 4], quarter: usize) {
            // Source group `g` (4 columns), row `r`, byte `b` is element (row r, column 4g+b).
            // Result group `h` (4 rows), row `c` (a column), byte `b` is element (row 4h+b, column
            // c).
            for block in 0..4 {
                let groups = &source[block][quarter * 4..quarter * 4 + 4];
                for h in 0..4 {
                    let out = &mut out[block * 4 + h];
                    for g in 0..4 {
                        for c in 0..4 {
                            for b in 0..4 {
                                out[g * 4 + c][b] = groups[g][h * 4 + b][c];
                            }
                        }
                    }
                }
            }
        }
    }
    #[cfg(target_arch = "x86_64")]
    if matches!(path, Path::Avx512 | Path::Amx) {
        for (block, source) in source.into_iter().enumerate() {
            let out = &mut out[block * 256..][..256];
            let source = &source[quarter * 256..][..256];
            // SAFETY: the path has AVX-512 BW; both slices are 256 bytes.
            unsafe { transpose_quarter_avx512(out.as_mut_ptr(), source.as_ptr()) };
        }
        return;
    }
    let source = source.map(|tile| tile.as_chunks::<4>().0.as_chunks::<16>().0);
    transpose(path, out.as_chunks_mut::<4>().0.as_chunks_mut::<16>().0, source, quarter);
}

/// 16 rows × 16 columns, `[group][row][4 columns]` to `[group of rows][column][4 rows]`: a 4×4
/// transpose of 16-byte lanes and one of the bytes inside each lane.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn transpose_quarter_avx512(out: *mut i8, source: *const i8) {
    use std::arch::x86_64::*;
    // SAFETY: the caller hands 256 readable and 256 writable bytes.
    unsafe {
        let load = |i: usize| _mm512_loadu_si512(source.add(i * 64).cast());
        let (a, b, c, d) = (load(0), load(1), load(2), load(3));
        let ab_low = _mm512_shuffle_i32x4::<0b0100_0100>(a, b); // a0 a1 b0 b1
        let ab_high = _mm512_shuffle_i32x4::<0b1110_1110>(a, b); // a2 a3 b2 b3
        let cd_low = _mm512_shuffle_i32x4::<0b0100_0100>(c, d);
        let cd_high = _mm512_shuffle_i32x4::<0b1110_1110>(c, d);
        let lanes = [
            _mm512_shuffle_i32x4::<0b1000_1000>(ab_low, cd_low), // a0 b0 c0 d0
            _mm512_shuffle_i32x4::<0b1101_1101>(ab_low, cd_low),
            _mm512_shuffle_i32x4::<0b1000_1000>(ab_high, cd_high),
            _mm512_shuffle_i32x4::<0b1101_1101>(ab_high, cd_high),
        ];
        let bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        for (i, lane) in lanes.into_iter().enumerate() {
            _mm512_storeu_si512(out.add(i * 64).cast(), _mm512_shuffle_epi8(lane, bytes));
        }
    }
}
