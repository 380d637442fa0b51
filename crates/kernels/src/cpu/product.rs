//! Slice product on the CPU (`op/product.rs`): its three forms as loop nests over sliced operands.

use super::CpuMemory;
use super::nest::{Epilogue, Left, LinearTerms, Nest, SUPER_BLOCK, run, run_areas, super_blocks};
use super::panels::{Columns, Transposed, Weight, panel_bytes};
use super::slices::{BLOCK, LeftLayout, LeftMut, SlicedRows, TILE_ROWS, fill_left, right_block_bytes};
use super::token_slices::{columns_to_left, columns_to_right};
use crate::backend::{Checked, Run};
use crate::buffer::Workspace;
use crate::op::{LowRank, Product, ProductForward, ProductGradInput, ProductGradWeight, SliceShape, token_blocks};
use crate::{Buffer, Cpu, Matrix};
use isobit_numerics::slices::CHUNK;
use std::ops::Range;

impl Run<ProductForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut ProductForward<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        forward(self, op.y, op.x, op.w, &op.p, workspace);
    }
}

impl Run<ProductGradInput<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut ProductGradInput<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        grad_input(self, op.dx, op.dy, op.w, &op.p, workspace);
    }
}

impl Run<ProductGradWeight<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut ProductGradWeight<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        grad_weight(self, op.dw, op.dy, op.x, &op.p, op.row_starts, workspace);
    }
}

/// Bytes of output gradients sliced together, unless a super-block is larger: narrow ones need
/// fewer rounds.
const GRADIENT_BYTES: usize = 1 << 20;

/// Rows whose output gradients are sliced together.
fn gradient_rows(p: &Product) -> usize {
    let rows = GRADIENT_BYTES / (p.n * p.profile.slice_count()).max(1);
    let longest = (0..p.weights()).map(|e| p.segments[e + 1] - p.segments[e]).max().unwrap_or(0);
    (rows / SUPER_BLOCK).max(1).saturating_mul(SUPER_BLOCK).min(longest)
}

/// Bytes a product needs besides its operands: bounded by the widths, regardless of the number of
/// rows.
pub(super) fn workspace(cpu: &Cpu, p: &Product) -> usize {
    let rows = gradient_rows(p);
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

/// The adapter's part of a linear layer.
#[derive(Clone, Copy)]
pub(super) struct Adapter<'a> {
    pub(super) u: &'a [f32],
    pub(super) factor: &'a [f32],
    pub(super) p: &'a LowRank<'a>,
}

/// The product's workspace plus the adapter's factor in panels.
pub(super) fn linear_workspace(cpu: &Cpu, p: &Product, low: Option<&LowRank>) -> usize {
    let panels = low.map_or(0, |low| Workspace::bytes::<f32>(low.width.div_ceil(BLOCK) * BLOCK * low.rank));
    panels + workspace(cpu, p)
}

/// What a linear layer adds to its product.
#[derive(Clone, Copy)]
pub(super) struct Added<'a> {
    pub(super) bias: Option<&'a [f32]>,
    pub(super) adapter: Option<Adapter<'a>>,
}

/// Bias and adapter of a linear layer, with the factor in panels of 32 columns.
fn linear_terms<'a>(cpu: &Cpu, Added { bias, adapter }: Added<'a>, workspace: &mut Workspace<'a>) -> LinearTerms<'a> {
    let Some(Adapter { u, factor, p }) = adapter else {
        return LinearTerms { bias, u: &[], rank: 0, panels: &[], alpha: 0.0 };
    };
    let panels = workspace.take::<f32>(p.width.div_ceil(BLOCK) * BLOCK * p.rank);
    cpu.pool.run_rows(panels, p.rank * BLOCK, |range, panels| {
        for (panel, panels) in range.zip(panels.chunks_exact_mut(p.rank * BLOCK)) {
            let first = panel * BLOCK;
            for (j, row) in panels.chunks_exact_mut(BLOCK).enumerate() {
                for (column, value) in row.iter_mut().enumerate() {
                    *value = if first + column < p.width { factor[p.at(j, first + column)] } else { 0.0 };
                }
            }
        }
    });
    LinearTerms { bias, u, rank: p.rank, panels, alpha: p.alpha }
}

