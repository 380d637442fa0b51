//! Digests of buffers, the definition (`docs/numerics.md`, "Tensor digest"): bytes are taken
//! explicitly as little-endian, so the host's byte order does not matter.

use super::{Reference, ReferenceMemory};
use crate::backend::{Checked, Run};
use crate::op::digest::{SUM_WORDS, words};
use crate::op::{AnyBuffer, DigestSums};
use crate::{Buffer, Element};
use isobit_numerics::digest;

impl Run<DigestSums<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut DigestSums<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        for (sums, x) in op.sums.as_chunks_mut::<SUM_WORDS>().0.iter_mut().zip(op.tensors) {
            let bytes = match *x {
                AnyBuffer::F32(x) => bytes(x),
                AnyBuffer::Bf16(x) => bytes(x),
                AnyBuffer::F16(x) => bytes(x),
                AnyBuffer::U32(x) => bytes(x),
                AnyBuffer::U8(x) => bytes(x),
            };
            *sums = words(digest::blocks(&bytes, 0));
        }
    }
}

fn bytes<T: Element>(x: &[T]) -> Vec<u8> {
    x.iter().flat_map(|x| x.bits().to_le_bytes().into_iter().take(size_of::<T>())).collect()
}
