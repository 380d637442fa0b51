//! The contract form of low-rank products on a CUDA device (`gpu/low_rank_contract.cu`): several
//! factors share one read of `x`, and slicing shares it too where there are many tokens
//! (`gpu/slice_contract.cu`). Other devices, grouped factors, ranks that are not multiples of eight
//! and widths that are not multiples of four use the portable kernel; the bits are the same.

use super::GpuMemory;
use super::device::{Gpu, Groups, dimension};
use super::memory::{DevicePointer, GpuBuffer};
use super::program::{Program, files};
use super::runtime::{Argument, Language};
use super::slices::{FactoredRows, SlicePlaces};
use crate::op::{Contraction, FactorLayout, LowRank};
use isobit_numerics::lanes::LANES;
use isobit_numerics::slices::{CHUNK, Profile};

pub(super) static LOW_RANK_CONTRACT: Program = Program {
    name: "low_rank_contract",
    text: files!("mma.cuh", "contract.cuh", "low_rank_contract.cu"),
    language: Language::Cuda,
};
pub(super) static SLICE_CONTRACT: Program = Program {
    name: "slice_contract",
    text: files!("mma.cuh", "quantise.cuh", "contract.cuh", "slice_contract.cu"),
    language: Language::Cuda,
};

/// Ranks per part, and warps per group: `RANKS` and `WARPS` of the kernel.
const RANKS: usize = 8;
const WARPS: usize = 8;
/// Maximum parts per launch.
const PARTS: usize = 3;
/// From this many tokens, a warp processes several instead of one.
const MANY_TOKENS: usize = 4096;

pub(super) fn serves(gpu: &Gpu, p: &LowRank) -> bool {
    gpu.architecture().is_some() && p.factors() == 1 && p.rank.is_multiple_of(RANKS) && p.width.is_multiple_of(4)
}

/// Contracts factors of one layout, with as many parts per launch as it can take.
pub(super) fn contract(gpu: &Gpu, parts: &[Contraction<GpuMemory>], x: &GpuBuffer<f32>) {
    let Some(p) = parts.first().map(|part| part.p) else { return };
    let rows: Vec<[u64; 3]> = parts.iter().flat_map(ranks).collect();
    contract_ranks(gpu, &rows, &p, DevicePointer::from(x).into());
}

/// Contracts groups of eight ranks of factors with the tokens, width and layout of `p`.
fn contract_ranks(gpu: &Gpu, rows: &[[u64; 3]], p: &LowRank, x: Argument) {
    let (tokens, width, layout) = (p.tokens(), p.width, p.layout);
    let many = tokens >= MANY_TOKENS;
    for rows in rows.chunks(together(rows.len(), layout)) {
        // Tokens per warp, and columns staged at once: TOKENS and STEPS · STAGES · LANES in the
        // kernel.
        let (each, staged) = match (many, rows.len()) {
            (false, _) => (1, 2 * 16 * LANES),
            (true, 1) => (4, 8 * 2 * LANES),
            (true, 2) => (4, 4 * 3 * LANES),
            (true, _) => (2, 8 * 2 * LANES),
        };
        let kernel = match (layout, many, rows.len()) {
            (FactorLayout::WidthMajor, true, _) => "contract_many_by_width",
            (FactorLayout::WidthMajor, false, _) => "contract_few_by_width",
            (FactorLayout::RankMajor, true, 1) => "contract_many_1",
            (FactorLayout::RankMajor, true, 2) => "contract_many_2",
            (FactorLayout::RankMajor, true, _) => "contract_many_3",
            (FactorLayout::RankMajor, false, 1) => "contract_few_1",
            (FactorLayout::RankMajor, false, 2) => "contract_few_2",
            (FactorLayout::RankMajor, false, _) => "contract_few_3",
        };
        let groups = Groups::of(tokens.div_ceil(WARPS * each), WARPS * LANES);
        let arguments = [table(rows), x, dimension(tokens).into(), dimension(width).into()];
        let shared = rows.len() * RANKS * staged * size_of::<f32>();
        gpu.launch_with(&LOW_RANK_CONTRACT, kernel, Profile::X2, groups, shared, &arguments);
    }
}

