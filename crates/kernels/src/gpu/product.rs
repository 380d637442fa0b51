//! Slice products on a GPU (defined in `op/product.rs`): tiles of 64 × 64 outputs from packed
//! bytes.
//!
//! Stored weights and folded gradients are sliced into the workspace. It is bounded: large operands
//! are processed in stripes, whose sums continue from the current output. [`forward_sliced`] and
//! [`grad_input_sliced`] are products of sliced operands, where a device's native matrix units can
//! take over; `product_weight.rs` has the third one, the weight gradient.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments, dimension};
use super::groups_hopper::{self, GroupsProduct, Planes, Tiles, WeightRows};
use super::hopper::{self, Epilogue, HopperProduct, Operand};
use super::low_rank_contract;
use super::memory::{DevicePointer, GpuBuffer, Parts};
use super::product_weight;
use super::program::{Program, program};
use super::slice_tiles;
use super::slices::{
    self, CHUNK_GROUP, FactoredRows, SLICES, SlicePlaces, SlicedRows, padded, plane_bytes, slice_stored,
};
use crate::Matrix;
use crate::backend::{Checked, Run};
use crate::op::{Contraction, FactorLayout, Product, ProductForward, ProductGradInput, ProductGradWeight, SliceShape};
use isobit_numerics::slices::{CHUNK, Profile};
use std::ops::Range;
use std::slice;

impl Run<ProductForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut ProductForward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        forward(self, op.y, op.x, op.w, &op.p, Epilogue::default(), workspace);
    }
}

impl Run<ProductGradInput<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut ProductGradInput<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        grad_input(self, op.dx, op.dy, op.w, &op.p, &GradientTerms::default(), workspace);
    }
}

impl Run<ProductGradWeight<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut ProductGradWeight<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        grad_weight(self, op.dw, op.dy, op.x, &op.p, op.row_starts, workspace);
    }
}

pub(super) static PRODUCT: Program = program!("product");
/// The same kernels on AMD's matrix cores.
pub(super) static PRODUCT_MFMA: Program = program!("product_mfma");

/// Rows and columns of a group's outputs: `PRODUCT_TILE` in `gpu/slices.h`.
pub(super) const TILE: usize = 64;
/// Side of the byte square that a group transposes: `TRANSPOSE` in `gpu/slices.cl`.
const TRANSPOSE: usize = 64;
/// Bytes of workspace that one sliced operand should not exceed. A single chunk may exceed it.
pub(super) const SCRATCH_BYTES: usize = 64 << 20;
/// The same on Hopper, whose products are so fast that reading and writing a gradient once more for
/// every part of an operand costs a tenth of the time, and whose cards have 80 GB and more.
const HOPPER_SCRATCH_BYTES: usize = 256 << 20;

/// Bytes of workspace that a sliced gradient should not exceed.
pub(super) fn scratch_bytes(gpu: &Gpu) -> usize {
    if slice_tiles::is_hopper(gpu) { HOPPER_SCRATCH_BYTES } else { SCRATCH_BYTES }
}

/// Columns of a group's outputs on AMD's matrix cores: `COLUMNS` in `gpu/product_mfma.cl`.
pub(super) const MFMA_COLUMNS: usize = 128;

/// The program of the product kernels, and the columns of a group's outputs.
pub(super) fn kernels(gpu: &Gpu) -> (&'static Program, usize) {
    if gpu.has_mfma() { (&PRODUCT_MFMA, MFMA_COLUMNS) } else { (&PRODUCT, TILE) }
}

/// The rows of the left operand, split into tiles with one weight each.
pub(super) struct RowTiles {
    /// Start row, end row and weight of each tile. A single weight needs no table.
    pub(super) table: Option<GpuBuffer<u32>>,
    pub(super) rows: Range<usize>,
    /// Number of tiles before each weight's first one, ending with the total.
    starts: Vec<usize>,
    /// The same for tensor-core tiles, which follow in the table. Empty if there are none.
    tensor_starts: Vec<usize>,
    /// Number of rows before each weight's first one, ending with the total.
    segments: Vec<usize>,
}

impl RowTiles {
    pub(super) fn of_rows(rows: Range<usize>) -> Self {
        let starts = vec![0, rows.len().div_ceil(TILE)];
        Self { table: None, starts, tensor_starts: Vec::new(), segments: vec![rows.start, rows.end], rows }
    }

