//! Digest on a GPU: each group leaves the sum of its blocks, the host adds these.

use super::device::{Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::DeviceFailure;
use crate::buffer::Element;
use isobit_numerics::digest::{self, BLOCK_BYTES, Digest};

static DIGEST: Program = program!("digest");

/// Groups per multiprocessor: enough to keep it busy, few enough that making the keys does not count.
const GROUPS_EACH: usize = 8;

pub(super) fn apply<T: Element>(gpu: &Gpu, x: &GpuBuffer<T>) -> Result<Digest, DeviceFailure> {
    let bytes = x.bytes();
    let blocks = bytes.div_ceil(BLOCK_BYTES);
    let groups = blocks.min(GROUPS_EACH * gpu.device.runtime.multiprocessors().max(1));
    // Two 64-bit sums per group.
    let sums = GpuBuffer::<u32>::new(gpu, 4 * groups);
    gpu.launch(&DIGEST, "digest", Groups::each(groups), arguments![&sums, x, bytes, blocks, dimension(groups)]);
    let words = gpu.read(&sums)?;
    let number = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let pairs = words.as_chunks::<4>().0.iter().map(|&[a, b, c, d]| [number(a, b), number(c, d)]);
    Ok(digest::finish(pairs.fold([0; 2], digest::combine), bytes as u64))
}
