//! Product with 4-bit weights on the CPU (`op/product4.rs`). Integers are unpacked once per panel
//! and chunk and used for all rows.
//!
//! Forward, the group chunks of a chunk are added in sequence while a block of the output stays in
//! the L1 cache. The input gradient slices `dy·σ` once per group; if a weight has few rows, several
//! groups are sliced together and share one loop nest.

use super::block::{LeftView, RightView, Sums};
use super::epilogue::Target;
use super::int4::{Plan, QuantizedWeight, TRANSPOSED_BYTES, group_chunk_bytes};
use super::int4_block::{Int4Panel, column_sums, multiply_block};
use super::nest::{self, Left, Next, SUPER_BLOCK, deal, panels_together, super_blocks};
use super::path::Path;
use super::pool::SharedMut;
use super::slices::{
    self, BLOCK, CHUNK_TILES, LeftLayout, LeftMut, LeftRow, SlicedRows, TILE_BYTES, TILE_DEPTH, left_bias, slice_chunk,
};
use crate::Cpu;
use crate::buffer::Workspace;
use crate::op::product4::{CHANNELS_PER_WORD, GroupChunk, QuantizedShape};
use crate::op::{Product, SliceShape};
use isobit_numerics::slices::{CHUNK, Profile};
use std::ops::Range;

use super::CpuMemory;
pub(super) use super::int4::{quantized_bytes, quantized_weight};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{Product4Forward, Product4GradInput, Product4Rows};

impl Run<Product4Rows<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut Product4Rows<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        rows(self, op.rows, op.x, op.w, &op.p);
    }
}

impl Run<Product4Forward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut Product4Forward<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        forward(self, op.y, op.x, op.w, &op.p, workspace);
    }
}

impl Run<Product4GradInput<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut Product4GradInput<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        grad_input(self, op.dx, op.dy, op.w, &op.p, workspace);
    }
}

/// Maximum group chunks per chunk.
const PIECES_MAX: usize = CHUNK / CHANNELS_PER_WORD;

/// Slices rows with their channels in the order of their weight.
pub(super) fn rows(cpu: &Cpu, out: &mut SlicedRows, x: &[f32], w: &QuantizedWeight, p: &Product) {
    if w.shape.ordered == 0 {
        return slices::slice_rows(cpu, out, x);
    }
    let (layout, chunks) = (out.layout, p.k.div_ceil(CHUNK));
    let (tiles, scales) = (SharedMut::new(&mut out.tiles), SharedMut::new(&mut out.scales));
    let slicer = RowSlicer { path: cpu.path, tiles, layout, profile: p.profile };
    cpu.pool.run_ranges(p.rows(), 1, |range| {
        let mut gathered = [0.0; CHUNK];
        for row in range {
            let after = p.segments.partition_point(|&start| start <= row);
            let order = after.checked_sub(1).and_then(|e| w.order(e));
            let x = &x[row * p.k..][..p.k];
            // SAFETY: this thread alone has this row.
            let scales = unsafe { scales.slice(row * chunks..(row + 1) * chunks) };
            for (chunk, scale) in scales.iter_mut().enumerate() {
                let places = chunk * CHUNK..((chunk + 1) * CHUNK).min(p.k);
                let gathered = &mut gathered[..places.len()];
                match order {
                    None => gathered.copy_from_slice(&x[places]),
                    Some(order) => {
                        for (value, &channel) in gathered.iter_mut().zip(&order[places]) {
                            *value = x[channel as usize];
                        }
                    }
                }
                *scale = slicer.slice(row, chunk, gathered, None);
            }
        }
    });
}

/// Slices rows into the tiles of a left operand.
struct RowSlicer<'a> {
    path: Path,
    tiles: SharedMut<'a, i8>,
    layout: LeftLayout,
    profile: Profile,
}