    pub(super) fn of_segments(gpu: &Gpu, segments: &[usize]) -> Self {
        if let [first, end] = *segments {
            return Self::of_rows(first..end);
        }
        let mut table = Vec::new();
        let mut cut = |height: usize| {
            let mut starts = vec![table.len() / 3];
            for (weight, segment) in segments.windows(2).enumerate() {
                for first in (segment[0]..segment[1]).step_by(height) {
                    table.extend([first, (first + height).min(segment[1]), weight]);
                }
                starts.push(table.len() / 3);
            }
            starts
        };
        let starts = cut(TILE);
        let tensor_starts = if slice_tiles::serves(gpu) { cut(slice_tiles::ROWS) } else { Vec::new() };
        let rows = segments[0]..segments[segments.len() - 1];
        Self { table: Some(gpu.offsets(&table)), rows, starts, tensor_starts, segments: segments.to_vec() }
    }

    /// The tiles of some weights.
    pub(super) fn of_weights(&self, weights: &Range<usize>) -> Range<usize> {
        self.starts[weights.start]..self.starts[weights.end]
    }

    /// The rows of one weight.
    fn of_weight(&self, weight: usize) -> Range<usize> {
        self.segments[weight]..self.segments[weight + 1]
    }

    /// The tiles of some weights for tensor cores.
    pub(super) fn tensor(&self, weights: &Range<usize>) -> Tiles {
        let (rows, all) = ((self.rows.start, self.rows.end), self.rows.len().div_ceil(slice_tiles::ROWS));
        let Some(table) = &self.table else { return Tiles { table: None, count: all, rows } };
        let (start, end) = (self.tensor_starts[weights.start], self.tensor_starts[weights.end]);
        Tiles { table: Some((DevicePointer::from(table), 3 * start)), count: end - start, rows }
    }

    /// The table, or other memory in its place if there is none.
    pub(super) fn table(&self, instead: DevicePointer) -> DevicePointer {
        self.table.as_ref().map_or(instead, DevicePointer::from)
    }
}

/// The left operand, sliced along the contraction axis with scales `[row, chunk]`.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub(super) planes: DevicePointer,
    pub(super) scales: DevicePointer,
    /// Shape of the planes.
    pub(super) shape: SliceShape,
    /// Index of the first row in the planes.
    pub(super) base: usize,
}

impl From<&SlicedRows> for Left {
    fn from(rows: &SlicedRows) -> Self {
        let (planes, scales) = (DevicePointer::from(&rows.planes), DevicePointer::from(&rows.scales));
        Self { planes, scales, shape: rows.shape, base: 0 }
    }
}

impl Left {
    /// Some rows, in the form tensor cores take, and where their scales start.
    fn rows(&self, rows: &Range<usize>) -> (Operand, usize) {
        let (first_row, width) = (rows.start - self.base, self.shape.width);
        let plane = self.shape.rows * padded(width);
        (Operand { planes: self.planes, plane, first_row, rows: rows.len() }, first_row * width.div_ceil(CHUNK))
    }
}

/// Some rows of some weights.
#[derive(Clone, Debug)]
pub(super) struct WeightStripe {
    pub(super) weights: Range<usize>,
    pub(super) rows: Range<usize>,
}

/// A part of the right operand, sliced with one scale per row.
#[derive(Clone, Copy)]
pub(super) struct Right {
    planes: DevicePointer,
    pub(super) scales: DevicePointer,
    /// Rows per plane, and the stride between weights.
    plane_rows: usize,
    weight_rows: usize,
    /// Index of the first weight in the planes.
    first_weight: usize,
    /// The rows of each weight that take part, in plane coordinates.
    pub(super) first: usize,
    rows: usize,
    width: usize,
    profile: Profile,
}

impl Right {
    /// The first row of one weight that takes part, in plane coordinates.
    fn first_row(&self, weight: usize) -> usize {
        (weight - self.first_weight) * self.weight_rows + self.first
    }

    /// All its planes, and where the weights lie in them.
    fn tensor(&self) -> (Planes, WeightRows) {
        let Self { first_weight, weight_rows, first, rows: count, .. } = *self;
        (
            Planes { place: self.planes, rows: self.plane_rows },
            WeightRows { first_weight, step: weight_rows, first, count },
        )
    }

    /// Bytes of one plane.
    fn plane(&self) -> usize {
        self.plane_rows * padded(self.width)
    }
}

