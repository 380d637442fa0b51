//! Slice product on the CPU: which blocks are computed by whom and when (`op/product.rs` says what).
//!
//! One loop nest serves the three forms. Rows are taken in super-blocks of 512 so that one chunk of the left operand stays in
//! the second-level cache; for a group of right panels of 32 columns, chunks ascend (the order of the fold), and for each
//! panel all row blocks pass by. Threads own panels, or rows where panels are few; nobody shares an output element.

use super::block::{LeftView, Prepared, RightView, Sums, block_sums};
use super::path::{Path, multiversion};
use super::pool::{SharedMut, share};
use super::slices::{
    BLOCK, CHUNK_TILES, LeftLayout, LeftMut, SlicedRows, SlicedWeight, TILE_BYTES, TILE_DEPTH, TILE_ROWS, fill_left,
    right_block_bytes, right_tile, row_scales, slices_of, turn_tile,
};
use crate::buffer::Workspace;
use crate::op::{Product, SliceShape, token_blocks};
use crate::{Cpu, Element, Matrix, StoredMatrix};
use isobit_numerics::slices::{CHUNK, Profile, Scale, magnitude_bits};
use std::ops::Range;

/// Rows whose left slices are worked on together.
pub(super) const SUPER_BLOCK: usize = 512;
/// Right panels that pass all chunks before the next ones: their outputs stay in the second-level cache meanwhile.
const PANEL_GROUP: usize = 8;

/// Bytes a product needs beside its operands: bounded by the widths, whatever the number of rows.
pub(super) fn workspace(cpu: &Cpu, p: &Product) -> usize {
    let rows = (0..p.weights()).map(|e| p.segments[e + 1] - p.segments[e]).max().unwrap_or(0).min(SUPER_BLOCK);
    let left = SliceShape { rows, width: p.n, profile: p.profile };
    let scales = 2 * Workspace::bytes::<f32>(p.n);
    let grad_input = Workspace::bytes::<i8>(LeftLayout::new(left).bytes())
        + Workspace::bytes::<f32>(rows * p.n.div_ceil(CHUNK))
        + Workspace::bytes::<f32>(p.n);
    let columns = SliceShape { rows: p.n, width: CHUNK, profile: p.profile };
    let grad_weight = Workspace::bytes::<i8>(LeftLayout::new(columns).bytes())
        + Workspace::bytes::<f32>(p.n)
        + Workspace::bytes::<i8>(p.k.div_ceil(TILE_ROWS) * right_block_bytes(CHUNK, p.profile))
        + Workspace::bytes::<f32>(p.k);
    scales + cpu.threads() * panel_bytes(p.profile) + grad_input.max(grad_weight)
}

/// Room for one right panel over one chunk, and the tiles it is turned from.
pub(super) fn panel_bytes(profile: Profile) -> usize {
    2 * CHUNK_TILES * profile.slice_count() * TILE_BYTES + turn_bytes(profile)
}

/// Sixteen-row tiles that a turned panel reads when the weight is stored: 32 row blocks, one tile column.
fn turn_bytes(profile: Profile) -> usize {
    CHUNK / TILE_ROWS * profile.slice_count() * TILE_BYTES
}

/// Left operand of a loop nest.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) tiles: &'a [i8],
    pub(super) layout: LeftLayout,
    /// `[rows, chunks]`
    pub(super) units: &'a [f32],
    pub(super) chunks: usize,
}

/// How sums become output.
#[derive(Clone, Copy)]
pub(super) struct Fold<'a> {
    /// Start from what the output holds instead of zero.
    pub(super) accumulate: bool,
    /// Right units of the one chunk there is (weight gradient).
    pub(super) chunk_units: Option<&'a [f32]>,
    /// Right units applied after the last chunk (forward).
    pub(super) row_units: Option<&'a [f32]>,
}

