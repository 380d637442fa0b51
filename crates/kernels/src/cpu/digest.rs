//! Digests of buffers (`op/digest.rs`): threads take runs of whole blocks of all tensors together;
//! contributions are added modulo 2⁶⁴, in any order.

use super::CpuMemory;
use super::path::multiversion;
use crate::backend::{Checked, Run};
use crate::buffer::bytes_of;
use crate::op::digest::{SUM_WORDS, words};
use crate::op::{AnyBuffer, DigestSums};
use crate::{Buffer, Cpu, Element};
use isobit_numerics::digest::{self, BLOCK_BYTES};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Blocks that a thread takes at once, at least.
const GRAIN: usize = 16;

impl Run<DigestSums<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut DigestSums<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let tensors: Vec<&[u8]> = op.tensors.iter().map(memory).collect();
        // How many blocks the tensors before each have, and all of them.
        let mut starts = vec![0];
        starts.extend(tensors.iter().scan(0, |blocks, bytes| {
            *blocks += bytes.len().div_ceil(BLOCK_BYTES);
            Some(*blocks)
        }));
        let sums = Mutex::new(vec![[0; 2]; tensors.len()]);
        self.pool.run_ranges(starts[tensors.len()], GRAIN, |range| {
            for (at, own) in parts(&starts, &range) {
                let bytes = &tensors[at][own.start * BLOCK_BYTES..];
                let part = blocks_part(self.path, &bytes[..bytes.len().min(own.len() * BLOCK_BYTES)], own.start as u64);
                let mut sums = sums.lock().unwrap_or_else(PoisonError::into_inner);
                sums[at] = digest::combine(sums[at], part);
            }
        });
        let sums = sums.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (to, sum) in op.sums.as_chunks_mut::<SUM_WORDS>().0.iter_mut().zip(sums) {
            *to = words(sum);
        }
    }
}

/// The tensors that a range of all blocks belongs to, each with its own blocks.
fn parts<'a>(starts: &'a [usize], range: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<'a> {
    let (start, end) = (range.start, range.end);
    let first = starts.partition_point(|at| *at <= start).saturating_sub(1);
    let tensors = starts.windows(2).enumerate().skip(first).take_while(move |(_, blocks)| blocks[0] < end);
    tensors.filter_map(move |(at, blocks)| {
        let own = start.max(blocks[0])..end.min(blocks[1]);
        (!own.is_empty()).then(|| (at, own.start - blocks[0]..own.end - blocks[0]))
    })
}

/// The elements of a buffer as they lie in memory.
fn memory<'a>(x: &AnyBuffer<'a, CpuMemory>) -> &'a [u8] {
    fn bytes<T: Element>(x: &[T]) -> &[u8] {
        const { assert!(cfg!(target_endian = "little"), "memory is digested as it lies") };
        bytes_of(x)
    }
    match *x {
        AnyBuffer::F32(x) => bytes(x),
        AnyBuffer::Bf16(x) => bytes(x),
        AnyBuffer::F16(x) => bytes(x),
        AnyBuffer::U32(x) => bytes(x),
        AnyBuffer::U8(x) => bytes(x),
    }
}

multiversion! {
    fn blocks_part<_F>(bytes: &[u8], first: u64) -> [u64; 2] {
        digest::blocks(bytes, first)
    }
}
