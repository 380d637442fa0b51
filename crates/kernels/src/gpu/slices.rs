//! Slices on a GPU: planes of bytes, one per slice, the highest first, rows padded with zeros.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::{DevicePointer, GpuBuffer, allocated_bytes};
use super::program::{Program, files, program};
use super::runtime::{Argument, Language};
use super::slice_tiles;
use crate::StoredMatrix;
use crate::backend::{Checked, Device, Run, Shaped};
use crate::op::{QuantizedShape, SliceRows, SliceShape, SliceWeight};
use crate::plan::MemoryLayout;
use isobit_numerics::slices::{CHUNK, Profile};

impl Run<SliceRows<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut SliceRows<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        slice_rows(self, op.rows, op.x);
    }
}

pub(super) static SLICES: Program = program!("slices");
/// Those of its kernels that NVIDIA cards run with wide loads.
pub(super) static ROW_SLICES: Program = Program {
    name: "row_slices",
    text: files!("quantise.cuh", "row_slices.cuh", "row_slices.cu"),
    language: Language::Cuda,
};

/// Rows are padded to a multiple of this many bytes, as bulk copies and packed loads require.
pub(super) const PADDING: usize = 128;
/// Work items that slice one chunk: `CHUNK_GROUP` in `gpu/slices.cl`.
pub(super) const CHUNK_GROUP: usize = CHUNK / 4;
/// Chunks that a group of `gpu/row_slices.cu` slices: `WARPS`.
const WARPS: usize = GROUP / 32;

/// Bytes per row of a plane.
pub(super) fn padded(width: usize) -> usize {
    width.next_multiple_of(PADDING)
}

/// Bytes of all planes of `rows` rows.
pub(super) fn plane_bytes(shape: SliceShape) -> usize {
    shape.profile.slice_count() * shape.rows * padded(shape.width)
}

/// Rows cut into chunks along their width, each with its own scale.
pub struct SlicedRows {
    pub(super) shape: SliceShape,
    /// `[slice, row, padded width]`
    pub(super) planes: GpuBuffer<i8>,
    /// `[row, chunk]`
    pub(super) scales: GpuBuffer<f32>,
}

/// Weights: one scale for a whole row.
pub struct SlicedWeight {
    pub(super) shape: SliceShape,
    pub(super) count: usize,
    /// `[slice, weight, row, padded width]`
    pub(super) planes: GpuBuffer<i8>,
    /// `[weight, row]`
    pub(super) scales: GpuBuffer<f32>,
}

/// Lengths of the planes and the scales of sliced rows.
fn rows_lengths(shape: SliceShape) -> (usize, usize) {
    (plane_bytes(shape), shape.rows * shape.width.div_ceil(CHUNK))
}

/// Lengths of the planes and the scales of sliced weights.
fn weight_lengths(count: usize, shape: SliceShape) -> (usize, usize) {
    let rows = count * shape.rows;
    (plane_bytes(SliceShape { rows, ..shape }), rows)
}

impl MemoryLayout for Gpu {
    fn name(&self) -> String {
        Device::name(self)
    }

    fn buffer_bytes(&self, bytes: usize) -> usize {
        allocated_bytes(bytes)
    }

    fn has_heap(&self) -> bool {
        self.architecture().is_some()
    }

    fn rows_bytes(&self, shape: SliceShape) -> usize {
        let (planes, scales) = rows_lengths(shape);
        allocated_bytes(planes) + allocated_bytes(size_of::<f32>() * scales)
    }

    fn weight_bytes(&self, count: usize, shape: SliceShape) -> usize {
        let (planes, scales) = weight_lengths(count, shape);
        allocated_bytes(planes) + allocated_bytes(size_of::<f32>() * scales)
    }

    fn quantized_bytes(&self, shape: QuantizedShape) -> usize {
        super::product4::quantized_bytes(shape)
    }

    fn host_quantized_bytes(&self, shape: QuantizedShape) -> usize {
        super::product4::host_quantized_bytes(shape)
    }
}

pub(super) fn rows(gpu: &Gpu, shape: SliceShape) -> SlicedRows {
    let (planes, scales) = rows_lengths(shape);
    SlicedRows { shape, planes: GpuBuffer::new(gpu, planes), scales: GpuBuffer::new(gpu, scales) }
}

