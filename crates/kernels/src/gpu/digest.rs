//! Digests on a GPU: groups leave pairs of sums, a second launch adds the pairs of each tensor. A
//! CUDA device takes all tensors in one launch, others one after another.

use super::device::{Gpu, Groups, arguments, dimension};
use super::memory::{DevicePointer, GpuBuffer};
use super::program::{Program, files, program};
use super::runtime::Language;
use super::{GpuMemory, multi_tensor};
use crate::backend::{Checked, Device, Run};
use crate::op::digest::SUM_WORDS;
use crate::op::{AnyBuffer, DigestSums};
use isobit_numerics::digest::BLOCK_BYTES;

pub(super) static DIGEST: Program = program!("digest");
pub(super) static DIGEST_MANY: Program =
    Program { name: "digest_many", text: files!("digest.cl", "digest_many.cu"), language: Language::Cuda };

/// Blocks that a group processes at once: `TOGETHER` in `gpu/digest.cl`.
const TOGETHER: usize = 4;
/// Turns of a group among many tensors: `TURNS` in `gpu/digest_many.cu`.
const TURNS: usize = 8;
/// Groups per multiprocessor for one tensor: enough to keep it busy, few enough that generating the
/// keys costs little.
const GROUPS_EACH: usize = 8;

impl Run<DigestSums<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut DigestSums<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let many = multi_tensor::serves(self);
        let groups = |x: &AnyBuffer<GpuMemory>| {
            let turns = x.bytes().div_ceil(BLOCK_BYTES).div_ceil(TOGETHER);
            if many {
                return turns.div_ceil(TURNS);
            }
            turns.min(GROUPS_EACH * self.device.runtime.multiprocessors().max(1))
        };
        let mut starts = vec![0];
        starts.extend(op.tensors.iter().scan(0, |before, x| {
            *before += groups(x);
            Some(*before)
        }));
        let all = starts[op.tensors.len()];
        // Allocated here: the op has no workspace.
        let pairs = GpuBuffer::<u32>::new(self, SUM_WORDS * all);
        let program = if many { &DIGEST_MANY } else { &DIGEST };
        if many {
            digest_many(self, &pairs, op.tensors, &starts);
        } else {
            for (x, group) in op.tensors.iter().zip(starts.windows(2)) {
                let (start, groups) = (dimension(group[0]), group[1] - group[0]);
                let (bytes, blocks) = (x.bytes(), x.bytes().div_ceil(BLOCK_BYTES));
                let arguments = arguments![&pairs, place(x), bytes, blocks, dimension(groups), start];
                self.launch(&DIGEST, "digest", Groups::each(groups), arguments);
            }
        }
        let starts = self.offsets(&starts);
        let tensors = Groups::each(op.tensors.len());
        self.launch(program, "digest_tensors", tensors, arguments![&*op.sums, &pairs, &starts]);
    }
}

fn digest_many(gpu: &Gpu, pairs: &GpuBuffer<u32>, tensors: &[AnyBuffer<GpuMemory>], starts: &[usize]) {
    let numbers = tensors.iter().flat_map(|x| [place(x).address(), x.bytes() as u64]);
    let table: Vec<u32> = numbers.flat_map(|number| [number as u32, (number >> 32) as u32]).collect();
    let (table, groups) = (gpu.upload(&table), starts[tensors.len()]);
    let arguments = arguments![pairs, &table, &gpu.offsets(starts), dimension(tensors.len())];
    gpu.launch(&DIGEST_MANY, "digest_many", Groups::each(groups), arguments);
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
