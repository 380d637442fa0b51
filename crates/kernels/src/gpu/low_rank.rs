//! Low-rank products on a GPU (`op/low_rank.rs`). The factor is read in place; only the outer
//! product needs a workspace, for the sums of single blocks of tokens.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::{DevicePointer, GpuBuffer, Parts};
use super::program::{Program, program};
use super::{low_rank_contract, low_rank_outer};
use crate::backend::{Checked, Run};
use crate::op::{Contraction, FactorLayout, LowRank, LowRankContract, LowRankExpand, LowRankOuter, OuterProduct};
use isobit_numerics::lanes::LANES;

impl Run<LowRankContract<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut LowRankContract<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        contract(self, &mut op.parts, op.x);
    }
}

impl Run<LowRankExpand<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut LowRankExpand<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        expand(self, op.y, op.u, op.factor, &op.p, workspace);
    }
}

impl Run<LowRankOuter<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut LowRankOuter<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        let serves = |part: &OuterProduct<GpuMemory>| low_rank_outer::serves(self, &part.p);
        for parts in op.parts.chunk_by_mut(|a, b| serves(a) && serves(b)) {
            if parts.iter().all(serves) {
                low_rank_outer::outer(self, parts, op.row_starts, workspace);
            } else {
                for OuterProduct { dfactor, u, x, p } in parts {
                    outer(self, dfactor, u, x, p, op.row_starts, workspace);
                }
            }
        }
    }
}

pub(super) static LOW_RANK: Program = program!("low_rank");

/// Tokens per group, `TOKENS` in `gpu/low_rank.cl`.
const TOKENS: usize = GROUP / LANES;
/// Ranks per group, `RANKS` in `gpu/low_rank.cl`.
const RANKS: usize = 8;
/// From this many tokens, a work item of `contract` processes four of them.
const TOKENS_FOR_FOUR: usize = 4096;
/// Columns per group of the outer product, `OUTER_COLUMNS` in `gpu/low_rank.cl`.
const OUTER_COLUMNS: usize = 128;
/// Blocks of tokens whose sums the outer product keeps at once.
pub(super) const BLOCKS_AT_ONCE: usize = 64;

/// Stride in a factor between ranks, and between columns.
pub(super) fn steps(p: &LowRank) -> (usize, usize) {
    match p.layout {
        FactorLayout::RankMajor => (p.width, 1),
        FactorLayout::WidthMajor => (1, p.rank),
    }
}

/// Rank, width and strides, in the kernels' format.
fn shape(p: &LowRank) -> [u32; 4] {
    let (rank_step, width_step) = steps(p);
    [p.rank, p.width, rank_step, width_step].map(|x| u32::try_from(x).expect("a width below 2³²"))
}

/// The tokens in tiles of `size` with one factor each: the number of tiles and, if there are
/// several factors, a table of them.
fn tiles(gpu: &Gpu, p: &LowRank, size: usize) -> (usize, Option<GpuBuffer<u32>>) {
    if p.factors() == 1 {
        return (p.tokens().div_ceil(size), None);
    }
    let mut table = Vec::new();
    for (factor, segment) in p.segments.windows(2).enumerate() {
        for first in (segment[0]..segment[1]).step_by(size) {
            table.extend([first, (first + size).min(segment[1]), factor]);
        }
    }
    (table.len() / 3, Some(gpu.offsets(&table)))
}

/// The table, or other memory in its place if there is none, and whether there is one.
fn table<'a>(tiles: Option<&'a GpuBuffer<u32>>, instead: &'a GpuBuffer<f32>) -> (DevicePointer, u32) {
    (tiles.map_or(DevicePointer::from(instead), DevicePointer::from), u32::from(tiles.is_some()))
}

/// Length of the sums of as many blocks as the outer product keeps at once.
pub(super) fn partial_length(p: &LowRank) -> usize {
    p.tokens().min(BLOCKS_AT_ONCE) * p.factor_length()
}

/// Of outer products that are taken together. The other forms need none.
pub(super) fn outer_workspace(gpu: &Gpu, parts: &[LowRank]) -> usize {
    parts.iter().map(|p| gpu.part::<f32>(partial_length(p))).sum()
}