pub(super) fn forward(
    cpu: &Cpu,
    y: &mut [f32],
    x: &SlicedRows,
    w: Matrix<CpuMemory>,
    p: &Product,
    workspace: &mut [u8],
) {
    forward_with(cpu, y, x, w, p, None, Workspace::new(workspace));
}

/// In one pass: bias and adapter are added in the epilogue of a block's last chunk.
pub(super) fn linear_forward(
    cpu: &Cpu,
    y: &mut [f32],
    x: &SlicedRows,
    w: Matrix<CpuMemory>,
    p: &Product,
    added: Added,
    workspace: &mut [u8],
) {
    let mut workspace = Workspace::new(workspace);
    let after = linear_terms(cpu, added, &mut workspace);
    forward_with(cpu, y, x, w, p, Some(after), workspace);
}

fn forward_with(
    cpu: &Cpu,
    y: &mut [f32],
    x: &SlicedRows,
    w: Matrix<CpuMemory>,
    p: &Product,
    after: Option<LinearTerms>,
    mut workspace: Workspace,
) {
    let left = Left { tiles: &x.tiles, layout: x.layout, scales: &x.scales, chunks: p.k.div_ceil(CHUNK) };
    let scratch = workspace.take::<i8>(cpu.threads() * panel_bytes(p.profile));
    let (scales, multipliers) = (workspace.take::<f32>(p.n), workspace.take::<f32>(p.n));
    let nest = Nest { left, rows: 0..p.rows(), n: p.n, contraction: p.k, profile: p.profile };
    let mut products = |weights: &[Weight], areas: &[(usize, Range<usize>)]| {
        let rows: Vec<_> = areas.iter().map(|(_, rows)| rows.clone()).collect();
        let of_area = |area: usize| {
            let right = &weights[areas[area].0];
            (right, Epilogue { accumulate: false, chunk_scales: None, row_scales: Some(right.scales()), after })
        };
        run_areas(cpu, y, &nest, &rows, scratch, &of_area, &|_| true);
    };
    let areas_of = |e: usize| super_blocks(p.segments[e]..p.segments[e + 1]);
    if let Matrix::Sliced(_) = w {
        // No per-weight preparation: all weights at once.
        let weights: Vec<_> = (0..p.weights()).map(|e| Weight::of(cpu, w, e, p, &mut [], &mut [])).collect();
        let areas: Vec<_> = (0..p.weights()).flat_map(|e| areas_of(e).map(move |rows| (e, rows))).collect();
        return products(&weights, &areas);
    }
    for e in 0..p.weights() {
        let right = Weight::of(cpu, w, e, p, scales, multipliers);
        let areas: Vec<_> = areas_of(e).map(|rows| (0, rows)).collect();
        products(&[right], &areas);
    }
}

pub(super) fn grad_input(
    cpu: &Cpu,
    dx: &mut [f32],
    dy: &[f32],
    w: Matrix<CpuMemory>,
    p: &Product,
    workspace: &mut [u8],
) {
    grad_input_with(cpu, dx, dy, w, p, None, Workspace::new(workspace));
}

/// In one pass, like [`linear_forward`].
pub(super) fn linear_grad_input(
    cpu: &Cpu,
    dx: &mut [f32],
    dy: &[f32],
    w: Matrix<CpuMemory>,
    p: &Product,
    adapter: Option<Adapter>,
    workspace: &mut [u8],
) {
    let mut workspace = Workspace::new(workspace);
    let after = linear_terms(cpu, Added { bias: None, adapter }, &mut workspace);
    grad_input_with(cpu, dx, dy, w, p, Some(after), workspace);
}

