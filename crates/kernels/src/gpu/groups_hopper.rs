//! Slice products without an epilogue on NVIDIA Hopper tensor cores
//! (`gpu/product_groups_hopper.cu`): those of several weights, such as experts, in one launch, and
//! profile x3. Other NVIDIA tensor cores take the same operands in `product_mma.rs`, other devices
//! use the portable kernels; the bits are the same.

use super::device::{Gpu, Groups, arguments, dimension};
use super::hopper::Epilogue;
use super::memory::DevicePointer;
use super::product_mma;
use super::program::{Program, files};
use super::runtime::{Argument, Language};
use super::slice_tiles::{CLUSTER, ROWS, blocks, is_hopper, map, shared_bytes, tile_columns};
use super::slices::padded;
use isobit_numerics::slices::{CHUNK, Profile};

pub(super) static TRANSPOSE: Program =
    Program { name: "transpose", text: files!("transpose.cu"), language: Language::Cuda };
pub(super) static PRODUCT_GROUPS: Program = Program {
    name: "product_groups_hopper",
    text: files!("hopper.cuh", "slice_tiles.cuh", "product_groups_hopper.cu"),
    language: Language::Native,
};

/// Side of the byte square that a group transposes: `SQUARE` in `gpu/transpose.cu`.
const SQUARE: usize = 64;

/// The left rows, in tiles of [`ROWS`] rows with one weight each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    /// Start row, end row and weight of each tile, starting at this element; if none, `rows` and
    /// weight 0.
    pub(super) table: Option<(DevicePointer, usize)>,
    pub(super) count: usize,
    pub(super) rows: (usize, usize),
}

/// Planes of bytes, and the number of rows in each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planes {
    pub(super) place: DevicePointer,
    pub(super) rows: usize,
}

/// Rows of the weights in the right planes: row `n` of weight `e` is
/// `(e - first_weight) * step + first + n`.
#[derive(Clone, Copy, Debug)]
pub(super) struct WeightRows {
    pub(super) first_weight: usize,
    pub(super) step: usize,
    pub(super) first: usize,
    /// How many rows of each weight take part: the columns of the output.
    pub(super) count: usize,
}

/// `y = left · rightᵀ` over `width`, chunks added with the left operand's scales.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupsProduct {
    pub(super) y: DevicePointer,
    /// Element of `y` for row `y_base` and the first column, and the row stride.
    pub(super) y_start: usize,
    pub(super) y_stride: usize,
    pub(super) y_base: usize,
    pub(super) left: Planes,
    /// Index of the first row in the left planes.
    pub(super) left_base: usize,
    /// `[row, chunk]`
    pub(super) left_scales: DevicePointer,
    pub(super) right: Planes,
    /// The final factor on each column: one per row of the right planes.
    pub(super) right_scales: Option<DevicePointer>,
    pub(super) weights: WeightRows,
    pub(super) width: usize,
    pub(super) profile: Profile,
    pub(super) accumulate: bool,
    /// Only `mma.sync` kernels support one.
    pub(super) epilogue: Epilogue,
}

pub(super) fn product(gpu: &Gpu, p: &GroupsProduct, tiles: &Tiles) {
    if !is_hopper(gpu) {
        return product_mma::product(gpu, p, tiles);
    }
    assert!(p.width > 0, "the copy engine knows no empty axes");
    let (columns, slices) = (p.weights.count, p.profile.slice_count());
    if tiles.count == 0 || columns == 0 {
        return;
    }
    let signed = |size: usize| size < 1 << 29;
    let sizes = [p.left.rows, p.right.rows, tiles.rows.1, p.width, p.left.rows * p.width.div_ceil(CHUNK) / 8];
    assert!(sizes.into_iter().all(signed), "sizes are 32-bit in the kernel");
    let pitch = padded(p.width);
    let Some(left) = map(gpu, p.left.place, slices * p.left.rows, pitch, ROWS / CLUSTER) else { return };
    let Some(right) = map(gpu, p.right.place, slices * p.right.rows, pitch, tile_columns(p.profile)) else { return };
    let arguments = [
        left,
        right,
        dimension(p.left.rows).into(),
        dimension(p.right.rows).into(),
        p.left_scales.into(),
        p.right_scales.map_or(Argument::U64(0), Argument::from),
        p.y.at::<f32>(p.y_start),
        p.y_stride.into(),
        dimension(p.y_base).into(),
        dimension(columns).into(),
        dimension(p.width).into(),
        u32::from(p.accumulate).into(),
        dimension(p.left_base).into(),
        dimension(p.weights.first_weight).into(),
        dimension(p.weights.step).into(),
        dimension(p.weights.first).into(),
        tiles.table.map_or(Argument::U64(0), |(table, start)| table.at::<u32>(start)),
        dimension(tiles.count).into(),
        dimension(tiles.rows.0).into(),
        dimension(tiles.rows.1).into(),
    ];
    let pairs = tiles.count * columns.div_ceil(CLUSTER * tile_columns(p.profile));
    let shared = shared_bytes(p.profile);
    gpu.launch_with(&PRODUCT_GROUPS, "product_groups_hopper", p.profile, blocks(gpu, pairs), shared, &arguments);
}

/// Transposes `weights` weights, the first at row `first` of the planes, with stride `rows.step`:
/// `[slice, weight, width, padded rows]`.
pub(super) fn transpose(
    gpu: &Gpu,
    to: DevicePointer,
    from: Planes,
    rows: &WeightRows,
    weights: usize,
    shape: (usize, Profile),
) {
    let (width, profile) = shape;
    let squares = padded(rows.count) / SQUARE * width.div_ceil(SQUARE);
    let arguments = arguments![
        to,
        from.place,
        dimension(from.rows),
        rows.first,
        dimension(rows.step),
        dimension(weights),
        dimension(rows.count),
        dimension(width),
    ];
    gpu.launch_sliced(&TRANSPOSE, "transpose_weights", profile, Groups::each(weights * squares), arguments);
}