/// Where the results of a forward product go.
#[derive(Clone, Copy)]
pub(super) struct Output {
    pub(super) place: DevicePointer,
    /// Row stride in elements.
    pub(super) stride: usize,
    /// Index of the first row in the output.
    pub(super) base: usize,
    /// The column of the part's first row.
    pub(super) column: usize,
}

/// Scratch for the slices of a stored weight.
#[derive(Clone, Copy)]
pub(super) struct WeightScratch {
    planes: DevicePointer,
    scales: DevicePointer,
}

/// Rows of a stored weight that are sliced at a time: whole chunks.
pub(super) fn stored_rows(width: usize, profile: Profile) -> usize {
    rows_within(SCRATCH_BYTES, profile.slice_count() * padded(width))
}

/// How many rows of `row` bytes fit: whole chunks, at least one.
pub(super) fn rows_within(bytes: usize, row: usize) -> usize {
    (bytes / row.max(1) / CHUNK).max(1) * CHUNK
}

impl WeightScratch {
    /// `rows` is the total number of rows of all weights.
    pub(super) fn bytes(gpu: &Gpu, rows: usize, width: usize, profile: Profile) -> usize {
        let rows = rows.min(stored_rows(width, profile));
        gpu.part::<i8>(plane_bytes(SliceShape { rows, width, profile })) + gpu.part::<f32>(rows)
    }

    pub(super) fn take(parts: &mut Parts, rows: usize, width: usize, profile: Profile) -> Self {
        let rows = rows.min(stored_rows(width, profile));
        let planes = parts.take::<i8>(plane_bytes(SliceShape { rows, width, profile }));
        Self { planes, scales: parts.take::<f32>(rows) }
    }
}

/// A weight `[count, n, k]`, which the products take in parts.
pub(super) struct Weights<'a> {
    matrix: Matrix<'a, GpuMemory>,
    count: usize,
    shape: SliceShape,
    scratch: WeightScratch,
}

impl<'a> Weights<'a> {
    pub(super) fn new(matrix: Matrix<'a, GpuMemory>, count: usize, shape: SliceShape, scratch: WeightScratch) -> Self {
        Self { matrix, count, shape, scratch }
    }

    /// Rows of one weight.
    pub(super) fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Parts of at most `most` rows of each weight (whole chunks), in row order. One part if there
    /// is nothing.
    fn parts(&self, most: usize) -> Vec<WeightStripe> {
        let n = self.shape.rows;
        let (stripe, together) = match self.matrix {
            Matrix::Sliced(_) => (most, self.count),
            Matrix::Stored(_) => {
                let sliced = stored_rows(self.shape.width, self.shape.profile);
                let stripe = most.min(sliced);
                (stripe, if stripe < n { 1 } else { (sliced / n.max(1)).max(1) })
            }
        };
        let stripes: Vec<_> = (0..n.max(1)).step_by(stripe).map(|first| first..(first + stripe).min(n)).collect();
        let groups = (0..self.count).step_by(together.max(1)).map(|first| first..(first + together).min(self.count));
        groups
            .flat_map(|weights| {
                stripes.iter().map(move |rows| WeightStripe { weights: weights.clone(), rows: rows.clone() })
            })
            .collect()
    }

    /// A part as slices: kept ones, or sliced now.
    pub(super) fn part(&self, gpu: &Gpu, part: &WeightStripe) -> Right {
        let SliceShape { rows: n, width, profile } = self.shape;
        match self.matrix {
            Matrix::Sliced(w) => Right {
                planes: DevicePointer::from(&w.planes),
                scales: DevicePointer::from(&w.scales),
                plane_rows: self.count * n,
                weight_rows: n,
                first_weight: 0,
                first: part.rows.start,
                rows: part.rows.len(),
                width,
                profile,
            },
            Matrix::Stored(w) => {
                assert!(part.weights.len() == 1 || part.rows.len() == n, "consecutive rows");
                let rows = part.weights.len() * part.rows.len();
                assert!(rows <= stored_rows(width, profile).min(self.count * n), "scratch for the slices");
                let WeightScratch { planes, scales } = self.scratch;
                let shape = SliceShape { rows, width, profile };
                slice_stored(gpu, planes, scales, w, part.weights.start * n + part.rows.start, shape);
                Right {
                    planes,
                    scales,
                    plane_rows: rows,
                    weight_rows: part.rows.len(),
                    first_weight: part.weights.start,
                    first: 0,
                    rows: part.rows.len(),
                    width,
                    profile,
                }
            }
        }
    }
}

