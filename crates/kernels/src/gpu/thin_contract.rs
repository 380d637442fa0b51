//! The contract form of thin products on a CUDA device (`gpu/thin_contract.cu`): several factors share one read of `x`.
//! Other devices, grouped factors, ranks that are no multiple of eight and widths that are none of four take the portable
//! kernel; the bits are the same.

use super::GpuMemory;
use super::device::{Gpu, Groups, dimension};
use super::memory::{GpuBuffer, Place};
use super::program::Program;
use super::runtime::{Argument, Language};
use crate::op::{Contraction, FactorLayout as Layout, LowRank as Thin};
use isobit_numerics::lanes::LANES;
use isobit_numerics::slices::Profile;

static THIN_CONTRACT: Program =
    Program { name: "thin_contract", text: include_str!("../../gpu/thin_contract.cu"), language: Language::Cuda };

/// Ranks of a part, and warps of a group: `RANKS` and `WARPS` of the kernel.
const RANKS: usize = 8;
const WARPS: usize = 8;
/// Parts of a launch, at most.
const PARTS: usize = 3;
/// From so many tokens on, a warp has several of them instead of one.
const MANY_TOKENS: usize = 4096;

pub(super) fn serves(gpu: &Gpu, p: &Thin) -> bool {
    gpu.architecture().is_some() && p.factors() == 1 && p.rank.is_multiple_of(RANKS) && p.width.is_multiple_of(4)
}

/// The parts of factors of one layout, few enough for a launch each.
pub(super) fn contract(gpu: &Gpu, parts: &[Contraction<GpuMemory>], x: &GpuBuffer<f32>) {
    let Some(Thin { width, layout, .. }) = parts.first().map(|part| part.p) else { return };
    let tokens = parts[0].p.tokens();
    let rows: Vec<[u64; 3]> = parts.iter().flat_map(ranks).collect();
    let together = match layout {
        Layout::RankMajor => rows.len().div_ceil(rows.len().div_ceil(PARTS)),
        Layout::WidthMajor => 1,
    };
    let many = tokens >= MANY_TOKENS;
    for rows in rows.chunks(together) {
        // Tokens of a warp, and columns that are staged at once: TOKENS and STEPS · STAGES · LANES in the kernel.
        let (each, staged) = match (many, rows.len()) {
            (false, _) => (1, 2 * 16 * LANES),
            (true, 1) => (4, 8 * 2 * LANES),
            (true, 2) => (4, 4 * 3 * LANES),
            (true, _) => (2, 8 * 2 * LANES),
        };
        let kernel = match (layout, many, rows.len()) {
            (Layout::WidthMajor, true, _) => "contract_many_by_width",
            (Layout::WidthMajor, false, _) => "contract_few_by_width",
            (Layout::RankMajor, true, 1) => "contract_many_1",
            (Layout::RankMajor, true, 2) => "contract_many_2",
            (Layout::RankMajor, true, _) => "contract_many_3",
            (Layout::RankMajor, false, 1) => "contract_few_1",
            (Layout::RankMajor, false, 2) => "contract_few_2",
            (Layout::RankMajor, false, _) => "contract_few_3",
        };
        let mut table = [0; 16];
        table[..3 * rows.len()].copy_from_slice(rows.as_flattened());
        let groups = Groups::of(tokens.div_ceil(WARPS * each), WARPS * LANES);
        let arguments =
            [Argument::Descriptor(table), Place::from(x).into(), dimension(tokens).into(), dimension(width).into()];
        let shared = rows.len() * RANKS * staged * size_of::<f32>();
        gpu.launch_with(&THIN_CONTRACT, kernel, Profile::X2, groups, shared, &arguments);
    }
}

/// Addresses of every eight ranks of a factor and of their results, and the rank of the whole.
fn ranks<'a>(part: &'a Contraction<GpuMemory>) -> impl Iterator<Item = [u64; 3]> + use<'a> {
    let (factor, u) = (Place::from(part.factor).address(), Place::from(&*part.u).address());
    let rank_step = match part.p.layout {
        Layout::RankMajor => part.p.width,
        Layout::WidthMajor => 1,
    };
    (0..part.p.rank).step_by(RANKS).map(move |first| {
        let floats = |count: usize| (count * size_of::<f32>()) as u64;
        [factor + floats(first * rank_step), u + floats(first), part.p.rank as u64]
    })
}