pub(super) fn slice_rows(gpu: &Gpu, out: &mut SlicedRows, x: &GpuBuffer<f32>) {
    let SliceShape { rows, width, profile } = out.shape;
    if in_fours(gpu, &[width]) {
        let from = FactoredRows { x: Argument::from(x), factors: None, rows, width, stride: width };
        return slice_rows_4(gpu, SlicePlaces::from(&*out), &from, profile);
    }
    let groups = Groups::of(rows * width.div_ceil(CHUNK), CHUNK_GROUP);
    let arguments = arguments![&mut out.planes, &mut out.scales, x, dimension(rows), dimension(width)];
    gpu.launch_sliced(&SLICES, "slice_rows", profile, groups, arguments);
}

/// Whether the device has the kernels of `gpu/row_slices.cu` and they take rows that start at
/// multiples of these numbers.
pub(super) fn in_fours(gpu: &Gpu, starts: &[usize]) -> bool {
    slice_tiles::serves(gpu) && starts.iter().all(|start| start.is_multiple_of(4))
}

/// Rows of `width` numbers, `stride` from row to row, each number times the factor of its column.
#[derive(Clone, Copy)]
pub(super) struct FactoredRows {
    pub(super) x: Argument,
    pub(super) factors: Option<Argument>,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
}

/// Where slices of rows go: planes and scales, and the rows of a plane.
#[derive(Clone, Copy)]
pub(super) struct SlicePlaces {
    pub(super) planes: DevicePointer,
    pub(super) scales: DevicePointer,
    pub(super) rows: usize,
}

impl From<&SlicedRows> for SlicePlaces {
    fn from(out: &SlicedRows) -> Self {
        let (planes, scales) = (DevicePointer::from(&out.planes), DevicePointer::from(&out.scales));
        Self { planes, scales, rows: out.shape.rows }
    }
}

/// Slices rows into the first rows of their places. Starts are [`in_fours`].
pub(super) fn slice_rows_4(gpu: &Gpu, places: SlicePlaces, from: &FactoredRows, profile: Profile) {
    let FactoredRows { x, factors, rows, width, stride } = *from;
    let arguments = [
        places.planes.into(),
        places.scales.into(),
        x,
        factors.unwrap_or(Argument::U64(0)),
        dimension(rows).into(),
        dimension(places.rows).into(),
        dimension(width).into(),
        stride.into(),
    ];
    gpu.launch_sliced(&ROW_SLICES, "slice_rows_4", profile, row_groups(rows, width), &arguments);
}

/// Groups of kernels in which a warp slices a chunk of a row (`gpu/row_slices.cuh`).
pub(super) fn row_groups(rows: usize, width: usize) -> Groups {
    Groups::each((rows * width.div_ceil(CHUNK)).div_ceil(WARPS))
}

/// Allocates a weight that is not sliced yet.
pub(super) fn weight(gpu: &Gpu, count: usize, shape: SliceShape) -> SlicedWeight {
    let (planes, scales) = weight_lengths(count, shape);
    SlicedWeight { shape, count, planes: GpuBuffer::lasting(gpu, planes), scales: GpuBuffer::lasting(gpu, scales) }
}

impl Run<SliceWeight<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut SliceWeight<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let SlicedWeight { shape, count, ref planes, ref scales } = *op.weight;
        let all = SliceShape { rows: count * shape.rows, ..shape };
        slice_stored(self, DevicePointer::from(planes), DevicePointer::from(scales), op.w, 0, all);
    }
}

impl Shaped<SliceShape> for SlicedRows {
    fn shape(&self) -> SliceShape {
        self.shape
    }
}

impl Shaped<(usize, SliceShape)> for SlicedWeight {
    fn shape(&self) -> (usize, SliceShape) {
        (self.count, self.shape)
    }
}

/// Slices the rows of a stored weight starting at `first`; `shape` gives their number and width.
pub(super) fn slice_stored(
    gpu: &Gpu,
    planes: DevicePointer,
    scales: DevicePointer,
    w: StoredMatrix<GpuMemory>,
    first: usize,
    shape: SliceShape,
) {
    assert!((first + shape.rows) * shape.width <= w.len(), "rows of the weight");
    let (format, w) = match w {
        StoredMatrix::F32(w) => (0u32, DevicePointer::from(w)),
        StoredMatrix::Bf16(w) => (1, DevicePointer::from(w)),
        StoredMatrix::F16(w) => (2, DevicePointer::from(w)),
    };
    let groups = Groups::of(shape.rows, GROUP);
    let arguments = arguments![planes, scales, w, format, first, dimension(shape.rows), dimension(shape.width)];
    if in_fours(gpu, &[shape.width]) {
        gpu.launch_sliced(&ROW_SLICES, "slice_weight_4", shape.profile, groups, arguments);
    } else {
        gpu.launch_sliced(&SLICES, "slice_weight", shape.profile, groups, arguments);
    }
}
