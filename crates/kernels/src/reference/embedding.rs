//! Embedding, the definition (`docs/numerics.md`, "Embedding").

use crate::{Element, Reference, StoredMatrix};

pub(super) fn forward(y: &mut [f32], table: StoredMatrix<Reference>, ids: &[u32], width: usize) {
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

pub(super) fn workspace(_tokens: usize) -> usize {
    0
}

pub(super) fn backward(dtable: &mut [f32], dy: &[f32], ids: &[u32], width: usize, _workspace: &mut [u8]) {
    // ORDER: ascending tokens, so each table row sees its gradients in that order.
    for (t, &id) in ids.iter().enumerate() {
        for c in 0..width {
            dtable[id as usize * width + c] += dy[t * width + c];
        }
    }
}
