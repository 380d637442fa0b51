//! Right operands of a loop nest, a panel of 32 columns and one chunk at a time: kept slices in
//! place, stored weights sliced on the fly, and both transposed for the input gradient, which
//! contracts along a weight's rows.

use super::block::RightView;
use super::path::{Path, prefetch};
use super::pool::SharedMut;
use super::slices::{
    CHUNK_TILES, SlicedWeight, TILE_BYTES, TILE_DEPTH, TILE_ROWS, right_block_bytes, right_tile, row_scales,
    transpose_tile,
};
use crate::cpu::CpuMemory;
use crate::op::Product;
use crate::{Cpu, Element, Matrix, StoredMatrix};
use isobit_numerics::slices::{CHUNK, Profile};

/// The source of a nest's right operand.
pub(super) trait Panels: Sync {
    /// Whether panels are built on each request.
    fn made(&self) -> bool;

    /// The panel of up to 32 columns from `first` over one chunk, built in the thread's scratch if
    /// necessary.
    fn panel<'s>(&'s self, path: Path, own: &'s mut [i8], chunk: usize, first: usize) -> RightView<'s>;
}

/// Scratch for one right panel over one chunk, and the tiles it is transposed from.
pub(super) fn panel_bytes(profile: Profile) -> usize {
    2 * CHUNK_TILES * profile.slice_count() * TILE_BYTES + transpose_bytes(profile)
}

/// Sixteen-row tiles that a transposed panel reads when the weight is stored: 32 row blocks, one
/// tile column.
fn transpose_bytes(profile: Profile) -> usize {
    CHUNK / TILE_ROWS * profile.slice_count() * TILE_BYTES
}

/// Activations sliced along tokens: a single chunk, tiles ready.
pub(super) struct Columns<'a> {
    pub(super) tiles: &'a [i8],
    pub(super) block_bytes: usize,
    pub(super) width: usize,
}

impl Panels for Columns<'_> {
    fn made(&self) -> bool {
        false
    }

    fn panel<'s>(&'s self, _path: Path, _own: &'s mut [i8], _chunk: usize, first: usize) -> RightView<'s> {
        let first = first / TILE_ROWS;
        let blocks = (self.width.div_ceil(TILE_ROWS) - first).min(2);
        let tiles = &self.tiles[first * self.block_bytes..(first + blocks) * self.block_bytes];
        RightView { tiles, block_stride: self.block_bytes, blocks }
    }
}

/// The right operand of one segment.
pub(super) enum Weight<'a> {
    Sliced { tiles: &'a [i8], scales: &'a [f32], n: usize, k: usize, profile: Profile },
    F32(Stored<'a, f32>),
    Bf16(Stored<'a, half::bf16>),
    F16(Stored<'a, half::f16>),
}

/// A stored weight with the scales of its rows.
pub(super) struct Stored<'a, T> {
    w: &'a [T],
    scales: &'a [f32],
    multipliers: &'a [f32],
    k: usize,
    profile: Profile,
}

impl<'a> Weight<'a> {
    /// Weight `e` of `w`; scales of stored rows are computed into the given scratch.
    pub(super) fn of(
        cpu: &Cpu,
        w: Matrix<'a, CpuMemory>,
        e: usize,
        p: &Product,
        scales: &'a mut [f32],
        multipliers: &'a mut [f32],
    ) -> Self {
        match w {
            Matrix::Sliced(w) => {
                let SlicedWeight { tiles, scales, .. } = w;
                let bytes = p.n.div_ceil(TILE_ROWS) * right_block_bytes(p.k, p.profile);
                let tiles = &tiles[e * bytes..(e + 1) * bytes];
                Self::Sliced { tiles, scales: &scales[e * p.n..(e + 1) * p.n], n: p.n, k: p.k, profile: p.profile }
            }
            Matrix::Stored(StoredMatrix::F32(w)) => Self::F32(Stored::of(cpu, w, e, p, scales, multipliers)),
            Matrix::Stored(StoredMatrix::Bf16(w)) => Self::Bf16(Stored::of(cpu, w, e, p, scales, multipliers)),
            Matrix::Stored(StoredMatrix::F16(w)) => Self::F16(Stored::of(cpu, w, e, p, scales, multipliers)),
        }
    }

    pub(super) fn scales(&self) -> &'a [f32] {
        match self {
            Self::Sliced { scales, .. } => scales,
            Self::F32(w) => w.scales,
            Self::Bf16(w) => w.scales,
            Self::F16(w) => w.scales,
        }
    }
}