fn grad_input_with(
    cpu: &Cpu,
    dx: &mut [f32],
    dy: &[f32],
    w: Matrix<CpuMemory>,
    p: &Product,
    after: Option<LinearTerms>,
    mut workspace: Workspace,
) {
    let scratch = workspace.take::<i8>(cpu.threads() * panel_bytes(p.profile));
    let (scales, multipliers) = (workspace.take::<f32>(p.n), workspace.take::<f32>(p.n));
    let rows_most = gradient_rows(p);
    let layout_most = LeftLayout::new(SliceShape { rows: rows_most, width: p.n, profile: p.profile });
    let left_tiles = workspace.take::<i8>(layout_most.bytes());
    let left_scales = workspace.take::<f32>(rows_most * p.n.div_ceil(CHUNK));
    for e in 0..p.weights() {
        let segment = p.segments[e]..p.segments[e + 1];
        if segment.is_empty() || p.k == 0 {
            continue;
        }
        let right = Weight::of(cpu, w, e, p, scales, multipliers);
        for start in segment.clone().step_by(rows_most) {
            let rows = start..(start + rows_most).min(segment.end);
            let shape = SliceShape { rows: rows.len(), width: p.n, profile: p.profile };
            let layout = LeftLayout::new(shape);
            let left = LeftMut { shape, layout, tiles: &mut *left_tiles, scales: &mut *left_scales };
            fill_left(cpu, left, &dy[rows.start * p.n..rows.end * p.n], Some(right.scales()));
            let left = Left { tiles: left_tiles, layout, scales: left_scales, chunks: p.n.div_ceil(CHUNK) };
            // The nest numbers rows from the first of these.
            let after = after.map(|after| LinearTerms { u: &after.u[rows.start * after.rank..], ..after });
            let epilogue = Epilogue { accumulate: p.accumulate, chunk_scales: None, row_scales: None, after };
            let nest = Nest { left, rows: 0..rows.len(), n: p.k, contraction: p.n, profile: p.profile };
            let dx = &mut dx[rows.start * p.k..rows.end * p.k];
            let areas: Vec<_> = super_blocks(0..rows.len()).collect();
            let transposed = Transposed(&right);
            run_areas(cpu, dx, &nest, &areas, scratch, &|_| (&transposed, epilogue), &|_| true);
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
    let mut workspace = Workspace::new(workspace);
    let scratch = workspace.take::<i8>(cpu.threads() * panel_bytes(p.profile));
    let shape = SliceShape { rows: p.n, width: CHUNK, profile: p.profile };
    let left_tiles = workspace.take::<i8>(LeftLayout::new(shape).bytes());
    let left_scales = workspace.take::<f32>(p.n);
    let right_tiles = workspace.take::<i8>(p.k.div_ceil(TILE_ROWS) * right_block_bytes(CHUNK, p.profile));
    let right_scales = workspace.take::<f32>(p.k);
    for e in 0..p.weights() {
        let segment = p.segments[e]..p.segments[e + 1];
        let dw = &mut dw[e * p.n * p.k..(e + 1) * p.n * p.k];
        for block in token_blocks(row_starts, CHUNK).filter(|block| segment.contains(&block.start)) {
            assert!(block.end <= segment.end, "row starts include the segment borders");
            let shape = SliceShape { rows: p.n, width: block.len(), profile: p.profile };
            let layout = LeftLayout::new(shape);
            let sliced = LeftMut { shape, layout, tiles: &mut *left_tiles, scales: &mut *left_scales };
            columns_to_left(cpu, sliced, &dy[block.start * p.n..block.end * p.n], p.n);
            columns_to_right(cpu, right_tiles, right_scales, &x[block.start * p.k..block.end * p.k], p.k, p.profile);
            let block_bytes = right_block_bytes(block.len(), p.profile);
            let (tiles, scales): (&[i8], &[f32]) = (right_tiles, right_scales);
            let left = Left { tiles: left_tiles, layout, scales: left_scales, chunks: 1 };
            let epilogue = Epilogue { accumulate: true, chunk_scales: Some(scales), row_scales: None, after: None };
            for rows in super_blocks(0..p.n) {
                let nest = Nest { left, rows, n: p.k, contraction: block.len(), profile: p.profile };
                run(cpu, dw, &nest, epilogue, scratch, &Columns { tiles, block_bytes, width: p.k });
            }
        }
    }
}