impl RowSlicer<'_> {
    /// Slices one chunk of a row (times `factors`), which is the caller's own, and returns its
    /// scale.
    fn slice(&self, row: usize, chunk: usize, x: &[f32], factors: Option<&[f32]>) -> f32 {
        let (column_stride, slice_stride) = (self.layout.column_stride(), self.layout.slice_stride());
        let at = chunk * CHUNK_TILES * column_stride + row * TILE_DEPTH;
        let to = LeftRow { tiles: &self.tiles, at, column_stride, slice_stride, bias: left_bias(self.path) };
        match self.profile {
            Profile::X2 => slice_chunk::<2>(self.path, &to, x, factors),
            Profile::X3 => slice_chunk::<3>(self.path, &to, x, factors),
        }
    }
}

/// Rows of `dy` sliced at a time for a weight, and the rows of slices that gives with all groups
/// sliced together.
fn gradient_rows(w: QuantizedShape, p: &Product) -> (usize, usize) {
    let rows = (0..p.weights()).map(|e| p.segments[e + 1] - p.segments[e]).max().unwrap_or(0).min(SUPER_BLOCK);
    (rows, (rows * w.groups()).min(SUPER_BLOCK))
}

/// Groups sliced together for `rows` rows.
fn groups_together(w: QuantizedShape, rows: usize) -> usize {
    (SUPER_BLOCK / rows.max(1)).clamp(1, w.groups().max(1))
}

/// Elements of the ordered gradient buffered until they are scattered to their channels; none if
/// the channels are already in order.
fn ordered_elements(w: QuantizedShape, rows_sliced: usize) -> usize {
    if w.ordered == 0 { 0 } else { rows_sliced * w.group_size.min(w.k) }
}

fn scratch_bytes(cpu: &Cpu, w: QuantizedShape) -> usize {
    cpu.threads() * group_chunk_bytes(w).max(TRANSPOSED_BYTES)
}

pub(super) fn workspace(cpu: &Cpu, w: QuantizedShape, p: &Product) -> usize {
    let (_, sliced) = gradient_rows(w, p);
    let layout = LeftLayout::new(SliceShape { rows: sliced, width: p.n, profile: p.profile });
    Workspace::bytes::<i8>(scratch_bytes(cpu, w))
        + Workspace::bytes::<f32>(w.groups().min(SUPER_BLOCK) * p.n)
        + Workspace::bytes::<i8>(layout.bytes())
        + Workspace::bytes::<f32>(sliced * p.n.div_ceil(CHUNK))
        + Workspace::bytes::<f32>(ordered_elements(w, sliced))
}

pub(super) fn forward(
    cpu: &Cpu,
    y: &mut [f32],
    x: &SlicedRows,
    w: &QuantizedWeight,
    p: &Product,
    workspace: &mut [u8],
) {
    if p.k == 0 {
        return y.fill(0.0);
    }
    let left = Left { tiles: &x.tiles, layout: x.layout, scales: &x.scales, chunks: p.k.div_ceil(CHUNK) };
    let scratch = Workspace::new(workspace).take::<i8>(scratch_bytes(cpu, w.shape));
    let out = SharedMut::new(y);
    for e in 0..p.weights() {
        for rows in super_blocks(p.segments[e]..p.segments[e + 1]) {
            let part = Forward { cpu, out: &out, left, w, e, p };
            deal(cpu, p.n.div_ceil(BLOCK), &[rows], false, scratch, &|own, next| part.run(own, next));
        }
    }
}

struct Forward<'a> {
    cpu: &'a Cpu,
    out: &'a SharedMut<'a, f32>,
    left: Left<'a>,
    w: &'a QuantizedWeight,
    e: usize,
    p: &'a Product<'a>,
}

/// Per group chunk, the data of a chunk besides the tiles.
struct Prepared {
    bias: [[i32; BLOCK]; PIECES_MAX],
    sigma: [[f32; BLOCK]; PIECES_MAX],
}

