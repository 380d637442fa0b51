//! Slice product on the CPU (`op/product.rs`): its three forms as loop nests over sliced operands.

use super::columns::{columns_to_left, columns_to_right};
use super::nest::{Fold, Left, Nest, SUPER_BLOCK, run, super_blocks};
use super::panels::{Columns, Turned, Weight, panel_bytes};
use super::slices::{LeftLayout, LeftMut, SlicedRows, TILE_ROWS, fill_left, right_block_bytes};
use crate::buffer::Workspace;
use crate::op::{Product, SliceShape, token_blocks};
use crate::{Cpu, Matrix};
use isobit_numerics::slices::CHUNK;

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
