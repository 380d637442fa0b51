//! The outer form of low-rank products on a CUDA device (`gpu/low_rank_outer.cu`): the factors of a
//! layer share two launches, so that small ones do not wait for each other. Other devices and
//! grouped factors use the portable kernels one by one; the bits are the same.

use super::GpuMemory;
use super::device::{Gpu, Groups, dimension};
use super::low_rank::{BLOCKS_AT_ONCE, partial_length, steps};
use super::memory::{DevicePointer, GpuBuffer, Parts};
use super::program::{Program, files};
use super::runtime::{Argument, Language};
use crate::op::{LowRank, OuterProduct, TOKEN_BLOCK, token_blocks};
use isobit_numerics::slices::Profile;

pub(super) static LOW_RANK_OUTER: Program =
    Program { name: "low_rank_outer", text: files!("low_rank_outer.cu"), language: Language::Cuda };

/// As the kernels have them: factors per launch, work items of a group, ranks and columns of one
/// that sums up blocks, and columns of one that adds up these sums.
const FACTORS: usize = 6;
const THREADS: usize = 128;
const RANKS: usize = 8;
const COLUMNS: usize = 2 * THREADS;
const SUM_COLUMNS: usize = THREADS;

pub(super) fn serves(gpu: &Gpu, p: &LowRank) -> bool {
    gpu.architecture().is_some() && p.factors() == 1
}

/// All products, with as many factors per launch as it can take.
pub(super) fn outer(gpu: &Gpu, parts: &[OuterProduct<GpuMemory>], row_starts: &[usize], workspace: &mut GpuBuffer<u8>) {
    let count = token_blocks(row_starts, TOKEN_BLOCK).count();
    let blocks = gpu.token_blocks(row_starts);
    for parts in parts.chunks(FACTORS) {
        let mut scratch = Parts::new(gpu, workspace);
        let partials: Vec<_> = parts.iter().map(|part| scratch.take::<f32>(partial_length(&part.p))).collect();
        for first in (0..count).step_by(BLOCKS_AT_ONCE) {
            let here = BLOCKS_AT_ONCE.min(count - first);
            let (table, tiles, sums) = table(parts, &partials, here);
            let launch = |kernel, groups, last: &[Argument]| {
                let arguments: Vec<Argument> = table.iter().chain(last).copied().collect();
                gpu.launch_sliced(&LOW_RANK_OUTER, kernel, Profile::X2, Groups::of(groups, THREADS), &arguments);
            };
            launch("outer_blocks", tiles, &[DevicePointer::from(&blocks).into(), dimension(first).into()]);
            launch("outer_sums", sums, &[dimension(here).into()]);
        }
    }
}

/// The factors as a kernel's first arguments, and the groups of either kernel, for `blocks` blocks.
fn table(
    parts: &[OuterProduct<GpuMemory>],
    partials: &[DevicePointer],
    blocks: usize,
) -> (Vec<Argument>, usize, usize) {
    let mut table = [[0; 16]; FACTORS];
    let (mut tiles, mut sums) = (0, 0);
    for ((row, OuterProduct { dfactor, u, x, p }), partial) in table.iter_mut().zip(parts).zip(partials) {
        let pair = |low: usize, high: usize| u64::from(dimension(low)) | u64::from(dimension(high)) << 32;
        let [u, x] = [u, x].map(|buffer| DevicePointer::from(*buffer).address());
        let (rank_step, width_step) = steps(p);
        *row = [0; 16];
        row[..4].copy_from_slice(&[partial.address(), u, x, DevicePointer::from(&**dfactor).address()]);
        row[4..6].copy_from_slice(&[pair(p.rank, p.width), pair(tiles, sums)]);
        row[6..9].copy_from_slice(&[rank_step as u64, width_step as u64, u64::from(p.alpha.to_bits())]);
        tiles += blocks * p.width.div_ceil(COLUMNS) * p.rank.div_ceil(RANKS);
        sums += p.rank * p.width.div_ceil(SUM_COLUMNS);
    }
    let mut arguments: Vec<Argument> = table.map(Argument::Descriptor).into();
    arguments.push(dimension(parts.len()).into());
    (arguments, tiles, sums)
}