/// The first tile of a group chunk, and its groups of four counted from there.
fn tile_and_groups(part: &GroupChunk) -> (usize, Range<usize>) {
    let first = part.channels.start % TILE_DEPTH / 4;
    (part.channels.start / TILE_DEPTH, first..first + part.channels.len() / 4)
}

impl Forward<'_> {
    /// A thread's part.
    fn run(&self, own: &mut [i8], next: Next) {
        let mut sums = Sums::new();
        let mut prepared = Prepared { bias: [[0; BLOCK]; PIECES_MAX], sigma: [[0.0; BLOCK]; PIECES_MAX] };
        let group_chunks = &self.w.plan.group_chunks;
        while let Some(nest::WorkRange { panels, rows, .. }) = next() {
            let together = panels_together(rows.len() * self.p.k * self.left.layout.slices);
            for group in panels.clone().step_by(together) {
                let group = group..(group + together).min(panels.end);
                for (chunk, panel) in
                    (0..group_chunks.len()).flat_map(|chunk| group.clone().map(move |panel| (chunk, panel)))
                {
                    self.prepare(own, &mut prepared, &group_chunks[chunk], panel * BLOCK);
                    for row in rows.clone().step_by(BLOCK) {
                        let count = BLOCK.min(rows.end - row);
                        self.block(&mut sums, own, &prepared, &group_chunks[chunk], row..row + count, panel * BLOCK);
                    }
                }
            }
        }
    }

    /// Unpacks the group chunks of a chunk for 32 outputs, in sequence.
    fn prepare(&self, own: &mut [i8], prepared: &mut Prepared, group_chunks: &[GroupChunk], first: usize) {
        let (path, width) = (self.cpu.path, BLOCK.min(self.p.n - first));
        let mut rest = own;
        for (index, part) in group_chunks.iter().enumerate() {
            let right = self.w.panel(path, rest, self.e, part, first);
            column_sums(path, &mut prepared.bias[index], right, tile_and_groups(part).1);
            let used = right.blocks * right.block_stride;
            rest = &mut rest[used..];
            let sigma = &mut prepared.sigma[index][..width];
            self.w.sigma(path, sigma, self.e, part.group, first..first + width, self.p.profile);
        }
    }

    /// Adds the group chunks of a chunk to a block of the output.
    fn block(
        &self,
        sums: &mut Sums,
        own: &[i8],
        prepared: &Prepared,
        group_chunks: &[GroupChunk],
        rows: Range<usize>,
        first: usize,
    ) {
        let Self { cpu, left, p, .. } = *self;
        let width = BLOCK.min(p.n - first);
        let mut tiles = own;
        for (index, part) in group_chunks.iter().enumerate() {
            let (tile, groups) = tile_and_groups(part);
            let block_stride = groups.end.div_ceil(TILE_DEPTH / 4) * TILE_BYTES;
            let right = RightView { tiles, block_stride, blocks: width.div_ceil(slices::TILE_ROWS) };
            tiles = &tiles[right.blocks * block_stride..];
            let chunk = part.chunk();
            let target = Target {
                out: self.out,
                at: rows.start * p.n + first,
                stride: p.n,
                rows: rows.len(),
                width,
                from_zero: part.channels.start == 0,
                left_scales: &left.scales[rows.start * left.chunks + chunk..],
                left_stride: left.chunks,
                chunk_scales: Some(&prepared.sigma[index][..width]),
                row_scales: None,
                after: None,
            };
            if part.channels.start == 0 {
                target.prefetch();
            }
            let view = LeftView {
                bytes: &left.tiles[tile * left.layout.column_stride() + rows.start * TILE_DEPTH..],
                column_stride: left.layout.column_stride(),
                slice_stride: left.layout.slice_stride(),
            };
            let panel = Int4Panel { right, bias: &prepared.bias[index], groups };
            multiply_block(cpu.path, sums, view, &panel, p.profile, &target);
        }
    }
}

