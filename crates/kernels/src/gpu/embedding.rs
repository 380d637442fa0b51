//! Embedding on a GPU. Backward links the tokens of each id into a list, which the group of its first token walks.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::{GpuBuffer, Parts};
use super::program::{Program, program};
use crate::StoredMatrix;
use crate::backend::Run;
use crate::buffer::Element;
use crate::op::{EmbeddingBackward, EmbeddingForward};

impl Run<EmbeddingForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut EmbeddingForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        forward(self, op.y, op.table, op.ids, op.width);
    }
}

impl Run<EmbeddingBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut EmbeddingBackward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>) {
        backward(self, op.dtable, op.dy, op.ids, op.width, workspace);
    }
}

static EMBEDDING: Program = program!("embedding");

pub(super) fn forward(
    gpu: &Gpu,
    y: &mut GpuBuffer<f32>,
    table: StoredMatrix<GpuMemory>,
    ids: &GpuBuffer<u32>,
    width: usize,
) {
    match table {
        StoredMatrix::F32(table) => gather(gpu, "embedding_forward_f32", y, table, ids, width),
        StoredMatrix::Bf16(table) => gather(gpu, "embedding_forward_bf16", y, table, ids, width),
        StoredMatrix::F16(table) => gather(gpu, "embedding_forward_f16", y, table, ids, width),
    }
}

fn gather<T: Element>(
    gpu: &Gpu,
    kernel: &'static str,
    y: &mut GpuBuffer<f32>,
    table: &GpuBuffer<T>,
    ids: &GpuBuffer<u32>,
    width: usize,
) {
    assert_eq!(y.len(), ids.len() * width, "one row per token");
    if y.is_empty() {
        return;
    }
    let tiles = width.div_ceil(GROUP);
    let arguments = arguments![y, table, ids, table_rows(table, width), dimension(width), dimension(tiles)];
    gpu.launch(&EMBEDDING, kernel, Groups::each(ids.len() * tiles), arguments);
}

fn table_rows<T: Element>(table: &GpuBuffer<T>, width: usize) -> u32 {
    assert!(table.len().is_multiple_of(width), "whole rows of the table");
    dimension(table.len() / width)
}

/// For every token the next one of its id, and whether there is an earlier one.
pub(super) fn workspace(gpu: &Gpu, tokens: usize) -> usize {
    2 * gpu.part::<u32>(tokens)
}

pub(super) fn backward(
    gpu: &Gpu,
    dtable: &mut GpuBuffer<f32>,
    dy: &GpuBuffer<f32>,
    ids: &GpuBuffer<u32>,
    width: usize,
    workspace: &mut GpuBuffer<u8>,
) {
    assert_eq!(dy.len(), ids.len() * width, "one row per token");
    if dy.is_empty() {
        return;
    }
    let tokens = ids.len();
    let mut parts = Parts::new(gpu, workspace);
    let (next, later) = (parts.take::<u32>(tokens), parts.take::<u32>(tokens));
    gpu.launch(&EMBEDDING, "embedding_links", Groups::over(tokens), arguments![next, later, ids, dimension(tokens)]);
    let rows = table_rows(dtable, width);
    let tiles = width.div_ceil(GROUP);
    let arguments =
        arguments![dtable, dy, ids, next, later, dimension(tokens), rows, dimension(width), dimension(tiles),];
    gpu.launch(&EMBEDDING, "embedding_backward", Groups::each(tokens * tiles), arguments);
}
