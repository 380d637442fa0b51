//! Operands of attention's slice products: rows of a head as left tiles, as right tiles, or turned.
//!
//! Everything is cut into blocks of 64 rows that start at a span's first row, so a product never sees two documents. Missing
//! rows and elements are zero bytes with unit zero, wherever the block lies on the right of a product.

use crate::cpu::path::{Path, multiversion};
use crate::cpu::slices::{TILE_BYTES, TILE_DEPTH, TILE_ROWS, left_to_right, quantise_tile_row, round_small, turn_tile};
use crate::op::attention::HEAD_WIDTH_MAX;
use isobit_numerics::slices::{Profile, Scale, magnitude_bits, round_half_even};
use std::ops::Range;

/// Rows of one block: a turned block is one tile deep.
pub(super) const ROWS: usize = TILE_DEPTH;
/// Bytes of one slice of 64 rows and 64 elements.
pub(super) const SQUARE: usize = ROWS * TILE_DEPTH;

/// Sizes of one tensor's blocks.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) width: usize,
    pub(super) profile: Profile,
}

impl Shape {
    /// Tiles along the width.
    pub(super) fn columns(self) -> usize {
        self.width.div_ceil(TILE_DEPTH)
    }

    /// Groups of 16 along the width: right blocks of a turned operand.
    pub(super) fn groups(self) -> usize {
        self.width.div_ceil(TILE_ROWS)
    }

    pub(super) fn slices(self) -> usize {
        self.profile.slice_count()
    }

    /// Bytes of a block as left (`[column][slice][64 rows][64]`) or as right tiles (`[4 × 16 rows][column][slice]`).
    pub(super) fn block_bytes(self) -> usize {
        self.columns() * self.slices() * SQUARE
    }

    /// Bytes of a turned block: as right tiles `[16 of the width][slice]`, as left `[slice][width][64 rows]`.
    pub(super) fn turned_bytes(self) -> usize {
        self.groups() * self.slices() * TILE_BYTES
    }
}

/// Blocks of all spans, one after another: `starts[s]` is the first block of span `s`, the last entry the number of all.
#[derive(Clone, Copy)]
pub(super) struct Blocks<'a> {
    starts: &'a [u32],
}

impl<'a> Blocks<'a> {
    /// How many blocks ranges of these lengths have.
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

/// Where the rows of one block lie in a `[t, heads, width]` tensor.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) x: &'a [f32],
    pub(super) first_row: usize,
    /// Up to 64.
    pub(super) rows: usize,
    pub(super) head: usize,
    pub(super) heads: usize,
}

impl<'a> Source<'a> {
    pub(super) fn row(&self, row: usize, width: usize) -> &'a [f32] {
        &self.x[((self.first_row + row) * self.heads + self.head) * width..][..width]
    }
}

/// Room for one block on its way into its place.
pub(super) struct Slicer<'a> {
    path: Path,
    bias: i8,
    left: &'a mut [i8],
    right: &'a mut [i8],
}

impl<'a> Slicer<'a> {
    /// Bytes of room.
    pub(super) const ROOM: usize = 2 * HEAD_WIDTH_MAX / TILE_DEPTH * 3 * SQUARE;

    pub(super) fn new(path: Path, room: &'a mut [i8]) -> Self {
        let (left, right) = room.split_at_mut(Self::ROOM / 2);
        Self { path, bias: crate::cpu::slices::left_bias(path) as i8, left, right }
    }

    /// Slices the rows of a block; `units` are its 64 units.
    pub(super) fn load(&mut self, shape: Shape, source: Source, units: &mut [f32]) {
        let squares = shape.columns() * shape.slices();
        let units = units.as_mut_array().expect("a block has 64 units");
        match shape.profile {
            Profile::X2 => slice_rows::<2>(self.path, self.left, units, source, shape.width),
            Profile::X3 => slice_rows::<3>(self.path, self.left, units, source, shape.width),
        }
        for square in self.left.chunks_exact_mut(SQUARE).take(squares) {
            square[source.rows * TILE_DEPTH..].fill(0);
        }
    }

    /// Makes the right tiles of the loaded block, which all forms but the left one start from.
    pub(super) fn make_right(&mut self, shape: Shape) {
        let slices = shape.slices();
        let (left, _) = self.left.as_chunks::<TILE_BYTES>();
        for (index, left) in left[..shape.columns() * slices * 4].iter().enumerate() {
            let (tile, group) = (index / 4, index % 4);
            let at = (group * shape.columns() * slices + tile) * TILE_BYTES;
            left_to_right(self.path, &mut self.right[at..at + TILE_BYTES], left);
        }
    }

    pub(super) fn store_left(&self, shape: Shape, out: &mut [i8]) {
        for (out, byte) in out.iter_mut().zip(&self.left[..shape.block_bytes()]) {
            *out = byte ^ self.bias;
        }
    }