pub(super) fn grad_input(
    cpu: &Cpu,
    dx: &mut [f32],
    dy: &[f32],
    w: &QuantizedWeight,
    p: &Product,
    workspace: &mut [u8],
) {
    if p.n == 0 {
        if !p.accumulate {
            dx.fill(0.0);
        }
        return;
    }
    let (_, sliced) = gradient_rows(w.shape, p);
    let mut workspace = Workspace::new(workspace);
    let scratch = workspace.take::<i8>(scratch_bytes(cpu, w.shape));
    let sigma = workspace.take::<f32>(w.shape.groups().min(SUPER_BLOCK) * p.n);
    let layout = LeftLayout::new(SliceShape { rows: sliced, width: p.n, profile: p.profile });
    let tiles = workspace.take::<i8>(layout.bytes());
    let scales = workspace.take::<f32>(sliced * p.n.div_ceil(CHUNK));
    let ordered = workspace.take::<f32>(ordered_elements(w.shape, sliced));
    for e in 0..p.weights() {
        for rows in super_blocks(p.segments[e]..p.segments[e + 1]) {
            let (dx, dy) = (&mut dx[rows.start * p.k..rows.end * p.k], &dy[rows.start * p.n..rows.end * p.n]);
            let together = groups_together(w.shape, rows.len());
            for first in (0..w.shape.groups()).step_by(together) {
                let groups = first..(first + together).min(w.shape.groups());
                let shape = SliceShape { rows: groups.len() * rows.len(), width: p.n, profile: p.profile };
                let layout = LeftLayout::new(shape);
                let sliced = LeftMut { shape, layout, tiles: &mut *tiles, scales: &mut *scales };
                slice_gradient(cpu, sliced, dy, sigma, (w, e), &groups, p);
                let left = Left { tiles, layout, scales, chunks: p.n.div_ceil(CHUNK) };
                let batch = Batch { cpu, left, w, e, p, rows: rows.len(), groups };
                batch.run(dx, ordered, scratch);
            }
        }
    }
}

/// Slices `dy·σ` for every group of a batch: row `r` of group `g` is row `g·rows + r` of the left
/// operand.
fn slice_gradient(
    cpu: &Cpu,
    out: LeftMut,
    dy: &[f32],
    sigma: &mut [f32],
    (w, e): (&QuantizedWeight, usize),
    groups: &Range<usize>,
    p: &Product,
) {
    for (sigma, group) in sigma.chunks_exact_mut(p.n).zip(groups.clone()) {
        w.sigma(cpu.path, sigma, e, group, 0..p.n, p.profile);
    }
    let (sigma, rows, chunks) = (&*sigma, dy.len() / p.n, p.n.div_ceil(CHUNK));
    let LeftMut { layout, tiles, scales, .. } = out;
    let (tiles, scales) = (SharedMut::new(tiles), SharedMut::new(scales));
    let slicer = RowSlicer { path: cpu.path, tiles, layout, profile: p.profile };
    cpu.pool.run_ranges(groups.len() * rows, 1, |range| {
        for row in range {
            let (dy, sigma) = (&dy[row % rows * p.n..][..p.n], &sigma[row / rows * p.n..][..p.n]);
            // SAFETY: this thread alone has this row.
            let scales = unsafe { scales.slice(row * chunks..(row + 1) * chunks) };
            for (chunk, ((scale, dy), sigma)) in
                scales.iter_mut().zip(dy.chunks(CHUNK)).zip(sigma.chunks(CHUNK)).enumerate()
            {
                *scale = slicer.slice(row, chunk, dy, Some(sigma));
            }
        }
    });
}

/// Some groups of one weight with their slices of `dy·σ`.
struct Batch<'a> {
    cpu: &'a Cpu,
    left: Left<'a>,
    w: &'a QuantizedWeight,
    e: usize,
    p: &'a Product<'a>,
    rows: usize,
    groups: Range<usize>,
}