/// The shape of a loop nest: `out[first_row.., n] ← left[first_row.., contraction] · right`.
pub(super) struct Nest {
    pub(super) rows: Range<usize>,
    pub(super) n: usize,
    pub(super) contraction: usize,
    pub(super) profile: Profile,
}

/// Where a nest gets its right operand from.
pub(super) trait Panels: Sync {
    /// The panel of up to 32 columns from `first` over one chunk, made in the thread's own room if it must be made.
    fn panel<'s>(&'s self, path: Path, own: &'s mut [i8], chunk: usize, first: usize) -> RightView<'s>;
}

pub(super) fn run(
    cpu: &Cpu,
    out: &mut [f32],
    left: Left,
    nest: &Nest,
    fold: Fold,
    scratch: &mut [i8],
    panels_of: &impl Panels,
) {
    run_where(cpu, out, left, nest, fold, scratch, panels_of, &|_| true);
}

/// As [`run`], leaving alone the row blocks that are not `wanted`.
pub(super) fn run_where(
    cpu: &Cpu,
    out: &mut [f32],
    left: Left,
    nest: &Nest,
    fold: Fold,
    scratch: &mut [i8],
    panels_of: &impl Panels,
    wanted: &(impl Fn(Range<usize>) -> bool + Sync),
) {
    let path = cpu.path;
    let panels = nest.n.div_ceil(BLOCK);
    let row_blocks = nest.rows.len().div_ceil(BLOCK);
    // Few panels (narrow outputs): threads share the rows instead.
    let by_rows = panels < 2 * cpu.threads() && row_blocks > panels;
    let scratch_each = scratch.len() / cpu.threads();
    let (out, scratch) = (SharedMut::new(out), SharedMut::new(scratch));
    cpu.pool.run(|worker| {
        let (my_panels, my_rows) = if by_rows {
            let blocks = share(nest.rows.len(), BLOCK, cpu.threads(), worker);
            (0..panels, nest.rows.start + blocks.start..nest.rows.start + blocks.end)
        } else {
            (share(panels, 1, cpu.threads(), worker), nest.rows.clone())
        };
        if my_panels.is_empty() || my_rows.is_empty() {
            return;
        }
        #[cfg(target_arch = "x86_64")]
        let _session = (path == Path::Amx).then(super::amx::Session::start);
        // SAFETY: each thread has its own part.
        let own = unsafe { scratch.slice(worker * scratch_each..(worker + 1) * scratch_each) };
        let place = Place { out: &out, stride: nest.n, origin: 0 };
        part(
            &mut Worker::new(path, nest.profile, own),
            &place,
            left,
            nest,
            fold,
            panels_of,
            my_panels,
            my_rows,
            wanted,
        );
    });
}

/// Where a nest's output lies: element `(row, column)` at `row·stride + column − origin`.
pub(super) struct Place<'a> {
    pub(super) out: &'a SharedMut<'a, f32>,
    pub(super) stride: usize,
    pub(super) origin: usize,
}

/// What a thread works with: a block's sums, what it prepared of the right panel, room to make panels in.
pub(super) struct Worker<'a> {
    path: Path,
    sums: Sums,
    prepared: Prepared,
    own: &'a mut [i8],
}

impl<'a> Worker<'a> {
    pub(super) fn new(path: Path, profile: Profile, own: &'a mut [i8]) -> Self {
        Self { path, sums: Sums::new(), prepared: Prepared::new(path, profile), own }
    }
}

