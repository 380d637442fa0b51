//! Slice products on int8 tensor cores through `mma.sync` (`gpu/product_mma.cuh`): NVIDIA devices
//! from compute capability 8.0 on that have no kernels of their own, both profiles. Forward, input
//! gradient and experts are one kernel, with the epilogue of a linear layer; the weight gradient is
//! the other. The bits are those of the portable kernels.

use super::device::{Gpu, Groups, arguments, dimension};
use super::groups_hopper::{GroupsProduct, Tiles};
use super::hopper::LowRank;
use super::memory::DevicePointer;
use super::product_weight::ChunkRun;
use super::program::{Program, files};
use super::runtime::{Argument, Language};
use super::slice_tiles::{BLOCK, ROWS};
use super::weight_hopper::{Chunks, Columns};
use isobit_numerics::slices::Profile;

/// The program in `crates/kernels/gpu/<name>.cu`, after what both share.
macro_rules! program {
    ($name:literal) => {
        Program {
            name: $name,
            text: files!("mma.cuh", "product_mma.cuh", concat!($name, ".cu")),
            language: Language::Cuda,
        }
    };
}

pub(super) static PRODUCT: Program = program!("product_mma");
pub(super) static PRODUCT_WEIGHT: Program = program!("product_weight_mma");

/// From `gpu/product_mma.cuh`: threads of a block, and bytes of the contraction per step.
pub(super) const THREADS: usize = 256;
const STEP: usize = 64;

/// `COLUMNS`.
pub(super) fn tile_columns(profile: Profile) -> usize {
    match profile {
        Profile::X2 => 128,
        Profile::X3 => 64,
    }
}

/// `STAGES` of `SLOT_BYTES`, with this many planes on the right.
pub(super) fn shared_bytes(profile: Profile, right_slices: usize) -> usize {
    let stages = match profile {
        Profile::X2 => 3,
        Profile::X3 => 2,
    };
    stages * (profile.slice_count() * ROWS + right_slices * tile_columns(profile)) * STEP
}

/// A row of planes must be shorter than this, for offsets in a tile to have 32 bits.
const PITCH_MAX: usize = 1 << 24;

pub(super) fn product(gpu: &Gpu, p: &GroupsProduct, tiles: &Tiles) {
    assert!(p.width > 0 && p.width <= PITCH_MAX, "sizes that the kernel supports");
    let columns = p.weights.count;
    if tiles.count == 0 || columns == 0 {
        return;
    }
    let low = p.epilogue.low.unwrap_or(LowRank::absent(p.y));
    let optional =
        |place: Option<(DevicePointer, usize)>| place.map_or(Argument::U64(0), |(place, start)| place.at::<f32>(start));
    let arguments = [
        p.y.at::<f32>(p.y_start),
        p.y_stride.into(),
        dimension(p.y_base).into(),
        u32::from(p.accumulate).into(),
        p.left.place.into(),
        p.left_scales.into(),
        dimension(p.left.rows).into(),
        dimension(p.left_base).into(),
        p.right.place.into(),
        optional(p.right_scales.map(|scales| (scales, 0))),
        dimension(p.right.rows).into(),
        dimension(p.weights.first_weight).into(),
        dimension(p.weights.step).into(),
        dimension(p.weights.first).into(),
        dimension(columns).into(),
        dimension(p.width).into(),
        tiles.table.map_or(Argument::U64(0), |(table, start)| table.at::<u32>(start)),
        dimension(tiles.count).into(),
        dimension(tiles.rows.0).into(),
        dimension(tiles.rows.1).into(),
        optional(p.epilogue.bias),
        low.u.0.at::<f32>(low.u.1),
        low.factor.0.at::<f32>(low.factor.1),
        low.rank_step.into(),
        low.width_step.into(),
        low.rank.into(),
        low.alpha.into(),
    ];
    let groups = Groups::of(tiles.count * columns.div_ceil(tile_columns(p.profile)), THREADS);
    let shared = shared_bytes(p.profile, p.profile.slice_count());
    gpu.launch_with(&PRODUCT, "product_mma", p.profile, groups, shared, &arguments);
}

/// Adds the chunks of each of `runs` to `dw`, starting at its first row.
pub(super) fn weight_product(
    gpu: &Gpu,
    dw: DevicePointer,
    runs: &[ChunkRun],
    (left, right): (Columns, Columns),
    chunks: Chunks,
    profile: Profile,
) {
    let (n, k, pitch) = (left.width, right.width, chunks.blocks * BLOCK);
    // A run without chunks has nothing to add.
    let runs: Vec<&ChunkRun> = runs.iter().filter(|(run, _)| !run.is_empty()).collect();
    let Some((run, first_row)) = runs.first().filter(|_| n > 0 && k > 0) else { return };
    assert!(pitch <= PITCH_MAX, "sizes that the kernel supports");
    let table = (runs.len() > 1).then(|| {
        let entries = runs.iter().flat_map(|(run, row)| [run.start, run.end, *row]);
        gpu.offsets(&entries.collect::<Vec<_>>())
    });
    let arguments = arguments![
        dw,
        left.planes,
        left.scales,
        right.planes,
        right.scales,
        dimension(n),
        dimension(k),
        pitch,
        chunks.table,
        table.as_ref().map_or(Argument::U64(0), Argument::from),
        dimension(run.start),
        dimension(run.end),
        *first_row,
        dimension(chunks.first),
        dimension(chunks.first_block),
    ];
    let tiles = n.div_ceil(ROWS) * k.div_ceil(tile_columns(profile));
    let groups = Groups::of(runs.len() * tiles, THREADS);
    let shared = shared_bytes(profile, profile.slice_count());
    gpu.launch_with(&PRODUCT_WEIGHT, "product_weight_mma", profile, groups, shared, arguments);
}

const _: () = assert!(BLOCK.is_multiple_of(STEP), "planes are whole steps");
