//! Tiles of chains: 8 rows by 32 columns of outputs, each the chain of its own contract, with one
//! coefficient broadcast over a row of columns. Paths with fewer registers compute a tile in
//! quarters; the order within a chain is the same.

use crate::cpu::path::{Path, Vector, multiversion};
use isobit_numerics::Fma;
use std::ops::Range;

/// Columns stored together, and columns per tile.
pub(super) const PANEL: usize = 32;
/// Rows per tile.
pub(super) const ROWS: usize = 8;

pub(super) type Tile = [[f32; PANEL]; ROWS];

pub(super) const ZERO: Tile = [[0.0; PANEL]; ROWS];

/// Coefficients: that of row `r` at depth `k` is `x[r·row + k·step]`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) x: &'a [f32],
    pub(super) row: usize,
    pub(super) step: usize,
}

/// Rows of columns: that of depth `k` starts at `x[k·stride]`.
#[derive(Clone, Copy)]
pub(super) struct Right<'a> {
    pub(super) x: &'a [f32],
    pub(super) stride: usize,
}

impl Left<'_> {
    /// The coefficients from row `first` on.
    #[inline(always)]
    pub(super) fn from(self, first: usize) -> Self {
        Self { x: &self.x[first * self.row..], ..self }
    }
}

impl Right<'_> {
    /// The columns from `first` on.
    #[inline(always)]
    pub(super) fn from(self, first: usize) -> Self {
        Self { x: &self.x[first..], ..self }
    }
}

/// Where the chains of a tile start and in which direction they run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    FromZero,
    Up,
    Down,
}

/// Continues the chains of a tile over ascending depth.
pub(super) fn chain(path: Path, tile: &mut Tile, left: Left, right: Right, depth: Range<usize>) {
    dispatch(path, tile, left, right, depth, Way::Up);
}

/// The same over descending depth.
pub(super) fn chain_down(path: Path, tile: &mut Tile, left: Left, right: Right, depth: Range<usize>) {
    dispatch(path, tile, left, right, depth, Way::Down);
}

/// Chains over `0..depth` that start from +0, whatever the tile holds.
pub(super) fn product(path: Path, tile: &mut Tile, left: Left, right: Right, depth: usize) {
    dispatch(path, tile, left, right, 0..depth, Way::FromZero);
}

fn dispatch(path: Path, tile: &mut Tile, left: Left, right: Right, depth: Range<usize>, way: Way) {
    if path.vector() == Vector::Avx512 {
        run::<true>(path, tile, left, right, depth, way);
    } else {
        run::<false>(path, tile, left, right, depth, way);
    }
}

multiversion! {
    fn run<F, const WIDE: bool>(tile: &mut Tile, left: Left, right: Right, depth: Range<usize>, way: Way) {
        if depth.is_empty() {
            return;
        }
        let last = depth.end - 1;
        assert!((ROWS - 1) * left.row + last * left.step < left.x.len(), "coefficients of all rows");
        assert!(last * right.stride + PANEL <= right.x.len(), "columns of all depths");
        let down = way == Way::Down;
        let first = if down { last } else { depth.start };
        let sign = if down { -1 } else { 1 };
        let operands = Operands {
            fresh: way == Way::FromZero,
            left: left.x[first * left.step..].as_ptr(),
            row: left.row,
            step: sign * left.step as isize,
            right: right.x[first * right.stride..].as_ptr(),
            stride: sign * right.stride as isize,
            count: depth.len(),
        };
        if WIDE {
            // SAFETY: coefficients of all rows and columns of the whole panel are inside at both
            // ends of the depth (asserted above), and so in between.
            unsafe { part::<F, ROWS, PANEL>(tile, 0, 0, operands) };
        } else {
            for row in (0..ROWS).step_by(ROWS / 2) {
                for column in (0..PANEL).step_by(PANEL / 2) {
                    // SAFETY: coefficients of all rows and columns of the whole panel, of which
                    // these are a quarter, are inside at both ends of the depth (asserted above),
                    // and so in between.
                    unsafe { part::<F, { ROWS / 2 }, { PANEL / 2 }>(tile, row, column, operands) };
                }
            }
        }
    }
}