impl Batch<'_> {
    fn plan(&self) -> &Plan {
        &self.w.plan
    }

    /// The places of all groups.
    fn places(&self) -> Range<usize> {
        self.plan().starts[self.groups.start]..self.plan().starts[self.groups.end]
    }

    fn run(&self, dx: &mut [f32], ordered: &mut [f32], scratch: &mut [i8]) {
        let (k, places, accumulate) = (self.p.k, self.places(), self.p.accumulate);
        let Some(order) = self.w.order(self.e) else {
            return self.products(&SharedMut::new(dx), k, 0, scratch);
        };
        let (order, width) = (&order[places.clone()], places.len());
        let ordered = &mut ordered[..self.rows * width];
        if accumulate {
            self.cpu.pool.run_rows(ordered, width, |rows, ordered| {
                for (row, ordered) in rows.zip(ordered.chunks_exact_mut(width)) {
                    for (value, &channel) in ordered.iter_mut().zip(order) {
                        *value = dx[row * k + channel as usize];
                    }
                }
            });
        }
        self.products(&SharedMut::new(ordered), width, places.start, scratch);
        self.cpu.pool.run_rows(dx, k, |rows, dx| {
            for (row, dx) in rows.zip(dx.chunks_exact_mut(k)) {
                for (value, &channel) in ordered[row * width..].iter().zip(order) {
                    dx[channel as usize] = *value;
                }
            }
        });
    }

    /// All places; place `origin` is the first column of `out`.
    fn products(&self, out: &SharedMut<f32>, stride: usize, origin: usize, scratch: &mut [i8]) {
        let starts = &self.plan().panel_starts;
        let (first, end) = (starts[self.groups.start], starts[self.groups.end]);
        let rows = 0..self.rows;
        deal(self.cpu, end - first, std::slice::from_ref(&rows), false, scratch, &|own, next| {
            let mut sums = Sums::new();
            while let Some(nest::WorkRange { panels, rows, .. }) = next() {
                let panels = &self.plan().panels[first + panels.start..first + panels.end];
                let together = panels_together(rows.len() * self.p.n * self.left.layout.slices);
                for panels in panels.chunk_by(|a, b| a.group == b.group).flat_map(|same| same.chunks(together)) {
                    for (chunk, panel) in (0..self.left.chunks).flat_map(|c| panels.iter().map(move |panel| (c, panel)))
                    {
                        let at = panel.channels.start - origin;
                        self.panel(&mut sums, own, (out, stride, at), panel, chunk, rows.clone());
                    }
                }
            }
        });
    }

    /// Adds one chunk of the outputs to a panel of places; `place` is their columns' location.
    fn panel(
        &self,
        sums: &mut Sums,
        own: &mut [i8],
        place: (&SharedMut<f32>, usize, usize),
        panel: &GroupChunk,
        chunk: usize,
        rows: Range<usize>,
    ) {
        let Self { cpu, left, p, .. } = *self;
        let (out, stride, column) = place;
        let right = self.w.transposed_panel(cpu.path, own, self.e, panel, chunk);
        let groups = 0..(p.n - chunk * CHUNK).min(CHUNK).div_ceil(4);
        let mut bias = [0; BLOCK];
        column_sums(cpu.path, &mut bias, right, groups.clone());
        let int4 = Int4Panel { right, bias: &bias, groups };
        for row in rows.clone().step_by(BLOCK) {
            let count = BLOCK.min(rows.end - row);
            let left_row = (panel.group - self.groups.start) * self.rows + row;
            let target = Target {
                out,
                at: row * stride + column,
                stride,
                rows: count,
                width: panel.channels.len(),
                from_zero: chunk == 0 && !p.accumulate,
                left_scales: &left.scales[left_row * left.chunks + chunk..],
                left_stride: left.chunks,
                chunk_scales: None,
                row_scales: None,
                after: None,
            };
            if chunk == 0 {
                target.prefetch();
            }
            multiply_block(cpu.path, sums, left.view(left_row, chunk), &int4, p.profile, &target);
        }
    }
}
