//! Digest on a GPU: each group leaves the sum of its blocks, the host adds these when it wants to know.

use super::device::{Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::BegunDigest;
use crate::buffer::Element;
use isobit_numerics::digest::BLOCK_BYTES;

static DIGEST: Program = program!("digest");

/// Groups per multiprocessor: enough to keep it busy, few enough that making the keys does not count.
const GROUPS_EACH: usize = 8;

pub(super) fn begin<T: Element>(gpu: &Gpu, x: &GpuBuffer<T>) -> BegunDigest<Gpu> {
    let bytes = x.bytes();
    let blocks = bytes.div_ceil(BLOCK_BYTES);
    let groups = blocks.min(GROUPS_EACH * gpu.device.runtime.multiprocessors().max(1));
    // Two 64-bit sums per group.
    let sums = GpuBuffer::<u32>::new(gpu, 4 * groups);
    gpu.launch(&DIGEST, "digest", Groups::each(groups), arguments![&sums, x, bytes, blocks, dimension(groups)]);
    BegunDigest::Sums { sums, bytes: bytes as u64 }
}