/// One thread's part of a nest. Row blocks that are not `wanted` are left alone. On AMX the caller holds a session.
pub(super) fn part(
    worker: &mut Worker,
    place: &Place,
    left: Left,
    nest: &Nest,
    fold: Fold,
    panels_of: &impl Panels,
    my_panels: Range<usize>,
    my_rows: Range<usize>,
    wanted: &impl Fn(Range<usize>) -> bool,
) {
    let Worker { path, sums, prepared, own } = worker;
    let path = *path;
    let chunks = nest.contraction.div_ceil(CHUNK);
    for group in my_panels.clone().step_by(PANEL_GROUP) {
        let group = group..(group + PANEL_GROUP).min(my_panels.end);
        for (chunk, index) in (0..chunks).flat_map(|chunk| group.clone().map(move |index| (chunk, index))) {
            let columns = CHUNK.min(nest.contraction - chunk * CHUNK).div_ceil(TILE_DEPTH);
            let first_column = index * BLOCK;
            let width = BLOCK.min(nest.n - first_column);
            let right = panels_of.panel(path, own, chunk, first_column);
            prepared.prepare(path, right, columns, nest.profile);
            for row in my_rows.clone().step_by(BLOCK) {
                let rows = BLOCK.min(my_rows.end - row);
                if !wanted(row..row + rows) {
                    continue;
                }
                let target = Target {
                    out: place.out,
                    at: row * place.stride + first_column - place.origin,
                    stride: place.stride,
                    rows,
                    width,
                    from_zero: chunk == 0 && !fold.accumulate,
                    left_units: &left.units[row * left.chunks + chunk..],
                    left_stride: left.chunks,
                    chunk_units: fold.chunk_units.map(|units| &units[first_column..first_column + width]),
                    row_units: fold
                        .row_units
                        .filter(|_| chunk + 1 == chunks)
                        .map(|units| &units[first_column..first_column + width]),
                };
                target.prefetch();
                let view = LeftView {
                    bytes: &left.tiles[chunk * CHUNK_TILES * left.layout.column_stride() + row * TILE_DEPTH..],
                    column_stride: left.layout.column_stride(),
                    slice_stride: left.layout.slice_stride(),
                };
                block_sums(path, sums, view, rows, right, prepared, columns, nest.profile);
                match nest.profile {
                    Profile::X2 => fold_block::<2>(path, sums, &target),
                    Profile::X3 => fold_block::<3>(path, sums, &target),
                }
            }
        }
    }
}

/// One block of output and what folds into it.
struct Target<'a> {
    out: &'a SharedMut<'a, f32>,
    at: usize,
    stride: usize,
    rows: usize,
    width: usize,
    from_zero: bool,
    left_units: &'a [f32],
    left_stride: usize,
    chunk_units: Option<&'a [f32]>,
    row_units: Option<&'a [f32]>,
}

impl Target<'_> {
    /// Asks for the output's cache lines while the block's sums are being formed.
    fn prefetch(&self) {
        for row in 0..self.rows {
            let at = self.at + row * self.stride;
            self.out.prefetch(at);
            self.out.prefetch(at + self.width - 1);
        }
    }
}

/// The chunk's value from its exact sums.
#[inline(always)]
pub(super) fn chunk_value<F: isobit_numerics::Fma, const PLANES: usize>(sums: [i32; 3]) -> f32 {
    if PLANES == 2 {
        ((sums[0] << 8) + sums[1]) as f32
    } else {
        F::fma(sums[0] as f32, 65536.0, F::fma(sums[1] as f32, 256.0, sums[2] as f32))
    }
}

multiversion! {
    fn fold_block<F, const PLANES: usize>(sums: &Sums, target: &Target) {
        let padded = |units: Option<&[f32]>| {
            let mut row = [1.0f32; BLOCK];
            if let Some(units) = units {
                row[..units.len()].copy_from_slice(units);
            }
            row
        };
        let (chunk_units, row_units) = (padded(target.chunk_units), padded(target.row_units));
        // ORDER: one fused multiply-add per chunk, then the weight's unit. A missing right unit is 1, which changes nothing.
        let fold_row = |out: &mut [f32; BLOCK], row: usize| {
            let left = target.left_units[row * target.left_stride];
            let [first, second, third] = [&sums.0[0][row], &sums.0[1][row], &sums.0[2][row]];
            for column in 0..BLOCK {
                let v = chunk_value::<F, PLANES>([first[column], second[column], third[column]]);
                let acc = if target.from_zero { 0.0 } else { out[column] };
                out[column] = F::fma(v, left * chunk_units[column], acc) * row_units[column];
            }
        };
        for row in 0..target.rows {
            let at = target.at + row * target.stride;
            // SAFETY: the block is this thread's own.
            let out = unsafe { target.out.slice(at..at + target.width) };
            if let Ok(out) = out.try_into() {
                fold_row(out, row);
            } else {
                let mut whole = [0.0f32; BLOCK];
                whole[..out.len()].copy_from_slice(out);
                fold_row(&mut whole, row);
                out.copy_from_slice(&whole[..out.len()]);
            }
        }
    }
}

