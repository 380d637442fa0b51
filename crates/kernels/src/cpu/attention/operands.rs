//! Operands of attention's slice products: rows of a head as left tiles, as right tiles, or
//! transposed.
//!
//! Everything is divided into blocks of 64 rows that start at a span's first row, so a product
//! never mixes documents. When the block is a right operand, missing rows and elements are zero
//! bytes with scale zero.

use super::along::{PACKED, packs};
use crate::cpu::path::{Path, multiversion};
use crate::cpu::slices::{TILE_BYTES, TILE_DEPTH, TILE_ROWS, left_bias, left_to_right, round_small, transpose_tile};
use crate::op::attention::HEAD_WIDTH_MAX;
use isobit_numerics::slices::{Profile, Quantiser, magnitude_bits, round_half_even};
use std::ops::Range;

/// Rows of one block: a transposed block is one tile deep.
pub(super) const ROWS: usize = TILE_DEPTH;
/// Bytes of one slice of 64 rows and 64 elements.
pub(super) const SQUARE: usize = ROWS * TILE_DEPTH;

/// Sizes of one tensor's blocks.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) width: usize,
    pub(super) profile: Profile,
    /// Whether untransposed blocks are packed (`along.rs`).
    pub(super) packed: bool,
}

impl Shape {
    pub(super) fn new(path: Path, width: usize, profile: Profile) -> Self {
        Self { width, profile, packed: packs(path, width, profile) }
    }

    /// Tiles along the width.
    pub(super) fn columns(self) -> usize {
        self.width.div_ceil(TILE_DEPTH)
    }

    /// Groups of 16 along the width: right blocks of a transposed operand.
    pub(super) fn groups(self) -> usize {
        self.width.div_ceil(TILE_ROWS)
    }

    pub(super) fn slices(self) -> usize {
        self.profile.slice_count()
    }

    /// Squares used in a left block.
    fn left_squares(self) -> usize {
        if self.packed { 1 } else { self.columns() * self.slices() }
    }

    /// Bytes of a block as left (`[column][slice][64 rows][64]`) or as right tiles
    /// (`[4 × 16 rows][column][slice]`). A packed left block is `[64 rows][64]`, with the second
    /// half of its bytes unused.
    pub(super) fn block_bytes(self) -> usize {
        self.columns() * self.slices() * SQUARE
    }

    /// Bytes of a transposed block: as right tiles `[16 of the width][slice]`, as left
    /// `[slice][width][64 rows]`.
    pub(super) fn transposed_bytes(self) -> usize {
        self.groups() * self.slices() * TILE_BYTES
    }
}

/// Blocks of all spans in order: `starts[s]` is the first block of span `s`, the last entry the
/// total.
#[derive(Clone, Copy)]
pub(super) struct Blocks<'a> {
    starts: &'a [u32],
}

impl<'a> Blocks<'a> {
    /// Total blocks of ranges of these lengths.
    pub(super) fn count(lengths: impl Iterator<Item = usize>) -> usize {
        lengths.map(|length| length.div_ceil(ROWS)).sum()
    }

    pub(super) fn new(starts: &'a mut [u32], lengths: impl Iterator<Item = usize>) -> Self {
        let mut next = 0;
        starts[0] = 0;
        for (start, length) in starts[1..].iter_mut().zip(lengths) {
            next += length.div_ceil(ROWS);
            *start = u32::try_from(next).expect("a call has fewer than 2^32 blocks");
        }
        Self { starts }
    }

    pub(super) fn total(self) -> usize {
        self.starts[self.starts.len() - 1] as usize
    }

    pub(super) fn of(self, span: usize) -> Range<usize> {
        self.starts[span] as usize..self.starts[span + 1] as usize
    }

    /// The span of a block and the block's index inside it.
    pub(super) fn locate(self, block: usize) -> (usize, usize) {
        let span = self.starts.partition_point(|&start| start as usize <= block) - 1;
        (span, block - self.starts[span] as usize)
    }
}

/// Location of one block's rows in a `[t, heads, width]` tensor.
#[derive(Clone, Copy)]
pub(super) struct BlockRows<'a> {
    pub(super) x: &'a [f32],
    pub(super) first_row: usize,
    /// Up to 64.
    pub(super) rows: usize,
    pub(super) head: usize,
    pub(super) heads: usize,
}

impl<'a> BlockRows<'a> {
    pub(super) fn row(&self, row: usize, width: usize) -> &'a [f32] {
        self.run(row, width, 1)
    }

    /// The rows of adjacent heads, which are contiguous.
    fn run(&self, row: usize, width: usize, heads: usize) -> &'a [f32] {
        &self.x[((self.first_row + row) * self.heads + self.head) * width..][..heads * width]
    }
}

