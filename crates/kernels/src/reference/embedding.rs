//! Embedding, the definition (`docs/numerics.md`, "Embedding").

use super::ReferenceMemory;
use crate::backend::{Checked, Run};
use crate::op::{EmbeddingBackward, EmbeddingForward};
use crate::{Buffer, Element, Reference, StoredMatrix};

impl Run<EmbeddingForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut EmbeddingForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        match op.table {
            StoredMatrix::F32(table) => gather(op.y, table, op.ids, op.width),
            StoredMatrix::Bf16(table) => gather(op.y, table, op.ids, op.width),
            StoredMatrix::F16(table) => gather(op.y, table, op.ids, op.width),
        }
    }
}

fn gather<T: Element>(y: &mut [f32], table: &[T], ids: &[u32], width: usize) {
    for (t, &id) in ids.iter().enumerate() {
        for c in 0..width {
            y[t * width + c] = table[id as usize * width + c].to_f32();
        }
    }
}

impl Run<EmbeddingBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut EmbeddingBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let EmbeddingBackward { dtable, dy, ids, .. } = op;
        let width = op.width;
        // ORDER: ascending tokens, so each table row sees its gradients in that order.
        for (t, &id) in ids.iter().enumerate() {
            for c in 0..width {
                dtable[id as usize * width + c] += dy[t * width + c];
            }
        }
    }
}