/// Splits a segment into super-blocks.
pub(super) fn super_blocks(segment: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    segment.clone().step_by(SUPER_BLOCK).map(move |start| start..(start + SUPER_BLOCK).min(segment.end))
}

pub(super) fn forward(cpu: &Cpu, y: &mut [f32], x: &SlicedRows, w: Matrix<Cpu>, p: &Product, workspace: &mut [u8]) {
    assert_eq!(x.shape, SliceShape { rows: p.rows(), width: p.k, profile: p.profile }, "left operand");
    assert_eq!(y.len(), p.rows() * p.n, "output");
    assert!(!p.accumulate, "the forward product overwrites");
    let left = Left { tiles: &x.tiles, layout: x.layout, units: &x.units, chunks: p.k.div_ceil(CHUNK) };
    let mut workspace = Workspace::new(workspace);
    let scratch = workspace.take::<i8>(cpu.threads() * panel_bytes(p.profile));
    let (units, multipliers) = (workspace.take::<f32>(p.n), workspace.take::<f32>(p.n));
    for e in 0..p.weights() {
        let segment = p.segments[e]..p.segments[e + 1];
        if segment.is_empty() || p.n == 0 {
            continue;
        }
        let right = Weight::of(cpu, w, e, p, units, multipliers);
        let fold = Fold { accumulate: false, chunk_units: None, row_units: Some(right.units()) };
        for rows in super_blocks(segment) {
            let nest = Nest { rows, n: p.n, contraction: p.k, profile: p.profile };
            run(cpu, y, left, &nest, fold, scratch, &right);
        }
    }
}

pub(super) fn grad_input(cpu: &Cpu, dx: &mut [f32], dy: &[f32], w: Matrix<Cpu>, p: &Product, workspace: &mut [u8]) {
    assert_eq!((dx.len(), dy.len()), (p.rows() * p.k, p.rows() * p.n), "gradients");
    let mut workspace = Workspace::new(workspace);
    let scratch = workspace.take::<i8>(cpu.threads() * panel_bytes(p.profile));
    let (units, multipliers) = (workspace.take::<f32>(p.n), workspace.take::<f32>(p.n));
    let rows_most = (0..p.weights()).map(|e| p.segments[e + 1] - p.segments[e]).max().unwrap_or(0).min(SUPER_BLOCK);
    let layout_most = LeftLayout::new(SliceShape { rows: rows_most, width: p.n, profile: p.profile });
    let left_tiles = workspace.take::<i8>(layout_most.bytes());
    let left_units = workspace.take::<f32>(rows_most * p.n.div_ceil(CHUNK));
    for e in 0..p.weights() {
        let segment = p.segments[e]..p.segments[e + 1];
        if segment.is_empty() || p.k == 0 {
            continue;
        }
        let right = Weight::of(cpu, w, e, p, units, multipliers);
        for rows in super_blocks(segment) {
            let shape = SliceShape { rows: rows.len(), width: p.n, profile: p.profile };
            let layout = LeftLayout::new(shape);
            let left = LeftMut { shape, layout, tiles: &mut *left_tiles, units: &mut *left_units };
            fill_left(cpu, left, &dy[rows.start * p.n..rows.end * p.n], Some(right.units()));
            let left = Left { tiles: left_tiles, layout, units: left_units, chunks: p.n.div_ceil(CHUNK) };
            let fold = Fold { accumulate: p.accumulate, chunk_units: None, row_units: None };
            let nest = Nest { rows: 0..rows.len(), n: p.k, contraction: p.n, profile: p.profile };
            let dx = &mut dx[rows.start * p.k..rows.end * p.k];
            run(cpu, dx, left, &nest, fold, scratch, &Turned(&right));
        }
    }
}