/// Whether tensor cores compute the products of all weights at once.
fn in_groups(gpu: &Gpu, tiles: &RowTiles, profile: Profile) -> bool {
    let is_hopper = slice_tiles::is_hopper(gpu);
    slice_tiles::serves(gpu) && (!is_hopper || tiles.table.is_some() || profile == Profile::X3)
}

/// Whether products over `width` take the epilogue of a linear layer with one weight.
pub(super) fn takes_epilogue(gpu: &Gpu, profile: Profile, width: usize) -> bool {
    let by_mma_sync = slice_tiles::serves(gpu) && !slice_tiles::is_hopper(gpu) && width > 0;
    by_mma_sync || hopper::serves(gpu, profile, width)
}

/// Two sliced operands of a product: the left rows in `tiles`, and their part of the weights.
pub(super) struct SlicedOperands<'a> {
    pub(super) left: Left,
    pub(super) right: Right,
    pub(super) tiles: &'a RowTiles,
    pub(super) weights: &'a Range<usize>,
}

/// `y = acc · scale` of the right rows: the forward product of sliced operands. Only tensor cores
/// support an epilogue.
pub(super) fn forward_sliced(gpu: &Gpu, y: Output, operands: &SlicedOperands, epilogue: Epilogue) {
    let SlicedOperands { left, right, tiles, weights } = *operands;
    assert_eq!((left.shape.width, left.shape.profile), (right.width, right.profile), "operands of a product");
    if in_groups(gpu, tiles, right.profile) && right.width > 0 {
        let (planes, weight_rows) = right.tensor();
        let product = GroupsProduct {
            y: y.place,
            y_start: y.column,
            y_stride: y.stride,
            y_base: y.base,
            left: Planes { place: left.planes, rows: left.shape.rows },
            left_base: left.base,
            left_scales: left.scales,
            right: planes,
            right_scales: Some(right.scales),
            weights: weight_rows,
            width: right.width,
            profile: right.profile,
            accumulate: false,
            epilogue,
        };
        return groups_hopper::product(gpu, &product, &tiles.tensor(weights));
    }
    if hopper::serves(gpu, right.profile, right.width) {
        return forward_hopper(gpu, y, operands, epilogue);
    }
    let chosen = tiles.of_weights(weights);
    let arguments = arguments![
        y.place,
        y.stride,
        dimension(y.base),
        dimension(y.column),
        left.planes,
        left.scales,
        dimension(left.shape.rows),
        dimension(left.base),
        right.planes,
        right.scales,
        dimension(right.plane_rows),
        dimension(right.first_weight),
        dimension(right.weight_rows),
        dimension(right.first),
        dimension(right.rows),
        dimension(right.width),
        tiles.table(left.scales),
        u32::from(tiles.table.is_some()),
        dimension(chosen.start),
        dimension(chosen.len()),
        dimension(tiles.rows.start),
        dimension(tiles.rows.end),
    ];
    let (program, columns) = kernels(gpu);
    let groups = Groups::each(chosen.len() * right.rows.div_ceil(columns));
    gpu.launch_sliced(program, "product_forward", right.profile, groups, arguments);
}

/// One weight at a time on Hopper's tensor cores.
fn forward_hopper(gpu: &Gpu, y: Output, operands: &SlicedOperands, epilogue: Epilogue) {
    let SlicedOperands { left, right, tiles, weights } = *operands;
    for weight in weights.clone() {
        let rows = tiles.of_weight(weight);
        let first_row = right.first_row(weight);
        let (operand, left_scales_start) = left.rows(&rows);
        let product = HopperProduct {
            y: y.place,
            y_start: (rows.start - y.base) * y.stride + y.column,
            y_stride: y.stride,
            left: operand,
            left_scales: left.scales,
            left_scales_start,
            right: Operand { planes: right.planes, plane: right.plane(), first_row, rows: right.rows },
            right_scales: Some((right.scales, first_row)),
            width: right.width,
            accumulate: false,
            epilogue,
        };
        hopper::product(gpu, &product);
    }
}

/// A gradient of a product's output: `stride` columns, of which those starting at `column` are
/// used.
#[derive(Clone, Copy)]
pub(super) struct Arriving {
    pub(super) place: DevicePointer,
    pub(super) stride: usize,
    pub(super) column: usize,
}