    pub(super) fn store_right(&self, shape: Shape, out: &mut [i8]) {
        out.copy_from_slice(&self.right[..shape.block_bytes()]);
    }

    /// 16 elements of the width as the rows of a right tile that is contracted along the block's rows.
    fn turn(&self, shape: Shape, out: &mut [i8], group: usize, slice: usize) {
        let (columns, slices) = (shape.columns(), shape.slices());
        let source = [0, 1, 2, 3]
            .map(|rows| &self.right[((rows * columns + group / 4) * slices + slice) * TILE_BYTES..][..TILE_BYTES]);
        turn_tile(self.path, out, source, group % 4);
    }

    /// As right tiles contracted along rows; groups of 16 lie `stride` bytes apart in `out`.
    pub(super) fn store_turned_right(&self, shape: Shape, group: usize, out: &mut [i8]) {
        for slice in 0..shape.slices() {
            self.turn(shape, &mut out[slice * TILE_BYTES..][..TILE_BYTES], group, slice);
        }
    }

    /// As a left operand whose rows are the width.
    pub(super) fn store_turned_left(&self, shape: Shape, out: &mut [i8]) {
        let mut tile = [0i8; TILE_BYTES];
        for slice in 0..shape.slices() {
            for group in 0..shape.groups() {
                self.turn(shape, &mut tile, group, slice);
                let out = &mut out[(slice * shape.groups() + group) * TILE_BYTES..][..TILE_BYTES];
                // The reordering of a tile is its own inverse.
                left_to_right(self.path, out, &tile);
                for byte in out {
                    *byte ^= self.bias;
                }
            }
        }
    }
}

multiversion! {
    /// Slices the rows of a left block; rows that are not there get unit zero. Maxima first, then all scales at once: one row's
    /// two divisions would be waited for.
    fn slice_rows<_F, const SLICES: usize>(left: &mut [i8], units: &mut [f32; ROWS], source: Source, width: usize) {
        let profile = if SLICES == 2 { Profile::X2 } else { Profile::X3 };
        let mut most = [0; ROWS];
        for (row, most) in most.iter_mut().enumerate().take(source.rows) {
            *most = source.row(row, width).iter().fold(0, |most, &x| most.max(magnitude_bits(x)));
        }
        let scales = most.map(|most| Scale::of(profile, most));
        for (unit, scale) in units.iter_mut().zip(&scales) {
            *unit = scale.unit;
        }
        for (row, scale) in scales.iter().enumerate().take(source.rows) {
            let (whole, tail) = source.row(row, width).as_chunks::<TILE_DEPTH>();
            let mut last = [0.0; TILE_DEPTH];
            if let Some(half) = tail.as_array::<{ TILE_DEPTH / 2 }>() {
                last[..TILE_DEPTH / 2].copy_from_slice(half);
            } else {
                last[..tail.len()].copy_from_slice(tail);
            }
            let last = if tail.is_empty() { None } else { Some(&last) };
            for (column, x) in whole.iter().chain(last).enumerate() {
                let bytes = quantise_tile_row::<SLICES>(x, scale.multiplier, 0);
                for slice in 0..SLICES {
                    let at = (column * SLICES + slice) * SQUARE + row * TILE_DEPTH;
                    left[at..at + TILE_DEPTH].copy_from_slice(&bytes[slice]);
                }
            }
        }
    }
}

/// `Scale::quantise` for a chunk whose multiplier is zero if it holds anything non-finite.
#[inline(always)]
pub(super) fn quantise_finite<const SLICES: usize>(x: f32, multiplier: f32) -> i32 {
    if SLICES == 2 {
        // A poisoned chunk gives any integers here; its unit is NaN, whatever they are.
        round_small(x * multiplier)
    } else {
        let scaled = x * multiplier;
        let scaled = if scaled.is_nan() { 0.0 } else { scaled };
        // SAFETY: not NaN, and |x·multiplier| is at most the limit and half a unit.
        unsafe { round_half_even(scaled).to_int_unchecked::<i32>() }
    }
}

/// Byte `slice` of an integer's split, in the low bits of the result.
#[inline(always)]
pub(super) fn slice_of<const SLICES: usize>(q: i32, slice: usize) -> i32 {
    // Rounding the lower slices into the upper ones is the split of `numerics::slices`; low bytes need no correction.
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
    /// A tile of weights, rows multiplied by `factors`, as right tiles contracted along its rows: columns
    /// `first..first + 32` of `values[128][128]` become `[2 × 16][row column][slice]`, for the row columns named.
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
            // All four rows of a column at once, so that the loop over columns is what becomes vectors.
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

/// Largest of the lanes by halves: exact in any order, this one is short.
#[inline(always)]
pub(super) fn tree_max<T: Copy>(mut lanes: [T; 32], larger: impl Fn(T, T) -> T) -> T {
    let mut half = 16;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = larger(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}