pub(super) fn grad_weight(
    cpu: &Cpu,
    dw: &mut [f32],
    dy: &[f32],
    x: &[f32],
    p: &Product,
    row_starts: &[usize],
    workspace: &mut [u8],
) {
    assert_eq!(dw.len(), p.weights() * p.n * p.k, "weight gradient");
    assert_eq!((dy.len(), x.len()), (p.rows() * p.n, p.rows() * p.k), "activations and their gradient");
    let mut workspace = Workspace::new(workspace);
    let scratch = workspace.take::<i8>(cpu.threads() * panel_bytes(p.profile));
    let shape = SliceShape { rows: p.n, width: CHUNK, profile: p.profile };
    let left_tiles = workspace.take::<i8>(LeftLayout::new(shape).bytes());
    let left_units = workspace.take::<f32>(p.n);
    let right_tiles = workspace.take::<i8>(p.k.div_ceil(TILE_ROWS) * right_block_bytes(CHUNK, p.profile));
    let right_units = workspace.take::<f32>(p.k);
    for e in 0..p.weights() {
        let segment = p.segments[e]..p.segments[e + 1];
        let dw = &mut dw[e * p.n * p.k..(e + 1) * p.n * p.k];
        for block in token_blocks(row_starts, CHUNK).filter(|block| segment.contains(&block.start)) {
            assert!(block.end <= segment.end, "row starts include the segment borders");
            let shape = SliceShape { rows: p.n, width: block.len(), profile: p.profile };
            let layout = LeftLayout::new(shape);
            columns_to_left(
                cpu,
                left_tiles,
                left_units,
                layout,
                &dy[block.start * p.n..block.end * p.n],
                p.n,
                p.n,
                p.profile,
            );
            columns_to_right(cpu, right_tiles, right_units, &x[block.start * p.k..block.end * p.k], p.k, p.profile);
            let block_bytes = right_block_bytes(block.len(), p.profile);
            let (tiles, units): (&[i8], &[f32]) = (right_tiles, right_units);
            let left = Left { tiles: left_tiles, layout, units: left_units, chunks: 1 };
            let fold = Fold { accumulate: true, chunk_units: Some(units), row_units: None };
            for rows in super_blocks(0..p.n) {
                let nest = Nest { rows, n: p.k, contraction: block.len(), profile: p.profile };
                run(cpu, dw, left, &nest, fold, scratch, &Columns { tiles, block_bytes, width: p.k });
            }
        }
    }
}

/// Activations sliced along tokens: a single chunk, tiles ready.
pub(super) struct Columns<'a> {
    pub(super) tiles: &'a [i8],
    pub(super) block_bytes: usize,
    pub(super) width: usize,
}

impl Panels for Columns<'_> {
    fn panel<'s>(&'s self, _path: Path, _own: &'s mut [i8], _chunk: usize, first: usize) -> RightView<'s> {
        let first = first / TILE_ROWS;
        let blocks = (self.width.div_ceil(TILE_ROWS) - first).min(2);
        let tiles = &self.tiles[first * self.block_bytes..(first + blocks) * self.block_bytes];
        RightView { tiles, block_stride: self.block_bytes, blocks }
    }
}

