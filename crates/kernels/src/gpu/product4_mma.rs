//! Products with 4-bit weights on int8 tensor cores (`gpu/product4_mma.cu`): NVIDIA devices from
//! compute capability 8.0 on, both profiles, where no step of the tensor cores crosses a group.
//! Other devices and groups use the portable kernels; the bits are the same.

use super::device::{Gpu, Groups, arguments, dimension};
use super::groups_hopper::Tiles;
use super::memory::{DevicePointer, GpuBuffer};
use super::product_mma::{THREADS, shared_bytes, tile_columns};
use super::program::{Program, files};
use super::runtime::{Argument, Language};
use super::slice_tiles;
use crate::op::QuantizedShape;
use isobit_numerics::slices::Profile;
use std::ops::Range;

static PRODUCT4: Program = Program {
    name: "product4_mma",
    text: concat!("#define RIGHT_SLICES 1\n", files!("mma.cuh", "product_mma.cuh", "product4_mma.cu")),
    language: Language::Cuda,
};

/// Bytes of the contraction that one instruction multiplies.
const INSTRUCTION: usize = 32;

/// Whether the device has these tensor cores and they support groups of this size.
pub(super) fn serves(gpu: &Gpu, shape: QuantizedShape) -> bool {
    slice_tiles::serves(gpu) && (shape.group_size.is_multiple_of(INSTRUCTION) || shape.groups() == 1)
}

/// Packed weights.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a> {
    pub(super) shape: QuantizedShape,
    pub(super) lines: &'a GpuBuffer<u32>,
    pub(super) zeros: &'a GpuBuffer<u8>,
    /// With their format code for `load_stored`.
    pub(super) group_scales: (DevicePointer, u32),
    pub(super) order: Option<&'a GpuBuffer<u32>>,
}

/// Sliced rows.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) planes: DevicePointer,
    pub(super) scales: DevicePointer,
    pub(super) count: usize,
}

/// The table of tiles, if there is one.
fn table(tiles: &Tiles) -> Argument {
    tiles.table.map_or(Argument::U64(0), |(table, start)| table.at::<u32>(start))
}

pub(super) fn forward(gpu: &Gpu, y: &GpuBuffer<f32>, x: Rows, w: Packed, tiles: &Tiles, profile: Profile) {
    let QuantizedShape { n, k, group_size, .. } = w.shape;
    let (group_scales, format) = w.group_scales;
    let arguments = arguments![
        y,
        x.planes,
        x.scales,
        dimension(x.count),
        w.lines,
        w.zeros,
        group_scales,
        format,
        dimension(w.shape.groups()),
        dimension(group_size.min(k)),
        dimension(n),
        dimension(k),
        table(tiles),
        dimension(tiles.count),
        dimension(tiles.rows.0),
        dimension(tiles.rows.1),
    ];
    let groups = Groups::of(tiles.count * n.div_ceil(tile_columns(profile)), THREADS);
    gpu.launch_with(&PRODUCT4, "product4_forward_mma", profile, groups, shared_bytes(profile, 1), arguments);
}

/// The places of one group, from some of the outputs; `d` is their gradient with sigma folded in.
pub(super) fn grad_input(
    gpu: &Gpu,
    dx: &GpuBuffer<f32>,
    d: Rows,
    w: Packed,
    (group, outputs, fresh): (usize, &Range<usize>, bool),
    tiles: &Tiles,
    profile: Profile,
) {
    let QuantizedShape { n, k, group_size, .. } = w.shape;
    let columns = group_size.min(k - group * group_size);
    let arguments = arguments![
        dx,
        d.planes,
        d.scales,
        dimension(d.count),
        w.lines,
        w.zeros,
        w.order.map_or(Argument::U64(0), Argument::from),
        dimension(w.shape.groups()),
        dimension(group),
        dimension(group_size.min(k)),
        dimension(n),
        dimension(k),
        dimension(outputs.start),
        dimension(outputs.len()),
        u32::from(fresh),
        table(tiles),
        dimension(tiles.count),
        dimension(tiles.rows.0),
        dimension(tiles.rows.1),
    ];
    let groups = Groups::of(tiles.count * columns.div_ceil(tile_columns(profile)), THREADS);
    gpu.launch_with(&PRODUCT4, "product4_input_mma", profile, groups, shared_bytes(profile, 1), arguments);
}