/// Groups of ranks per launch, of `count`.
fn together(count: usize, layout: FactorLayout) -> usize {
    match layout {
        FactorLayout::RankMajor => count.div_ceil(count.div_ceil(PARTS).max(1)).max(1),
        FactorLayout::WidthMajor => 1,
    }
}

/// Groups of ranks as a kernel's argument.
fn table(rows: &[[u64; 3]]) -> Argument {
    let mut table = [0; 16];
    table[..3 * rows.len()].copy_from_slice(rows.as_flattened());
    Argument::Descriptor(table)
}

/// Whether [`slice_and_contract`] takes these factors, given rows of `layout` factors: forward by
/// rank, of gradients by width. With few tokens, two launches keep more of the card busy.
pub(super) fn serves_slicing(gpu: &Gpu, parts: &[Contraction<GpuMemory>], layout: FactorLayout) -> bool {
    let serves = |part: &Contraction<GpuMemory>| {
        serves(gpu, &part.p) && part.p.layout == layout && part.p.tokens() >= MANY_TOKENS
    };
    super::slice_tiles::serves(gpu) && !parts.is_empty() && parts.iter().all(serves)
}

/// Slices whole rows and contracts them with all parts: one read for both, and one more for every
/// launch of groups that do not fit the first.
pub(super) fn slice_and_contract(
    gpu: &Gpu,
    places: SlicePlaces,
    from: &FactoredRows,
    parts: &[Contraction<GpuMemory>],
    profile: Profile,
) {
    let FactoredRows { x, factors, rows, width, stride } = *from;
    let p = parts[0].p;
    assert_eq!((rows, width, stride), (p.tokens(), p.width, p.width), "whole rows of the contraction");
    let ranks: Vec<[u64; 3]> = parts.iter().flat_map(ranks).collect();
    let (first, further) = ranks.split_at(together(ranks.len(), p.layout));
    // With the kernel's TOKENS.
    let (kernel, each) = match (factors, first.len()) {
        (Some(_), _) => ("slice_contract_folded", 4),
        (None, 1) => ("slice_contract_1", 2),
        (None, 2) => ("slice_contract_2", 2),
        (None, _) => ("slice_contract_3", 2),
    };
    // SEGMENT of the kernel; two stages of it, four of the columns' factors, and the bytes of a
    // chunk per warp.
    let segment = CHUNK / 2;
    let folds = if factors.is_some() { 4 } else { 0 };
    let staged = (2 * first.len() * RANKS + folds) * segment * size_of::<f32>();
    let groups = Groups::of(rows.div_ceil(WARPS * each), WARPS * LANES);
    let arguments = [
        table(first),
        places.planes.into(),
        places.scales.into(),
        x,
        factors.unwrap_or(Argument::U64(0)),
        dimension(rows).into(),
        dimension(places.rows).into(),
        dimension(width).into(),
    ];
    let shared = staged + WARPS * profile.slice_count() * CHUNK;
    gpu.launch_with(&SLICE_CONTRACT, kernel, profile, groups, shared, &arguments);
    if !further.is_empty() {
        contract_ranks(gpu, further, &p, x);
    }
}

/// Addresses of each group of eight ranks of a factor and of their results, and the full rank.
fn ranks<'a>(part: &'a Contraction<GpuMemory>) -> impl Iterator<Item = [u64; 3]> + use<'a> {
    let (factor, u) = (DevicePointer::from(part.factor).address(), DevicePointer::from(&*part.u).address());
    let rank_step = match part.p.layout {
        FactorLayout::RankMajor => part.p.width,
        FactorLayout::WidthMajor => 1,
    };
    (0..part.p.rank).step_by(RANKS).map(move |first| {
        let floats = |count: usize| (count * size_of::<f32>()) as u64;
        [factor + floats(first * rank_step), u + floats(first), part.p.rank as u64]
    })
}