/// Destinations of one block: `left` and `right` are its untransposed forms, if wanted.
pub(super) struct Forms<'a> {
    pub(super) scales: &'a mut [f32],
    pub(super) left: Option<&'a mut [i8]>,
    pub(super) right: Option<&'a mut [i8]>,
}

/// Slices blocks; holds the intermediate forms that are not kept.
pub(super) struct Slicer<'a> {
    path: Path,
    left: &'a mut [i8],
    right: &'a mut [i8],
}

impl<'a> Slicer<'a> {
    /// Bytes of scratch.
    pub(super) const SCRATCH_BYTES: usize = 2 * HEAD_WIDTH_MAX / TILE_DEPTH * 3 * SQUARE;

    pub(super) fn new(path: Path, scratch: &'a mut [i8]) -> Self {
        let (left, right) = scratch.split_at_mut(Self::SCRATCH_BYTES / 2);
        Self { path, left, right }
    }

    /// Slices the rows of a block whose largest magnitudes are `most`. Returns its right tiles, if
    /// wanted or needed for transposing. A kept left form has the bias of left operands, as do
    /// tiles derived from it.
    pub(super) fn load<'s>(
        &'s mut self,
        shape: Shape,
        source: BlockRows,
        most: &[u32; ROWS],
        forms: Forms<'s>,
        transposes: bool,
    ) -> &'s [i8] {
        let bias = if forms.left.is_some() { left_bias(self.path) as i8 } else { 0 };
        let left = forms.left.unwrap_or(self.left);
        let scales = forms.scales.as_mut_array().expect("a block has 64 scales");
        match shape.profile {
            _ if shape.packed => pack_rows(self.path, left, scales, source, shape.width, most, bias),
            Profile::X2 => slice_rows::<2>(self.path, left, scales, source, shape.width, most, bias),
            Profile::X3 => slice_rows::<3>(self.path, left, scales, source, shape.width, most, bias),
        }
        for square in left.chunks_exact_mut(SQUARE).take(shape.left_squares()) {
            square[source.rows * TILE_DEPTH..].fill(bias);
        }
        if forms.right.is_none() && !transposes {
            return &[];
        }
        let right = forms.right.unwrap_or(self.right);
        make_right(self.path, shape, right, left);
        right
    }
}

/// Builds the right tiles of a left block.
fn make_right(path: Path, shape: Shape, right: &mut [i8], left: &[i8]) {
    let tiles = shape.columns() * shape.slices();
    let (left, _) = left.as_chunks::<TILE_BYTES>();
    if shape.packed {
        let mut tile = [0; TILE_BYTES];
        for (left, right) in left[..4].iter().zip(right.chunks_exact_mut(2 * TILE_BYTES)) {
            left_to_right(path, &mut tile, left);
            let (high, low) = tile.split_at(TILE_BYTES / 2);
            for (right, half) in right.chunks_exact_mut(TILE_BYTES / 2).zip([high, &[0; TILE_BYTES / 2], low, high]) {
                right.copy_from_slice(half);
            }
        }
        return;
    }
    for (index, left) in left[..tiles * 4].iter().enumerate() {
        let (tile, group) = (index / 4, index % 4);
        left_to_right(path, &mut right[(group * tiles + tile) * TILE_BYTES..][..TILE_BYTES], left);
    }
}

/// 16 elements of the width as the rows of a right tile that is contracted along the block's rows.
fn transpose(path: Path, shape: Shape, out: &mut [i8], right: &[i8], group: usize, slice: usize) {
    let (columns, slices) = (shape.columns(), shape.slices());
    // Packed, the second tile is `[low | high]`.
    let (slice, group) = if shape.packed { (1, (1 - slice) * 2 + group) } else { (slice, group) };
    let source =
        [0, 1, 2, 3].map(|rows| &right[((rows * columns + group / 4) * slices + slice) * TILE_BYTES..][..TILE_BYTES]);
    transpose_tile(path, out, source, group % 4);
}

/// A block's right tiles as right tiles contracted along rows: 16 elements of the width.
pub(super) fn store_transposed_right(path: Path, shape: Shape, group: usize, out: &mut [i8], right: &[i8]) {
    for slice in 0..shape.slices() {
        transpose(path, shape, &mut out[slice * TILE_BYTES..][..TILE_BYTES], right, group, slice);
    }
}

/// A block's right tiles as a left operand whose rows are the width.
pub(super) fn store_transposed_left(path: Path, shape: Shape, out: &mut [i8], right: &[i8]) {
    let mut tile = [0i8; TILE_BYTES];
    for slice in 0..shape.slices() {
        for group in 0..shape.groups() {
            transpose(path, shape, &mut tile, right, group, slice);
            let out = &mut out[(slice * shape.groups() + group) * TILE_BYTES..][..TILE_BYTES];
            // The reordering of a tile is its own inverse.
            left_to_right(path, out, &tile);
        }
    }
}