/// Rows `first..first + 32` over one chunk of their width.
impl Panels for Weight<'_> {
    fn made(&self) -> bool {
        !matches!(self, Self::Sliced { .. })
    }

    fn panel<'s>(&'s self, path: Path, own: &'s mut [i8], chunk: usize, first: usize) -> RightView<'s> {
        match self {
            Self::Sliced { tiles, n, k, profile, .. } => {
                let block_bytes = right_block_bytes(*k, *profile);
                let blocks = (n.div_ceil(TILE_ROWS) - first / TILE_ROWS).min(2);
                let start = first / TILE_ROWS * block_bytes + chunk * CHUNK_TILES * profile.slice_count() * TILE_BYTES;
                let end = (first / TILE_ROWS + blocks) * block_bytes;
                RightView { tiles: &tiles[start..end], block_stride: block_bytes, blocks }
            }
            Self::F32(w) => w.panel(path, own, chunk, first),
            Self::Bf16(w) => w.panel(path, own, chunk, first),
            Self::F16(w) => w.panel(path, own, chunk, first),
        }
    }
}

/// A weight contracted along its rows.
pub(super) struct Transposed<'a>(pub(super) &'a Weight<'a>);

/// Columns `first..first + 32` over one chunk of the rows.
impl Panels for Transposed<'_> {
    fn made(&self) -> bool {
        true
    }

    fn panel<'s>(&'s self, path: Path, own: &'s mut [i8], chunk: usize, first: usize) -> RightView<'s> {
        match self.0 {
            Weight::Sliced { tiles, n, k, profile, .. } => {
                let block_bytes = right_block_bytes(*k, *profile);
                let row_block = chunk * CHUNK / TILE_ROWS;
                let at = row_block * block_bytes + first / TILE_DEPTH * profile.slice_count() * TILE_BYTES;
                let blocks = n.div_ceil(TILE_ROWS) - row_block;
                let source =
                    Transpose { tiles: &tiles[at..], block_stride: block_bytes, row_blocks: blocks, profile: *profile };
                source.panel(path, own, first, *k)
            }
            Weight::F32(w) => w.transposed_panel(path, own, chunk, first),
            Weight::Bf16(w) => w.transposed_panel(path, own, chunk, first),
            Weight::F16(w) => w.transposed_panel(path, own, chunk, first),
        }
    }
}

impl<'a, T: Element> Stored<'a, T> {
    fn of(cpu: &Cpu, w: &'a [T], e: usize, p: &Product, scales: &'a mut [f32], multipliers: &'a mut [f32]) -> Self {
        let w = &w[e * p.n * p.k..(e + 1) * p.n * p.k];
        {
            let multipliers = SharedMut::new(multipliers);
            cpu.pool.run_rows(scales, 1, |rows, scales| {
                // SAFETY: rows of different threads do not overlap.
                let multipliers = unsafe { multipliers.slice(rows.clone()) };
                row_scales(cpu.path, scales, multipliers, &w[rows.start * p.k..rows.end * p.k], p.k, p.profile);
            });
        }
        Self { w, scales, multipliers, k: p.k, profile: p.profile }
    }

    /// Tiles of 16 rows from `row` at tile column `column`, all slices.
    fn tile(&self, path: Path, tiles: &mut [i8], row: usize, column: usize) {
        let end = (row + TILE_ROWS).min(self.multipliers.len());
        let mut multipliers = [0.0; TILE_ROWS];
        multipliers[..end - row].copy_from_slice(&self.multipliers[row..end]);
        right_tile(path, tiles, &self.w[row * self.k..end * self.k], self.k, column, &multipliers, self.profile);
    }

