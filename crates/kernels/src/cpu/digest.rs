//! Digest of a buffer (`op/digest.rs`): threads take runs of whole blocks; contributions are added
//! modulo 2⁶⁴, in any order.

use super::CpuMemory;
use super::path::multiversion;
use crate::backend::{Checked, Run};
use crate::op::digest::write_pair;
use crate::op::{AnyBuffer, DigestSums};
use crate::{Buffer, Cpu, Element};
use isobit_numerics::digest::{self, BLOCK_BYTES};
use std::sync::{Mutex, PoisonError};

impl Run<DigestSums<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut DigestSums<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let sum = match op.x {
            AnyBuffer::F32(x) => tensor(self, x),
            AnyBuffer::Bf16(x) => tensor(self, x),
            AnyBuffer::F16(x) => tensor(self, x),
            AnyBuffer::U32(x) => tensor(self, x),
            AnyBuffer::U8(x) => tensor(self, x),
        };
        write_pair(op.sums, sum);
    }
}

fn tensor<T: Element>(cpu: &Cpu, x: &[T]) -> [u64; 2] {
    const { assert!(cfg!(target_endian = "little"), "memory is digested as it lies") };
    // SAFETY: elements are plain bytes without padding; length and lifetime are those of the slice.
    let bytes = unsafe { std::slice::from_raw_parts(x.as_ptr().cast::<u8>(), size_of_val(x)) };
    let sum = Mutex::new([0; 2]);
    cpu.pool.run_ranges(bytes.len(), BLOCK_BYTES, |range| {
        let first = (range.start / BLOCK_BYTES) as u64;
        let part = blocks_part(cpu.path, &bytes[range], first);
        let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
        *sum = digest::combine(*sum, part);
    });
    sum.into_inner().unwrap_or_else(PoisonError::into_inner)
}

multiversion! {
    fn blocks_part<_F>(bytes: &[u8], first: u64) -> [u64; 2] {
        digest::blocks(bytes, first)
    }
}