/// Folds the weights' scales into the gradient and slices it into the left operand, whose width is
/// the number of rows of the part. A contraction of the gradient shares the read.
pub(super) fn slice_folded(
    gpu: &Gpu,
    dy: Arriving,
    operands: &SlicedOperands,
    contraction: Option<&Contraction<GpuMemory>>,
) {
    let SlicedOperands { left, right, tiles, weights } = *operands;
    assert_eq!((left.shape.width, left.shape.profile), (right.rows, right.profile), "operands of a product");
    let SliceShape { rows: plane_rows, width, profile } = left.shape;
    let whole = tiles.table.is_none() && tiles.rows.start == left.base;
    if whole && slices::in_fours(gpu, &[width, dy.stride, dy.column, right.first]) {
        let rows = tiles.rows.len();
        let factors = Some(right.scales.at::<f32>(right.first));
        let rows = FactoredRows { x: dy.place.at::<f32>(dy.column), factors, rows, width, stride: dy.stride };
        let places = SlicePlaces { planes: left.planes, scales: left.scales, rows: plane_rows };
        return match contraction {
            Some(part) => low_rank_contract::slice_and_contract(gpu, places, &rows, slice::from_ref(part), profile),
            None => slices::slice_rows_4(gpu, places, &rows, profile),
        };
    }
    assert!(contraction.is_none(), "contracted only where `contracts_gradients` says so");
    let chosen = tiles.of_weights(weights);
    let arguments = arguments![
        left.planes,
        left.scales,
        dy.place,
        right.scales,
        tiles.table(right.scales),
        u32::from(tiles.table.is_some()),
        dimension(chosen.start),
        dimension(tiles.rows.start),
        dimension(tiles.rows.end),
        dimension(left.base),
        dimension(left.shape.rows),
        dimension(left.shape.width),
        dy.stride,
        dimension(dy.column),
        dimension(right.first_weight),
        dimension(right.weight_rows),
        dimension(right.first),
    ];
    let groups = Groups::of(chosen.len() * TILE * left.shape.width.div_ceil(CHUNK), CHUNK_GROUP);
    gpu.launch_sliced(&SLICES, "slice_folded", right.profile, groups, arguments);
}

/// Scratch for transposed parts of weights, on devices whose matrix units need them.
#[derive(Clone, Copy)]
pub(super) struct TransposedScratch {
    place: Option<DevicePointer>,
    /// Weights that are transposed at a time.
    weights: usize,
}

impl TransposedScratch {
    /// How many weights at a time, and the length of their scratch.
    fn length(gpu: &Gpu, weights: usize, rows: usize, width: usize, profile: Profile) -> Option<(usize, usize)> {
        let each = profile.slice_count() * width * padded(rows);
        let together = (SCRATCH_BYTES / each.max(1)).min(weights).max(1);
        (slice_tiles::serves(gpu) && rows > 0).then_some((together, together * each))
    }

    /// For parts of at most `rows` rows of each of `weights` weights.
    pub(super) fn bytes(gpu: &Gpu, weights: usize, rows: usize, width: usize, profile: Profile) -> usize {
        Self::length(gpu, weights, rows, width, profile).map_or(0, |(_, length)| gpu.part::<i8>(length))
    }

    pub(super) fn take(
        gpu: &Gpu,
        parts: &mut Parts,
        weights: usize,
        rows: usize,
        width: usize,
        profile: Profile,
    ) -> Self {
        let length = Self::length(gpu, weights, rows, width, profile);
        Self {
            place: length.map(|(_, length)| parts.take::<i8>(length)),
            weights: length.map_or(0, |(count, _)| count),
        }
    }
}