/// Largest magnitudes of the rows of adjacent heads, in memory order: the next pass finds the rows
/// in the cache.
pub(super) fn row_maxima(path: Path, most: &mut [[u32; ROWS]], source: BlockRows, width: usize) {
    match width {
        32 => maxima::<32>(path, most, source, width),
        64 => maxima::<64>(path, most, source, width),
        128 => maxima::<128>(path, most, source, width),
        _ => maxima::<0>(path, most, source, width),
    }
}

multiversion! {
    /// `WIDTH` is the width if known at compile time, so a row is a few vectors, or zero.
    fn maxima<_F, const WIDTH: usize>(most: &mut [[u32; ROWS]], source: BlockRows, width: usize) {
        let width = if WIDTH == 0 { width } else { WIDTH };
        for row in 0..source.rows {
            let mut rest = source.run(row, width, most.len());
            for most in &mut *most {
                let (x, after) = rest.split_at(width);
                most[row] = x.iter().fold(0, |most, &x| most.max(magnitude_bits(x)));
                rest = after;
            }
        }
        for most in most {
            most[source.rows..].fill(0);
        }
    }
}

multiversion! {
    /// Slices the rows of a left block; missing rows get scale zero.
    fn slice_rows<_F, const SLICES: usize>(left: &mut [i8], scales: &mut [f32; ROWS], source: BlockRows, width: usize, most: &[u32; ROWS], bias: i8) {
        let profile = if SLICES == 2 { Profile::X2 } else { Profile::X3 };
        let mut multipliers = [0.0; ROWS];
        // All scales at once, to hide the latency of the two divisions per row.
        for row in 0..ROWS {
            let quantiser = Quantiser::of(profile, most[row]);
            (scales[row], multipliers[row]) = (quantiser.scale, quantiser.multiplier);
        }
        let (lines, _) = left.as_chunks_mut::<TILE_DEPTH>();
        for (column, lines) in (0..width).step_by(TILE_DEPTH).zip(lines.chunks_exact_mut(SLICES * ROWS)) {
            for (row, &multiplier) in multipliers.iter().enumerate().take(source.rows) {
                let x = &source.row(row, width)[column..];
                let mut bytes = [[bias; TILE_DEPTH]; SLICES];
                // A multiplier of zero (only tiny numbers, or a non-finite one) gives zeros.
                if multiplier == 0.0 {
                } else if let Some(x) = x.first_chunk::<TILE_DEPTH>() {
                    bytes = quantise_row::<SLICES, TILE_DEPTH>(x, multiplier, bias);
                } else if let Some(x) = x.as_array::<{ TILE_DEPTH / 2 }>() {
                    let half = quantise_row::<SLICES, { TILE_DEPTH / 2 }>(x, multiplier, bias);
                    for slice in 0..SLICES {
                        bytes[slice][..TILE_DEPTH / 2].copy_from_slice(&half[slice]);
                    }
                } else {
                    let mut last = [0.0; TILE_DEPTH];
                    last[..x.len()].copy_from_slice(x);
                    bytes = quantise_row::<SLICES, TILE_DEPTH>(&last, multiplier, bias);
                }
                for slice in 0..SLICES {
                    lines[slice * ROWS + row] = bytes[slice];
                }
            }
        }
    }
}

multiversion! {
    /// `slice_rows` for packed heads: both slices of a row in one line.
    fn pack_rows<_F>(left: &mut [i8], scales: &mut [f32; ROWS], source: BlockRows, width: usize, most: &[u32; ROWS], bias: i8) {
        let mut multipliers = [0.0; ROWS];
        for row in 0..ROWS {
            let quantiser = Quantiser::of(Profile::X2, most[row]);
            (scales[row], multipliers[row]) = (quantiser.scale, quantiser.multiplier);
        }
        let (halves, _) = left.as_chunks_mut::<PACKED>();
        let (lines, _) = halves.as_chunks_mut::<2>();
        for (row, &multiplier) in multipliers.iter().enumerate().take(source.rows) {
            let x = source.row(row, width);
            lines[row] = if multiplier == 0.0 {
                [[bias; PACKED]; 2]
            } else if let Some(x) = x.as_array::<PACKED>() {
                quantise_row::<2, PACKED>(x, multiplier, bias)
            } else {
                let mut padded = [0.0; PACKED];
                padded[..width].copy_from_slice(x);
                quantise_row::<2, PACKED>(&padded, multiplier, bias)
            };
        }
    }
}

