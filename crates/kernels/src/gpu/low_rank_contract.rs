//! The contract form of low-rank products on a CUDA device (`gpu/low_rank_contract.cu`): several
//! factors share one read of `x`. Other devices, grouped factors, ranks that are not multiples of
//! eight and widths that are not multiples of four use the portable kernel; the bits are the same.

use super::GpuMemory;
use super::device::{Gpu, Groups, dimension};
use super::memory::{DevicePointer, GpuBuffer};
use super::program::{Program, files};
use super::runtime::{Argument, Language};
use crate::op::{Contraction, FactorLayout, LowRank};
use isobit_numerics::lanes::LANES;
use isobit_numerics::slices::Profile;

pub(super) static LOW_RANK_CONTRACT: Program =
    Program { name: "low_rank_contract", text: files!("mma.cuh", "low_rank_contract.cu"), language: Language::Cuda };

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
    let Some(LowRank { width, layout, .. }) = parts.first().map(|part| part.p) else { return };
    let tokens = parts[0].p.tokens();
    let rows: Vec<[u64; 3]> = parts.iter().flat_map(ranks).collect();
    let together = match layout {
        FactorLayout::RankMajor => rows.len().div_ceil(rows.len().div_ceil(PARTS)),
        FactorLayout::WidthMajor => 1,
    };
    let many = tokens >= MANY_TOKENS;
    for rows in rows.chunks(together) {
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
        let mut table = [0; 16];
        table[..3 * rows.len()].copy_from_slice(rows.as_flattened());
        let groups = Groups::of(tokens.div_ceil(WARPS * each), WARPS * LANES);
        let arguments = [
            Argument::Descriptor(table),
            DevicePointer::from(x).into(),
            dimension(tokens).into(),
            dimension(width).into(),
        ];
        let shared = rows.len() * RANKS * staged * size_of::<f32>();
        gpu.launch_with(&LOW_RANK_CONTRACT, kernel, Profile::X2, groups, shared, &arguments);
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