/// The right operand of one segment.
pub(super) enum Weight<'a> {
    Sliced { tiles: &'a [i8], units: &'a [f32], n: usize, k: usize, profile: Profile },
    F32(Stored<'a, f32>),
    Bf16(Stored<'a, half::bf16>),
    F16(Stored<'a, half::f16>),
}

/// A stored weight with the scales of its rows.
pub(super) struct Stored<'a, T> {
    w: &'a [T],
    units: &'a [f32],
    multipliers: &'a [f32],
    k: usize,
    profile: Profile,
}

impl<'a> Weight<'a> {
    /// Weight `e` of `w`; scales of stored rows are computed into the given room.
    pub(super) fn of(
        cpu: &Cpu,
        w: Matrix<'a, Cpu>,
        e: usize,
        p: &Product,
        units: &'a mut [f32],
        multipliers: &'a mut [f32],
    ) -> Self {
        match w {
            Matrix::Sliced(w) => {
                let SlicedWeight { shape, tiles, units } = w;
                assert_eq!(*shape, SliceShape { rows: p.n, width: p.k, profile: p.profile }, "sliced weight");
                let bytes = p.n.div_ceil(TILE_ROWS) * right_block_bytes(p.k, p.profile);
                let tiles = &tiles[e * bytes..(e + 1) * bytes];
                Self::Sliced { tiles, units: &units[e * p.n..(e + 1) * p.n], n: p.n, k: p.k, profile: p.profile }
            }
            Matrix::Stored(StoredMatrix::F32(w)) => Self::F32(Stored::of(cpu, w, e, p, units, multipliers)),
            Matrix::Stored(StoredMatrix::Bf16(w)) => Self::Bf16(Stored::of(cpu, w, e, p, units, multipliers)),
            Matrix::Stored(StoredMatrix::F16(w)) => Self::F16(Stored::of(cpu, w, e, p, units, multipliers)),
        }
    }

    pub(super) fn units(&self) -> &'a [f32] {
        match self {
            Self::Sliced { units, .. } => units,
            Self::F32(w) => w.units,
            Self::Bf16(w) => w.units,
            Self::F16(w) => w.units,
        }
    }
}

/// Rows `first..first + 32` over one chunk of their width.
impl Panels for Weight<'_> {
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
pub(super) struct Turned<'a>(pub(super) &'a Weight<'a>);

/// Columns `first..first + 32` over one chunk of the rows.
impl Panels for Turned<'_> {
    fn panel<'s>(&'s self, path: Path, own: &'s mut [i8], chunk: usize, first: usize) -> RightView<'s> {
        match self.0 {
            Weight::Sliced { tiles, n, k, profile, .. } => {
                let block_bytes = right_block_bytes(*k, *profile);
                let row_block = chunk * CHUNK / TILE_ROWS;
                let at = row_block * block_bytes + first / TILE_DEPTH * profile.slice_count() * TILE_BYTES;
                let blocks = n.div_ceil(TILE_ROWS) - row_block;
                let source =
                    Turn { tiles: &tiles[at..], block_stride: block_bytes, row_blocks: blocks, profile: *profile };
                source.panel(path, own, first, *k)
            }
            Weight::F32(w) => w.turned_panel(path, own, chunk, first),
            Weight::Bf16(w) => w.turned_panel(path, own, chunk, first),
            Weight::F16(w) => w.turned_panel(path, own, chunk, first),
        }
    }
}

impl<'a, T: Element> Stored<'a, T> {
    fn of(cpu: &Cpu, w: &'a [T], e: usize, p: &Product, units: &'a mut [f32], multipliers: &'a mut [f32]) -> Self {
        assert_eq!(w.len(), p.weights() * p.n * p.k, "stored weight");
        let w = &w[e * p.n * p.k..(e + 1) * p.n * p.k];
        {
            let multipliers = SharedMut::new(multipliers);
            cpu.pool.run_rows(units, 1, |rows, units| {
                // SAFETY: rows of different threads do not overlap.
                let multipliers = unsafe { multipliers.slice(rows.clone()) };
                row_scales(cpu.path, units, multipliers, &w[rows.start * p.k..rows.end * p.k], p.k, p.profile);
            });
        }
        Self { w, units, multipliers, k: p.k, profile: p.profile }
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

    fn turned_panel<'s>(&self, path: Path, own: &'s mut [i8], chunk: usize, first: usize) -> RightView<'s> {
        let tile_bytes = self.profile.slice_count() * TILE_BYTES;
        let (own, tiles) = own.split_at_mut(panel_bytes(self.profile) - turn_bytes(self.profile));
        let rows = self.multipliers.len();
        let row_blocks = (rows - chunk * CHUNK).min(CHUNK).div_ceil(TILE_ROWS);
        for block in 0..row_blocks {
            let tile = &mut tiles[block * tile_bytes..][..tile_bytes];
            self.tile(path, tile, chunk * CHUNK + block * TILE_ROWS, first / TILE_DEPTH);
        }
        let source = Turn { tiles, block_stride: tile_bytes, row_blocks, profile: self.profile };
        source.panel(path, own, first, self.k)
    }
}