/// The input gradients of several weights, or of profile x3, on tensor cores: as many weights at a
/// time as the scratch for transposed parts holds.
fn grad_input_groups(
    gpu: &Gpu,
    dx: DevicePointer,
    fresh: bool,
    operands: &SlicedOperands,
    (transposed, together): (DevicePointer, usize),
    epilogue: Epilogue,
) {
    let SlicedOperands { left, right, tiles, weights } = *operands;
    let (planes, rows) = right.tensor();
    for first in weights.clone().step_by(together) {
        let part = first..(first + together).min(weights.end);
        let tiles = tiles.tensor(&part);
        if tiles.count == 0 {
            continue;
        }
        let from = WeightRows { first: right.first_row(first), ..rows };
        groups_hopper::transpose(gpu, transposed, planes, &from, part.len(), (right.width, right.profile));
        let product = GroupsProduct {
            y: dx,
            y_start: 0,
            y_stride: right.width,
            y_base: 0,
            left: Planes { place: left.planes, rows: left.shape.rows },
            left_base: left.base,
            left_scales: left.scales,
            right: Planes { place: transposed, rows: part.len() * right.width },
            right_scales: None,
            weights: WeightRows { first_weight: first, step: right.width, first: 0, count: right.width },
            width: right.rows,
            profile: right.profile,
            accumulate: !fresh,
            epilogue,
        };
        groups_hopper::product(gpu, &product, &tiles);
    }
}

/// `dx = acc`, starting from zero if `fresh` and from `dx` otherwise: the input gradient of sliced
/// operands.
pub(super) fn grad_input_sliced(
    gpu: &Gpu,
    dx: DevicePointer,
    fresh: bool,
    operands: &SlicedOperands,
    transposed: TransposedScratch,
    epilogue: Epilogue,
) {
    let SlicedOperands { left, right, tiles, weights } = *operands;
    assert_eq!((left.shape.width, left.shape.profile), (right.rows, right.profile), "operands of a product");
    if let (Some(planes), true) = (transposed.place, in_groups(gpu, tiles, right.profile) && right.rows > 0) {
        return grad_input_groups(gpu, dx, fresh, operands, (planes, transposed.weights), epilogue);
    }
    if let (Some(planes), true) = (transposed.place, hopper::serves(gpu, right.profile, right.rows)) {
        for weight in weights.clone() {
            let rows = tiles.of_weight(weight);
            if rows.is_empty() {
                continue;
            }
            transpose(gpu, planes, right, weight);
            let (operand, left_scales_start) = left.rows(&rows);
            let product = HopperProduct {
                y: dx,
                y_start: rows.start * right.width,
                y_stride: right.width,
                left: operand,
                left_scales: left.scales,
                left_scales_start,
                right: Operand { planes, plane: right.width * padded(right.rows), first_row: 0, rows: right.width },
                right_scales: None,
                width: right.rows,
                accumulate: !fresh,
                epilogue,
            };
            hopper::product(gpu, &product);
        }
        return;
    }
    let chosen = tiles.of_weights(weights);
    let arguments = arguments![
        dx,
        left.planes,
        left.scales,
        dimension(left.shape.rows),
        dimension(left.base),
        right.planes,
        dimension(right.plane_rows),
        dimension(right.first_weight),
        dimension(right.weight_rows),
        dimension(right.first),
        dimension(right.width),
        dimension(right.rows),
        u32::from(fresh),
        tiles.table(right.scales),
        u32::from(tiles.table.is_some()),
        dimension(chosen.start),
        dimension(chosen.len()),
        dimension(tiles.rows.start),
        dimension(tiles.rows.end),
    ];
    let (program, columns) = kernels(gpu);
    let groups = Groups::each(chosen.len() * right.width.div_ceil(columns));
    gpu.launch_sliced(program, "product_input", right.profile, groups, arguments);
}

/// Transposes a part of one weight.
fn transpose(gpu: &Gpu, planes: DevicePointer, right: Right, weight: usize) {
    let arguments = arguments![
        planes,
        right.planes,
        dimension(right.plane_rows),
        right.first_row(weight),
        dimension(right.rows),
        dimension(right.width),
    ];
    let tiles = padded(right.rows) / TRANSPOSE * right.width.div_ceil(TRANSPOSE);
    gpu.launch_sliced(&SLICES, "transpose_planes", right.profile, Groups::each(tiles), arguments);
}

/// Columns of a gradient that are folded and sliced at a time.
pub(super) fn folded_columns(gpu: &Gpu, p: &Product) -> usize {
    rows_within(scratch_bytes(gpu), p.profile.slice_count() * p.rows())
}

pub(super) fn folded_shape(gpu: &Gpu, p: &Product) -> SliceShape {
    SliceShape { rows: p.rows(), width: folded_columns(gpu, p).min(p.n), profile: p.profile }
}

pub(super) use product_weight::grad_weight;