/// `Quantiser::quantise` for a chunk whose multiplier is zero if it holds anything non-finite.
#[inline(always)]
pub(super) fn quantise_finite<const SLICES: usize>(x: f32, multiplier: f32) -> i32 {
    if SLICES == 2 {
        // A non-finite chunk gives arbitrary integers here; its scale is NaN regardless.
        round_small(x * multiplier)
    } else {
        let scaled = x * multiplier;
        let scaled = if scaled.is_nan() { 0.0 } else { scaled };
        // SAFETY: not NaN, and a row's multiplier brings its largest magnitude to at most 127·65536
        // and half a step, far inside 32 bits.
        unsafe { round_half_even(scaled).to_int_unchecked::<i32>() }
    }
}

/// Byte `slice` of an integer's split, in the low bits of the result.
#[inline(always)]
pub(super) fn slice_of<const SLICES: usize>(q: i32, slice: usize) -> i32 {
    // Rounding the lower slices into the upper ones is the split of `numerics::slices`; low bytes
    // need no correction.
    match SLICES - 1 - slice {
        0 => q,
        1 => (q + 128) >> 8,
        _ => (((q + 128) >> 8) + 128) >> 8,
    }
}

/// Slices of a row of weights: `N` bytes per slice, exclusive-or'ed with the bias of left operands.
#[inline(always)]
pub(super) fn quantise_row<const SLICES: usize, const N: usize>(
    x: &[f32; N],
    multiplier: f32,
    bias: i8,
) -> [[i8; N]; SLICES] {
    let mut integers = [0i32; N];
    for lane in 0..N {
        integers[lane] = quantise_finite::<SLICES>(x[lane], multiplier);
    }
    let mut bytes = [[0i8; N]; SLICES];
    for slice in 0..SLICES {
        for lane in 0..N {
            bytes[slice][lane] = slice_of::<SLICES>(integers[lane], slice) as i8 ^ bias;
        }
    }
    bytes
}

/// 32 places of a row of weights.
#[inline(always)]
fn places(values: &[f32], at: usize) -> &[f32; 32] {
    let Some(places) = values[at..].first_chunk::<32>() else { unreachable!("32 places of a tile's row") };
    places
}

/// Words as the bytes of right tiles.
pub(super) fn as_tiles(words: &[u32]) -> &[i8] {
    // SAFETY: four bytes each, no padding, every bit pattern is valid, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), 4 * words.len()) }
}

multiversion! {
    /// A tile of weights, rows multiplied by `factors`, as right tiles contracted along its rows:
    /// columns `first..first + 32` of `values[128][128]` become `[2 × 16][row column][slice]`, for
    /// the row columns named.
    pub(super) fn pack_columns<_F, const SLICES: usize>(
        tiles: &mut [u32],
        values: &[f32],
        first: usize,
        row_columns: Range<usize>,
        factors: &[f32; 128],
        multipliers: &[f32; 32],
    ) {
        let (groups, _) = tiles.as_chunks_mut::<TILE_ROWS>();
        for group in row_columns.start * 16..row_columns.end * 16 {
            let row = group * 4;
            let (f0, f1, f2, f3) = (factors[row], factors[row + 1], factors[row + 2], factors[row + 3]);
            let at = row * 128 + first;
            let (r0, r1) = (places(values, at), places(values, at + 128));
            let (r2, r3) = (places(values, at + 256), places(values, at + 384));
            let mut words = [[0u32; 32]; SLICES];
            // All four rows of a column at once, so the loop over columns is vectorized.
            for column in 0..32 {
                let m = multipliers[column];
                let q0 = quantise_finite::<SLICES>(r0[column] * f0, m);
                let q1 = quantise_finite::<SLICES>(r1[column] * f1, m);
                let q2 = quantise_finite::<SLICES>(r2[column] * f2, m);
                let q3 = quantise_finite::<SLICES>(r3[column] * f3, m);
                for slice in 0..SLICES {
                    words[slice][column] = (slice_of::<SLICES>(q0, slice) as u32 & 0xff)
                        | (slice_of::<SLICES>(q1, slice) as u32 & 0xff) << 8
                        | (slice_of::<SLICES>(q2, slice) as u32 & 0xff) << 16
                        | (slice_of::<SLICES>(q3, slice) as u32) << 24;
                }
            }
            for slice in 0..SLICES {
                for block in 0..2 {
                    let out = &mut groups[((block * 2 + group / 16) * SLICES + slice) * 16 + group % 16];
                    // Byte `i` of a group of four is row `i`, on every machine.
                    for column in 0..TILE_ROWS {
                        out[column] = words[slice][block * TILE_ROWS + column].to_le();
                    }
                }
            }
        }
    }
}