/// Right tiles of one tile column, to be contracted along their rows.
struct Turn<'a> {
    tiles: &'a [i8],
    block_stride: usize,
    row_blocks: usize,
    profile: Profile,
}

impl Turn<'_> {
    /// The panel of columns `first..first + 32` of `width`, over up to one chunk of rows.
    fn panel<'s>(&self, path: Path, own: &'s mut [i8], first: usize, width: usize) -> RightView<'s> {
        const ZERO: [i8; TILE_BYTES] = [0; TILE_BYTES];
        let slices = self.profile.slice_count();
        let block_stride = CHUNK_TILES * slices * TILE_BYTES;
        let blocks = (width - first).div_ceil(TILE_ROWS).min(2);
        let row_blocks = self.row_blocks.min(CHUNK / TILE_ROWS);
        for block in 0..blocks {
            for (column, four) in (0..row_blocks).step_by(4).enumerate() {
                for slice in 0..slices {
                    let source = [0, 1, 2, 3].map(|i| {
                        if four + i < row_blocks {
                            &self.tiles[(four + i) * self.block_stride + slice * TILE_BYTES..][..TILE_BYTES]
                        } else {
                            &ZERO[..]
                        }
                    });
                    let out = &mut own[block * block_stride + (column * slices + slice) * TILE_BYTES..][..TILE_BYTES];
                    turn_tile(path, out, source, first % TILE_DEPTH / TILE_ROWS + block);
                }
            }
        }
        RightView { tiles: own, block_stride, blocks }
    }
}

/// Slices the columns of `x[tokens, width]` along the tokens (one chunk) into a right operand.
pub(super) fn columns_to_right(
    cpu: &Cpu,
    tiles: &mut [i8],
    units: &mut [f32],
    x: &[f32],
    width: usize,
    profile: Profile,
) {
    let tokens = x.len() / width.max(1);
    let block_bytes = right_block_bytes(tokens, profile);
    let units = SharedMut::new(units);
    cpu.pool.run_rows(&mut tiles[..width.div_ceil(TILE_ROWS) * block_bytes], block_bytes, |blocks, tiles| {
        for (block, tiles) in blocks.zip(tiles.chunks_exact_mut(block_bytes)) {
            let columns = block * TILE_ROWS..((block + 1) * TILE_ROWS).min(width);
            // SAFETY: columns of one block belong to one thread.
            let units = unsafe { units.slice(columns.clone()) };
            match profile {
                Profile::X2 => column_tiles::<2>(cpu.path, tiles, units, x, width, columns),
                Profile::X3 => column_tiles::<3>(cpu.path, tiles, units, x, width, columns),
            }
        }
    });
}