/// Factors that are contracted together have the same layout and width.
pub(super) fn contract(gpu: &Gpu, parts: &mut [Contraction<GpuMemory>], x: &GpuBuffer<f32>) {
    let together = |a: &Contraction<GpuMemory>, b: &Contraction<GpuMemory>| {
        (a.p.layout, a.p.width) == (b.p.layout, b.p.width)
            && [a, b].iter().all(|of| low_rank_contract::serves(gpu, &of.p))
    };
    for parts in parts.chunk_by_mut(together) {
        if parts.iter().all(|part| low_rank_contract::serves(gpu, &part.p)) {
            low_rank_contract::contract(gpu, parts, x);
        } else {
            for Contraction { u, factor, p } in parts {
                contract_one(gpu, u, x, factor, p);
            }
        }
    }
}

fn contract_one(gpu: &Gpu, u: &mut GpuBuffer<f32>, x: &GpuBuffer<f32>, factor: &GpuBuffer<f32>, p: &LowRank) {
    let [rank, width, rank_step, width_step] = shape(p);
    let (kernel, per_item) =
        if p.tokens() >= TOKENS_FOR_FOUR { ("low_rank_contract_4", 4) } else { ("low_rank_contract_1", 1) };
    let (count, tiles) = tiles(gpu, p, TOKENS * per_item);
    let (tiles, grouped) = table(tiles.as_ref(), x);
    let groups = Groups::each(count * p.rank.div_ceil(RANKS));
    let arguments = arguments![u, x, factor, tiles, grouped, p.tokens(), rank, width, rank_step, width_step];
    gpu.launch(&LOW_RANK, kernel, groups, arguments);
}

pub(super) fn expand(
    gpu: &Gpu,
    y: &mut GpuBuffer<f32>,
    u: &GpuBuffer<f32>,
    factor: &GpuBuffer<f32>,
    p: &LowRank,
    _workspace: &mut GpuBuffer<u8>,
) {
    let [rank, width, rank_step, width_step] = shape(p);
    let (count, tiles) = tiles(gpu, p, TOKENS);
    let (tiles, grouped) = table(tiles.as_ref(), u);
    let groups = Groups::each(count * p.width.div_ceil(GROUP));
    let arguments = arguments![y, u, factor, tiles, grouped, p.tokens(), rank, width, rank_step, width_step, p.alpha];
    gpu.launch(&LOW_RANK, "low_rank_expand", groups, arguments);
}

pub(super) fn outer(
    gpu: &Gpu,
    dfactor: &mut GpuBuffer<f32>,
    u: &GpuBuffer<f32>,
    x: &GpuBuffer<f32>,
    p: &LowRank,
    row_starts: &[usize],
    workspace: &mut GpuBuffer<u8>,
) {
    let [rank, width, rank_step, width_step] = shape(p);
    let (mut starts, mut ends) = (vec![0; p.factors() + 1], Vec::new());
    for (factor, block) in p.blocks(row_starts) {
        starts[factor + 1] += 1;
        ends.extend([block.start, block.end]);
    }
    for factor in 0..p.factors() {
        starts[factor + 1] += starts[factor];
    }
    let count = starts[p.factors()];
    let (starts, blocks) = (gpu.offsets(&starts), gpu.offsets(&ends));
    let partial = Parts::new(gpu, workspace).take::<f32>(partial_length(p));
    for first in (0..count).step_by(BLOCKS_AT_ONCE) {
        let end = (first + BLOCKS_AT_ONCE).min(count);
        let columns = p.width.div_ceil(GROUP);
        let [first32, end32] = [first, end].map(dimension);
        let tiles = p.width.div_ceil(OUTER_COLUMNS) * p.rank.div_ceil(RANKS);
        let groups = Groups::of((end - first) * tiles, OUTER_COLUMNS);
        let arguments = arguments![partial, u, x, &blocks, first32, rank, width, p.alpha];
        gpu.launch(&LOW_RANK, "low_rank_outer_blocks", groups, arguments);
        let groups = Groups::each(p.factors() * p.rank * columns);
        let arguments = arguments![&*dfactor, partial, &starts, first32, end32, rank, width, rank_step, width_step];
        gpu.launch(&LOW_RANK, "low_rank_outer_add", groups, arguments);
    }
}
