//! Thin products on a GPU (`op/thin.rs`). The factor is read as it lies, so no workspace is needed.

use super::device::{GROUP, Gpu, Groups, arguments};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::op::thin::RANK_MAX;
use crate::op::{Layout, Thin};
use isobit_numerics::lanes::LANES;

static THIN: Program = program!("thin");

/// Tokens of a group, `TOKENS` in `gpu/thin.cl`.
const TOKENS: usize = GROUP / LANES;
/// Ranks of a group, `RANKS` in `gpu/thin.cl`.
const RANKS: usize = 8;

/// Rank, width, and the steps from one rank and one column to the next, as the kernels read them.
fn shape(p: &Thin) -> [u32; 4] {
    let (rank_step, width_step) = match p.layout {
        Layout::RankMajor => (p.width, 1),
        Layout::WidthMajor => (1, p.rank),
    };
    [p.rank, p.width, rank_step, width_step].map(|x| u32::try_from(x).expect("a width below 2³²"))
}

fn check(u: &GpuBuffer<f32>, x: &GpuBuffer<f32>, factor: &GpuBuffer<f32>, p: &Thin) {
    assert!((1..=RANK_MAX).contains(&p.rank), "rank {} is outside 1..={RANK_MAX}", p.rank);
    let want = [p.tokens * p.rank, p.tokens * p.width, p.rank * p.width];
    assert_eq!([u.len(), x.len(), factor.len()], want, "thin product");
}

pub(super) fn workspace(_gpu: &Gpu, _p: &Thin) -> usize {
    0
}

pub(super) fn contract(
    gpu: &Gpu,
    u: &mut GpuBuffer<f32>,
    x: &GpuBuffer<f32>,
    factor: &GpuBuffer<f32>,
    p: &Thin,
    _workspace: &mut GpuBuffer<u8>,
) {
    check(u, x, factor, p);
    let [rank, width, rank_step, width_step] = shape(p);
    let groups = Groups::each(p.tokens.div_ceil(TOKENS) * p.rank.div_ceil(RANKS));
    let arguments = arguments![u, x, factor, p.tokens, rank, width, rank_step, width_step];
    gpu.launch(&THIN, "thin_contract", groups, arguments);
}

pub(super) fn expand(
    gpu: &Gpu,
    y: &mut GpuBuffer<f32>,
    u: &GpuBuffer<f32>,
    factor: &GpuBuffer<f32>,
    p: &Thin,
    _workspace: &mut GpuBuffer<u8>,
) {
    check(u, y, factor, p);
    let [rank, width, rank_step, width_step] = shape(p);
    let groups = Groups::each(p.tokens.div_ceil(TOKENS) * p.width.div_ceil(GROUP));
    let arguments = arguments![y, u, factor, p.tokens, rank, width, rank_step, width_step, p.alpha];
    gpu.launch(&THIN, "thin_expand", groups, arguments);
}

pub(super) fn outer(
    gpu: &Gpu,
    dfactor: &mut GpuBuffer<f32>,
    u: &GpuBuffer<f32>,
    x: &GpuBuffer<f32>,
    p: &Thin,
    row_starts: &[usize],
) {
    check(u, x, dfactor, p);
    assert_eq!(row_starts[row_starts.len() - 1], p.tokens, "rows of data end with the tokens");
    let [rank, width, rank_step, width_step] = shape(p);
    let blocks = gpu.token_blocks(row_starts);
    let count = u32::try_from(blocks.len() / 2).expect("blocks are fewer than tokens");
    let groups = Groups::each(p.width.div_ceil(LANES) * p.rank.div_ceil(RANKS));
    let arguments = arguments![dfactor, u, x, &blocks, count, rank, width, rank_step, width_step, p.alpha];
    gpu.launch(&THIN, "thin_outer", groups, arguments);
}