/// The same as a left operand, from rows that lie `stride` apart.
pub(super) fn columns_to_left(
    cpu: &Cpu,
    tiles: &mut [i8],
    units: &mut [f32],
    layout: LeftLayout,
    x: &[f32],
    stride: usize,
    width: usize,
    profile: Profile,
) {
    let tokens = x.len() / stride.max(1);
    let (tiles, units) = (SharedMut::new(tiles), SharedMut::new(units));
    let bias = super::slices::left_bias(cpu.path) as i8;
    cpu.pool.run_ranges(width.div_ceil(TILE_ROWS), 1, |blocks| {
        #[expect(clippy::large_stack_arrays, reason = "24 KiB, far below the stack of a thread")]
        let mut right = [0i8; 3 * CHUNK_TILES * TILE_BYTES];
        for block in blocks {
            let columns = block * TILE_ROWS..((block + 1) * TILE_ROWS).min(width);
            // SAFETY: columns of one block belong to one thread.
            let units = unsafe { units.slice(columns.clone()) };
            let bytes = right_block_bytes(tokens, profile);
            match profile {
                Profile::X2 => column_tiles::<2>(cpu.path, &mut right[..bytes], units, x, stride, columns.clone()),
                Profile::X3 => column_tiles::<3>(cpu.path, &mut right[..bytes], units, x, stride, columns.clone()),
            }
            for (index, tile) in right[..bytes].as_chunks::<TILE_BYTES>().0.iter().enumerate() {
                let at = index / layout.slices * layout.column_stride()
                    + index % layout.slices * layout.slice_stride()
                    + columns.start * TILE_DEPTH;
                // SAFETY: 16 rows of this block; the layout has padding rows past the last one.
                let left = unsafe { tiles.slice(at..at + TILE_BYTES) };
                // The reordering of a tile is its own inverse.
                super::slices::left_to_right(cpu.path, left, tile);
                if bias != 0 {
                    for byte in left.iter_mut() {
                        *byte ^= bias;
                    }
                }
            }
        }
    });
}

multiversion! {
    /// Right tiles of up to 16 columns of `x` over all its tokens (at most a chunk).
    fn column_tiles<_F, const SLICES: usize>(tiles: &mut [i8], units: &mut [f32], x: &[f32], width: usize, columns: Range<usize>) {
        let profile = if SLICES == 2 { Profile::X2 } else { Profile::X3 };
        let tokens = x.len() / width;
        let mut bits = [0u32; TILE_ROWS];
        let row = |token: usize| {
            let mut values = [0.0f32; TILE_ROWS];
            let source = &x[token * width + columns.start..token * width + columns.end];
            if let Ok(whole) = <&[f32; TILE_ROWS]>::try_from(source) {
                values = *whole;
            } else {
                values[..source.len()].copy_from_slice(source);
            }
            values
        };
        for token in 0..tokens {
            let values = row(token);
            for column in 0..TILE_ROWS {
                bits[column] = bits[column].max(magnitude_bits(values[column]));
            }
        }
        let mut multipliers = [0.0f32; TILE_ROWS];
        for column in 0..TILE_ROWS {
            let scale = Scale::of(profile, bits[column]);
            multipliers[column] = scale.multiplier;
            if column < units.len() {
                units[column] = scale.unit;
            }
        }
        let (groups, _) = tiles.as_chunks_mut::<4>();
        let (groups, _) = groups.as_chunks_mut::<TILE_ROWS>();
        for group in 0..tokens.next_multiple_of(TILE_DEPTH) / 4 {
            // Four tokens of a column make one little-endian word of its tile.
            let mut words = [[0u32; TILE_ROWS]; SLICES];
            for i in 0..4.min(tokens.saturating_sub(group * 4)) {
                let values = row(group * 4 + i);
                for column in 0..TILE_ROWS {
                    // A poisoned column holds non-finite values; its multiplier and so its integers are zero.
                    let x = if multipliers[column] == 0.0 { 0.0 } else { values[column] };
                    let slices = slices_of::<SLICES>(x * multipliers[column]);
                    for slice in 0..SLICES {
                        words[slice][column] |= u32::from(slices[slice] as u8) << (8 * i);
                    }
                }
            }
            for slice in 0..SLICES {
                let out = &mut groups[(group / 16 * SLICES + slice) * 16 + group % 16];
                for column in 0..TILE_ROWS {
                    out[column] = words[slice][column].to_le_bytes().map(|byte| byte as i8);
                }
            }
        }
    }
}
