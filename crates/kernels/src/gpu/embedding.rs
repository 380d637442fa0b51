//! Embedding on a GPU. The backward pass links the tokens of each id into a list, which the group
//! of its first token walks.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::{GpuBuffer, Parts};
use super::program::{Program, program};
use crate::StoredMatrix;
use crate::backend::{Checked, Run};
use crate::buffer::Element;
use crate::op::{EmbeddingBackward, EmbeddingForward};

pub(super) static EMBEDDING: Program = program!("embedding");

impl Run<EmbeddingForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut EmbeddingForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        match op.table {
            StoredMatrix::F32(table) => gather(self, "embedding_forward_f32", op.y, table, op.ids, op.width),
            StoredMatrix::Bf16(table) => gather(self, "embedding_forward_bf16", op.y, table, op.ids, op.width),
            StoredMatrix::F16(table) => gather(self, "embedding_forward_f16", op.y, table, op.ids, op.width),
        }
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
    if y.is_empty() {
        return;
    }
    let tiles = width.div_ceil(GROUP);
    let arguments = arguments![y, table, ids, table_rows(table, width), dimension(width), dimension(tiles)];
    gpu.launch(&EMBEDDING, kernel, Groups::each(ids.len() * tiles), arguments);
}

fn table_rows<T: Element>(table: &GpuBuffer<T>, width: usize) -> u32 {
    dimension(table.len() / width)
}

/// For every token, the next one with its id, and whether there is an earlier one.
pub(super) fn workspace(gpu: &Gpu, tokens: usize) -> usize {
    2 * gpu.part::<u32>(tokens)
}

impl Run<EmbeddingBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut EmbeddingBackward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        if op.dy.is_empty() {
            return;
        }
        let (tokens, tiles) = (op.ids.len(), op.width.div_ceil(GROUP));
        let [count, width, tile_count] = [tokens, op.width, tiles].map(dimension);
        let mut parts = Parts::new(self, workspace);
        let (next, later) = (parts.take::<u32>(tokens), parts.take::<u32>(tokens));
        self.launch(&EMBEDDING, "embedding_links", Groups::over(tokens), arguments![next, later, op.ids, count]);
        let rows = table_rows(op.dtable, op.width);
        let arguments = arguments![&*op.dtable, op.dy, op.ids, next, later, count, rows, width, tile_count];
        self.launch(&EMBEDDING, "embedding_backward", Groups::each(tokens * tiles), arguments);
    }
}