pub(super) fn workspace(gpu: &Gpu, p: &Product) -> usize {
    let weight = WeightScratch::bytes(gpu, p.weights() * p.n, p.k, p.profile);
    let folded = folded_shape(gpu, p);
    let input = weight
        + gpu.part::<i8>(plane_bytes(folded))
        + gpu.part::<f32>(folded.rows * folded.width.div_ceil(CHUNK))
        + TransposedScratch::bytes(gpu, p.weights(), folded.width, p.k, p.profile);
    input.max(product_weight::workspace(gpu, p))
}

fn weights<'a>(w: Matrix<'a, GpuMemory>, p: &Product, parts: &mut Parts) -> Weights<'a> {
    let scratch = WeightScratch::take(parts, p.weights() * p.n, p.k, p.profile);
    let shape = SliceShape { rows: p.n, width: p.k, profile: p.profile };
    Weights::new(w, p.weights(), shape, scratch)
}

pub(super) fn forward(
    gpu: &Gpu,
    y: &mut GpuBuffer<f32>,
    x: &SlicedRows,
    w: Matrix<GpuMemory>,
    p: &Product,
    epilogue: Epilogue,
    workspace: &mut GpuBuffer<u8>,
) {
    let weights = weights(w, p, &mut Parts::new(gpu, workspace));
    let tiles = RowTiles::of_segments(gpu, p.segments);
    for part in weights.parts(p.n.next_multiple_of(CHUNK).max(CHUNK)) {
        let right = weights.part(gpu, &part);
        let y = Output { place: DevicePointer::from(&*y), stride: p.n, base: 0, column: part.rows.start };
        let epilogue = epilogue.at_column(part.rows.start);
        let operands = SlicedOperands { left: Left::from(x), right, tiles: &tiles, weights: &part.weights };
        forward_sliced(gpu, y, &operands, epilogue);
    }
}

/// What a linear layer adds to an input gradient.
#[derive(Default)]
pub(super) struct GradientTerms<'a> {
    /// Computed as the gradient is sliced, before the epilogue reads it. Only where
    /// [`contracts_gradients`].
    pub(super) contraction: Option<&'a Contraction<'a, GpuMemory>>,
    pub(super) epilogue: Epilogue,
}

/// Whether [`grad_input`] can contract the gradient as it slices it: whole rows at once.
pub(super) fn contracts_gradients(gpu: &Gpu, w: Matrix<GpuMemory>, p: &Product, part: &Contraction<GpuMemory>) -> bool {
    let rows_at_once = match w {
        Matrix::Sliced(_) => folded_columns(gpu, p),
        Matrix::Stored(_) => folded_columns(gpu, p).min(stored_rows(p.k, p.profile)),
    };
    p.n <= rows_at_once
        && slices::in_fours(gpu, &[p.n])
        && low_rank_contract::serves_slicing(gpu, slice::from_ref(part), FactorLayout::WidthMajor)
}

pub(super) fn grad_input(
    gpu: &Gpu,
    dx: &mut GpuBuffer<f32>,
    dy: &GpuBuffer<f32>,
    w: Matrix<GpuMemory>,
    p: &Product,
    terms: &GradientTerms,
    workspace: &mut GpuBuffer<u8>,
) {
    let GradientTerms { contraction, epilogue } = *terms;
    let mut parts = Parts::new(gpu, workspace);
    let weights = weights(w, p, &mut parts);
    let scratch = folded_shape(gpu, p);
    let planes = parts.take::<i8>(plane_bytes(scratch));
    let scales = parts.take::<f32>(scratch.rows * scratch.width.div_ceil(CHUNK));
    let transposed = TransposedScratch::take(gpu, &mut parts, p.weights(), scratch.width, p.k, p.profile);
    let tiles = RowTiles::of_segments(gpu, p.segments);
    for part in weights.parts(folded_columns(gpu, p)) {
        let right = weights.part(gpu, &part);
        let left = Left { planes, scales, shape: SliceShape { width: part.rows.len(), ..scratch }, base: 0 };
        let dy = Arriving { place: DevicePointer::from(dy), stride: p.n, column: part.rows.start };
        let operands = SlicedOperands { left, right, tiles: &tiles, weights: &part.weights };
        slice_folded(gpu, dy, &operands, contraction);
        let fresh = part.rows.start == 0 && !p.accumulate;
        // The sums are complete only with the last part.
        let epilogue = if part.rows.end == p.n { epilogue } else { Epilogue::default() };
        grad_input_sliced(gpu, DevicePointer::from(&*dx), fresh, &operands, transposed, epilogue);
    }
}
