//! Sums over tokens on a GPU (`docs/numerics.md`, "Sums over tokens"): an op's kernel sums single
//! blocks of tokens into the workspace, and `token_sums.cl` adds those in order.

use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::{DevicePointer, GpuBuffer, Parts};
use super::program::{Program, program};
use crate::op::{TOKEN_BLOCK, token_blocks};

static TOKEN_SUMS: Program = program!("token_sums");

/// Blocks whose sums are kept at once.
const BLOCKS_AT_ONCE: usize = 64;

fn block_count(row_starts: &[usize]) -> usize {
    token_blocks(row_starts, TOKEN_BLOCK).count()
}

pub(super) fn workspace(gpu: &Gpu, row_starts: &[usize], width: usize) -> usize {
    gpu.part::<f32>(block_count(row_starts).min(BLOCKS_AT_ONCE) * width)
}

/// Some blocks, as a kernel needs them that writes their sums, with `tiles` groups for each.
pub(super) struct Blocks<'a> {
    pub(super) sums: DevicePointer,
    pub(super) table: &'a GpuBuffer<u32>,
    pub(super) first: u32,
    pub(super) tiles: u32,
    pub(super) groups: Groups,
}

/// Adds to `result` the sums that `launch` computes.
pub(super) fn add(
    gpu: &Gpu,
    result: &mut GpuBuffer<f32>,
    row_starts: &[usize],
    workspace: &mut GpuBuffer<u8>,
    launch: impl Fn(Blocks),
) {
    let (width, count) = (result.len(), block_count(row_starts));
    let sums = Parts::new(gpu, workspace).take::<f32>(count.min(BLOCKS_AT_ONCE) * width);
    let (blocks, tiles) = (gpu.token_blocks(row_starts), width.div_ceil(GROUP));
    for first in (0..count).step_by(BLOCKS_AT_ONCE) {
        let here = (count - first).min(BLOCKS_AT_ONCE);
        let groups = Groups::each(here * tiles);
        launch(Blocks { sums, table: &blocks, first: dimension(first), tiles: dimension(tiles), groups });
        let arguments = arguments![&*result, sums, dimension(here), dimension(width)];
        gpu.launch(&TOKEN_SUMS, "token_sums", Groups::each(tiles), arguments);
    }
}
