//! Embedding, the definition (`docs/numerics.md`, "Embedding").

use super::ReferenceMemory;
use crate::backend::Run;
use crate::op::{EmbeddingBackward, EmbeddingForward};
use crate::{Buffer, Element, Reference, StoredMatrix};

impl Run<EmbeddingForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut EmbeddingForward<'_, ReferenceMemory>, _: &mut Buffer<u8>) {
        forward(op.y, op.table, op.ids, op.width);
    }
}

impl Run<EmbeddingBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut EmbeddingBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>) {
        backward(op.dtable, op.dy, op.ids, op.width);
    }
}

pub(super) fn forward(y: &mut [f32], table: StoredMatrix<ReferenceMemory>, ids: &[u32], width: usize) {
    fn gather<T: Element>(y: &mut [f32], table: &[T], ids: &[u32], width: usize) {
        for (t, &id) in ids.iter().enumerate() {
            for c in 0..width {
                y[t * width + c] = table[id as usize * width + c].to_f32();
            }
        }
    }
    match table {
        StoredMatrix::F32(table) => gather(y, table, ids, width),
        StoredMatrix::Bf16(table) => gather(y, table, ids, width),
        StoredMatrix::F16(table) => gather(y, table, ids, width),
    }
}

pub(super) fn backward(dtable: &mut [f32], dy: &[f32], ids: &[u32], width: usize) {
    // ORDER: ascending tokens, so each table row sees its gradients in that order.
    for (t, &id) in ids.iter().enumerate() {
        for c in 0..width {
            dtable[id as usize * width + c] += dy[t * width + c];
        }
    }
}
