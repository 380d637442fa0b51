//! Digest on a GPU: each group stores the sum of its blocks; the host adds these when the digest is
//! needed.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments, dimension};
use super::memory::{DevicePointer, GpuBuffer};
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::digest::PAIRS_MAX;
use crate::op::{AnyBuffer, DigestSums};
use isobit_numerics::digest::BLOCK_BYTES;

pub(super) static DIGEST: Program = program!("digest");

/// Blocks that a group processes at once: `TOGETHER` in `gpu/digest.cl`.
const TOGETHER: usize = 4;
/// Groups per multiprocessor: enough to keep it busy, few enough that generating the keys costs
/// little.
const GROUPS_EACH: usize = 8;

impl Run<DigestSums<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut DigestSums<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let (bytes, x) = (op.x.bytes(), place(&op.x));
        let blocks = bytes.div_ceil(BLOCK_BYTES);
        let groups =
            blocks.div_ceil(TOGETHER).min(GROUPS_EACH * self.device.runtime.multiprocessors().max(1)).min(PAIRS_MAX);
        self.zero(op.sums);
        self.launch(
            &DIGEST,
            "digest",
            Groups::each(groups),
            arguments![&*op.sums, x, bytes, blocks, dimension(groups)],
        );
    }
}

fn place(x: &AnyBuffer<GpuMemory>) -> DevicePointer {
    match *x {
        AnyBuffer::F32(x) => DevicePointer::from(x),
        AnyBuffer::Bf16(x) => DevicePointer::from(x),
        AnyBuffer::F16(x) => DevicePointer::from(x),
        AnyBuffer::U32(x) => DevicePointer::from(x),
        AnyBuffer::U8(x) => DevicePointer::from(x),
    }
}