    fn panel<'s>(&self, path: Path, own: &'s mut [i8], chunk: usize, first: usize) -> RightView<'s> {
        let tile_bytes = self.profile.slice_count() * TILE_BYTES;
        let block_stride = CHUNK_TILES * tile_bytes;
        let blocks = (self.multipliers.len().div_ceil(TILE_ROWS) - first / TILE_ROWS).min(2);
        let columns = (self.k - chunk * CHUNK).div_ceil(TILE_DEPTH).min(CHUNK_TILES);
        for block in 0..blocks {
            for column in 0..columns {
                let tiles = &mut own[block * block_stride + column * tile_bytes..][..tile_bytes];
                self.tile(path, tiles, first + block * TILE_ROWS, chunk * CHUNK_TILES + column);
            }
        }
        RightView { tiles: own, block_stride, blocks }
    }

    fn transposed_panel<'s>(&self, path: Path, own: &'s mut [i8], chunk: usize, first: usize) -> RightView<'s> {
        let tile_bytes = self.profile.slice_count() * TILE_BYTES;
        let (own, tiles) = own.split_at_mut(panel_bytes(self.profile) - transpose_bytes(self.profile));
        let rows = self.multipliers.len();
        let row_blocks = (rows - chunk * CHUNK).min(CHUNK).div_ceil(TILE_ROWS);
        for block in 0..row_blocks {
            let tile = &mut tiles[block * tile_bytes..][..tile_bytes];
            self.tile(path, tile, chunk * CHUNK + block * TILE_ROWS, first / TILE_DEPTH);
        }
        let source = Transpose { tiles, block_stride: tile_bytes, row_blocks, profile: self.profile };
        source.panel(path, own, first, self.k)
    }
}

/// Right tiles of one tile column, to be contracted along their rows.
struct Transpose<'a> {
    tiles: &'a [i8],
    block_stride: usize,
    row_blocks: usize,
    profile: Profile,
}

impl Transpose<'_> {
    /// Prefetches a quarter of the tiles of some row blocks: they are too far apart for the
    /// hardware prefetcher.
    fn prefetch(&self, row_blocks: std::ops::Range<usize>, quarter: usize) {
        for (row_block, slice) in row_blocks.flat_map(|b| (0..self.profile.slice_count()).map(move |slice| (b, slice)))
        {
            let at = row_block * self.block_stride + slice * TILE_BYTES + quarter * TILE_BYTES / 4;
            for line in (0..TILE_BYTES / 4).step_by(64) {
                prefetch(self.tiles.as_ptr().wrapping_add(at + line));
            }
        }
    }

    /// The panel of columns `first..first + 32` of `width`, over up to one chunk of rows.
    fn panel<'s>(&self, path: Path, own: &'s mut [i8], first: usize, width: usize) -> RightView<'s> {
        const ZERO: [i8; TILE_BYTES] = [0; TILE_BYTES];
        let slices = self.profile.slice_count();
        let block_stride = CHUNK_TILES * slices * TILE_BYTES;
        let blocks = (width - first).div_ceil(TILE_ROWS).min(2);
        let row_blocks = self.row_blocks.min(CHUNK / TILE_ROWS);
        let quarter = first % TILE_DEPTH / TILE_ROWS;
        for block in 0..blocks {
            for (column, four) in (0..row_blocks).step_by(4).enumerate() {
                self.prefetch(four + 4..(four + 8).min(row_blocks), quarter + block);
                for slice in 0..slices {
                    let source = [0, 1, 2, 3].map(|i| {
                        if four + i < row_blocks {
                            &self.tiles[(four + i) * self.block_stride + slice * TILE_BYTES..][..TILE_BYTES]
                        } else {
                            &ZERO[..]
                        }
                    });
                    let out = &mut own[block * block_stride + (column * slices + slice) * TILE_BYTES..][..TILE_BYTES];
                    transpose_tile(path, out, source, quarter + block);
                }
            }
        }
        RightView { tiles: own, block_stride, blocks }
    }
}
