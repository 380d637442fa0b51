//! The weight gradient on NVIDIA Hopper tensor cores (`gpu/product_weight_hopper.cu`), both
//! profiles: columns are sliced along the tokens in whole blocks (`gpu/column_slices.cu`), then
//! multiplied. Other NVIDIA tensor cores multiply in `product_mma.rs`, other devices use the
//! portable kernels; the bits are the same.

use super::device::{Gpu, Groups, arguments, dimension};
use super::memory::{DevicePointer, GpuBuffer};
use super::product_mma;
use super::product_weight::ChunkRun;
use super::program::{Program, files};
use super::runtime::{Argument, Language};
use super::slice_tiles::{BLOCK, CLUSTER, ROWS, blocks, is_hopper, map, shared_bytes, tile_columns};
use super::slices::padded;
use isobit_numerics::slices::Profile;

pub(super) static COLUMNS: Program =
    Program { name: "column_slices", text: files!("quantise.cuh", "column_slices.cu"), language: Language::Cuda };
pub(super) static PRODUCT_WEIGHT: Program = Program {
    name: "product_weight_hopper",
    text: files!("hopper.cuh", "slice_tiles.cuh", "product_weight_hopper.cu"),
    language: Language::Native,
};

/// From `gpu/column_slices.cu`: work items per group, and its columns.
const COLUMN_GROUP: usize = 512;
const COLUMNS_TOGETHER: usize = 32;

/// Columns sliced along the tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Columns {
    /// `[slice, column, token of the batch]`
    pub(super) planes: DevicePointer,
    /// `[chunk, padded column]`
    pub(super) scales: DevicePointer,
    pub(super) width: usize,
}

/// Consecutive chunks of a table of (start, length, first block) entries.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunks<'a> {
    pub(super) table: &'a GpuBuffer<u32>,
    pub(super) first: usize,
    pub(super) count: usize,
    /// The blocks of the planes that they occupy.
    pub(super) first_block: usize,
    pub(super) blocks: usize,
}

/// Slices the columns of `x`; `x_base` is the token in its first row.
pub(super) fn slice(gpu: &Gpu, columns: Columns, x: DevicePointer, x_base: usize, chunks: Chunks, profile: Profile) {
    let groups = Groups::of(chunks.count * (padded(columns.width) / COLUMNS_TOGETHER), COLUMN_GROUP);
    let arguments = arguments![
        columns.planes,
        columns.scales,
        x,
        chunks.table,
        dimension(chunks.first),
        dimension(chunks.first_block),
        dimension(x_base),
        dimension(columns.width),
        chunks.blocks * BLOCK,
    ];
    gpu.launch_sliced(&COLUMNS, "slice_along_tokens", profile, groups, arguments);
}

/// Adds the chunks of each of `runs` to `dw`, starting at its first row.
pub(super) fn product(
    gpu: &Gpu,
    dw: DevicePointer,
    runs: &[ChunkRun],
    (left, right): (Columns, Columns),
    chunks: Chunks,
    profile: Profile,
) {
    if !is_hopper(gpu) {
        return product_mma::weight_product(gpu, dw, runs, (left, right), chunks, profile);
    }
    let (n, k, slices) = (left.width, right.width, profile.slice_count());
    let Some((run, first_row)) = runs.first().filter(|_| n > 0 && k > 0) else { return };
    let signed = |size: usize| size < 1 << 29;
    assert!([n, k, chunks.blocks * BLOCK].into_iter().all(signed), "sizes are 32-bit signed in the kernel");
    let pitch = chunks.blocks * BLOCK;
    let Some(left_map) = map(gpu, left.planes, slices * n, pitch, ROWS / CLUSTER) else { return };
    let Some(right_map) = map(gpu, right.planes, slices * k, pitch, tile_columns(profile)) else { return };
    let table = (runs.len() > 1).then(|| {
        let entries = runs.iter().flat_map(|(run, row)| [run.start, run.end, *row]);
        gpu.offsets(&entries.collect::<Vec<_>>())
    });
    let arguments = [
        left_map,
        right_map,
        left.scales.into(),
        right.scales.into(),
        dw.into(),
        dimension(n).into(),
        dimension(k).into(),
        chunks.table.into(),
        table.as_ref().map_or(Argument::U64(0), Argument::from),
        dimension(runs.len()).into(),
        dimension(run.start).into(),
        dimension(run.end).into(),
        (*first_row).into(),
        dimension(chunks.first).into(),
        dimension(chunks.first_block).into(),
    ];
    let pairs = runs.len() * n.div_ceil(ROWS) * k.div_ceil(CLUSTER * tile_columns(profile));
    let shared = shared_bytes(profile);
    gpu.launch_with(&PRODUCT_WEIGHT, "product_weight_hopper", profile, blocks(gpu, pairs), shared, &arguments);
}