/// The operands of [`run`] from the first depth on, in either direction.
#[derive(Clone, Copy)]
struct Operands {
    fresh: bool,
    left: *const f32,
    row: usize,
    step: isize,
    right: *const f32,
    stride: isize,
    count: usize,
}

/// # Safety
/// At every depth of the operands, the coefficients of rows `row..row + R` and columns
/// `column..column + W` are readable.
#[inline(always)]
unsafe fn part<F: Fma, const R: usize, const W: usize>(tile: &mut Tile, row: usize, column: usize, x: Operands) {
    let mut acc = [[0.0; W]; R];
    if !x.fresh {
        for r in 0..R {
            acc[r].copy_from_slice(&tile[row + r][column..column + W]);
        }
    }
    for k in 0..x.count.cast_signed() {
        // SAFETY: readable at this depth by the caller's promise; arrays of floats have the
        // alignment of a float.
        let (columns, coefficients): (&[f32; W], [f32; R]) = unsafe {
            let left = x.left.offset(k * x.step);
            let columns = x.right.offset(k * x.stride).add(column);
            (&*columns.cast(), std::array::from_fn(|r| *left.add((row + r) * x.row)))
        };
        // Columns in the outer loop, rows in the inner: a body this long is vectorised over columns
        // rather than unrolled.
        for c in 0..W {
            for r in 0..R {
                acc[r][c] = F::fma(coefficients[r], columns[c], acc[r][c]);
            }
        }
    }
    for r in 0..R {
        tile[row + r][column..column + W].copy_from_slice(&acc[r]);
    }
}

/// One step of one row's chain.
#[inline(always)]
pub(super) fn add<F: Fma>(acc: &mut [f32; PANEL], coefficient: f32, columns: &[f32; PANEL]) {
    for c in 0..PANEL {
        acc[c] = F::fma(coefficient, columns[c], acc[c]);
    }
}

/// `W` columns of a row.
#[inline(always)]
pub(super) fn columns<const W: usize>(x: &[f32], at: usize) -> &[f32; W] {
    x[at..].first_chunk().expect("a row of whole panels")
}

#[inline(always)]
pub(super) fn columns_mut<const W: usize>(x: &mut [f32], at: usize) -> &mut [f32; W] {
    x[at..].first_chunk_mut().expect("a row of whole panels")
}

/// Rows of a panel of a state, decayed. An absent state counts as zeros.
#[inline(always)]
pub(super) fn start(tile: &mut Tile, state: Option<&[f32]>, row: usize, decay: f32) {
    let Some(state) = state else {
        *tile = ZERO;
        return;
    };
    for r in 0..ROWS {
        scale(&mut tile[r], columns(state, (row + r) * PANEL), decay);
    }
}

#[inline(always)]
pub(super) fn scale(out: &mut [f32; PANEL], x: &[f32; PANEL], factor: f32) {
    for c in 0..PANEL {
        out[c] = factor * x[c];
    }
}

/// Writes a tile into rows `stride` apart.
#[inline(always)]
pub(super) fn store(tile: &Tile, out: &mut [f32], at: usize, stride: usize) {
    for (r, row) in tile.iter().enumerate() {
        *columns_mut(out, at + r * stride) = *row;
    }
}

/// `out[c·out_stride + r] = x[r·x_stride + c]` for whole blocks of 16 rows and columns.
#[inline(always)]
pub(super) fn transpose(out: &mut [f32], out_stride: usize, x: &[f32], x_stride: usize, rows: usize, width: usize) {
    const BLOCK: usize = 16;
    for row in (0..rows).step_by(BLOCK) {
        for column in (0..width).step_by(BLOCK) {
            let mut block = [[0.0; BLOCK]; BLOCK];
            for r in 0..BLOCK {
                let from: &[f32; BLOCK] = columns(x, (row + r) * x_stride + column);
                for c in 0..BLOCK {
                    block[c][r] = from[c];
                }
            }
            for c in 0..BLOCK {
                *columns_mut(out, (column + c) * out_stride + row) = block[c];
            }
        }
    }
}
