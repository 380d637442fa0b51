//! Weight gradients on a GPU (defined in `op/product.rs`): columns of tokens are sliced into the
//! workspace, in batches of whole token chunks whose sums continue from the current gradient. The
//! number of tokens per batch changes memory and time, not bits.
//!
//! Tensor cores take columns stored along the tokens, in whole blocks ([`weight_hopper`]); the
//! portable kernels take rows of tokens.

use super::device::{Gpu, Groups, arguments, dimension};
use super::memory::{DevicePointer, GpuBuffer, Parts};
use super::product::{SCRATCH_BYTES, TILE, kernels, rows_within, scratch_bytes};
use super::slice_tiles::{self, BLOCK};
use super::slices::{SLICES, padded};
use super::weight_hopper::{self, Chunks, Columns};
use crate::op::{Product, token_blocks};
use isobit_numerics::slices::{CHUNK, Profile};
use std::ops::Range;

/// Columns that a group slices along tokens: `COLUMNS` in `gpu/slices.cl`.
const COLUMNS: usize = 64;
/// Tokens per scale of a column in the scratch: if rows of data are shorter than this on average,
/// batches are smaller.
const TOKENS_PER_SCALE: usize = 64;
/// Bytes of sliced columns on tensor cores, at least: each batch reads and writes the whole
/// gradient, which would dominate the time of batches of [`SCRATCH_BYTES`].
const TENSOR_SCRATCH_BYTES: usize = 2 * SCRATCH_BYTES;

/// Limits of a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchLimits {
    /// Tokens, including gaps between chunks.
    pub(super) tokens: usize,
    /// Tokens in the planes, including those that pad the blocks of tensor cores.
    places: usize,
    chunks: usize,
}

impl BatchLimits {
    /// For batches of at most `most` of all `tokens`; one chunk always fits.
    pub(super) fn new(gpu: &Gpu, most: usize, tokens: usize) -> Self {
        let tokens = most.max(CHUNK).min(tokens);
        if slice_tiles::serves(gpu) {
            // An eighth more: chunks of odd lengths pad their last block.
            let places = (tokens + tokens / 8).next_multiple_of(BLOCK);
            return Self { tokens, places, chunks: places / BLOCK };
        }
        Self { tokens, places: tokens, chunks: tokens.div_ceil(TOKENS_PER_SCALE) }
    }
}

/// The token chunks of a weight gradient, on the host and as a table on the device.
pub(super) struct TokenChunks {
    chunks: Vec<Range<usize>>,
    /// Where each chunk lies among all planes.
    places: Vec<Range<usize>>,
    /// Start and length of each chunk; on tensor cores also its first block.
    table: GpuBuffer<u32>,
}

impl TokenChunks {
    pub(super) fn new(gpu: &Gpu, chunks: Vec<Range<usize>>) -> Self {
        if !slice_tiles::serves(gpu) {
            let table: Vec<_> = chunks.iter().flat_map(|chunk| [chunk.start, chunk.len()]).collect();
            return Self { table: gpu.offsets(&table), places: chunks.clone(), chunks };
        }
        let (mut places, mut table, mut next) = (Vec::new(), Vec::new(), 0);
        for chunk in &chunks {
            let end = next + chunk.len().next_multiple_of(BLOCK);
            table.extend([chunk.start, chunk.len(), next / BLOCK]);
            places.push(next..end);
            next = end;
        }
        Self { table: gpu.offsets(&table), places, chunks }
    }

    /// Splits the chunks into consecutive batches within the limits.
    pub(super) fn batches(&self, limits: BatchLimits) -> Vec<Range<usize>> {
        let mut batches: Vec<Range<usize>> = Vec::new();
        for (index, chunk) in self.chunks.iter().enumerate() {
            let fits = |batch: &Range<usize>| {
                batch.len() < limits.chunks
                    && chunk.end - self.chunks[batch.start].start <= limits.tokens
                    && self.places[index].end - self.places[batch.start].start <= limits.places
            };
            match batches.last_mut() {
                Some(batch) if fits(batch) => batch.end = index + 1,
                _ => batches.push(index..index + 1),
            }
        }
        batches
    }

    pub(super) fn tokens(&self, batch: &Range<usize>) -> Range<usize> {
        self.chunks[batch.start].start..self.chunks[batch.end - 1].end
    }

    /// A batch in the form tensor cores take.
    fn blocks(&self, batch: &Range<usize>) -> Chunks<'_> {
        let (first_block, end) = (self.places[batch.start].start / BLOCK, self.places[batch.end - 1].end / BLOCK);
        let (table, first, count) = (&self.table, batch.start, batch.len());
        Chunks { table, first, count, first_block, blocks: end - first_block }
    }
}

/// Columns sliced along the tokens of a batch: an operand of a weight gradient.
#[derive(Clone, Copy)]
pub(super) struct ColumnSlices {
    planes: DevicePointer,
    scales: DevicePointer,
    width: usize,
}

impl ColumnSlices {
    /// Lengths of the planes and the scales: with padded widths, enough for either layout.
    fn lengths(limits: BatchLimits, width: usize, profile: Profile) -> (usize, usize) {
        (profile.slice_count() * limits.places * padded(width), limits.chunks * padded(width))
    }

    pub(super) fn bytes(gpu: &Gpu, limits: BatchLimits, width: usize, profile: Profile) -> usize {
        let (planes, scales) = Self::lengths(limits, width, profile);
        gpu.part::<i8>(planes) + gpu.part::<f32>(scales)
    }

    pub(super) fn take(parts: &mut Parts, limits: BatchLimits, width: usize, profile: Profile) -> Self {
        let (planes, scales) = Self::lengths(limits, width, profile);
        Self { planes: parts.take::<i8>(planes), scales: parts.take::<f32>(scales), width }
    }

    /// The same scratch for fewer columns.
    pub(super) fn narrowed(self, width: usize) -> Self {
        assert!(width <= self.width, "scratch for the columns");
        Self { width, ..self }
    }

    fn columns(self) -> Columns {
        Columns { planes: self.planes, scales: self.scales, width: self.width }
    }

    /// Slices the columns of `x` over a batch of chunks; `x_base` is the token in the first row of
    /// `x`.
    pub(super) fn slice(
        &self,
        gpu: &Gpu,
        x: DevicePointer,
        x_base: usize,
        chunks: &TokenChunks,
        batch: &Range<usize>,
        profile: Profile,
    ) {
        if slice_tiles::serves(gpu) {
            return weight_hopper::slice(gpu, self.columns(), x, x_base, chunks.blocks(batch), profile);
        }
        let tokens = chunks.tokens(batch);
        let groups = Groups::each(batch.len() * (padded(self.width) / COLUMNS));
        let arguments = arguments![
            self.planes,
            self.scales,
            x,
            &chunks.table,
            dimension(batch.start),
            dimension(tokens.start),
            dimension(x_base),
            dimension(tokens.len()),
            dimension(self.width),
        ];
        gpu.launch_sliced(&SLICES, "slice_columns", profile, groups, arguments);
    }
}

/// Chunks of a batch, and the first row of the gradient they are added to.
pub(super) type ChunkRun = (Range<usize>, usize);

/// Adds chunks of a batch to `dw`: the weight gradients of sliced operands.
pub(super) fn grad_weight_sliced(
    gpu: &Gpu,
    dw: DevicePointer,
    runs: &[ChunkRun],
    operands: (ColumnSlices, ColumnSlices),
    chunks: &TokenChunks,
    batch: &Range<usize>,
    profile: Profile,
) {
    let (left, right) = operands;
    if slice_tiles::serves(gpu) {
        let operands = (left.columns(), right.columns());
        return weight_hopper::product(gpu, dw, runs, operands, chunks.blocks(batch), profile);
    }
    let tokens = chunks.tokens(batch);
    let (program, columns) = kernels(gpu);
    for (run, first_row) in runs {
        let arguments = arguments![
            dw,
            *first_row,
            dimension(left.width),
            dimension(right.width),
            left.planes,
            left.scales,
            right.planes,
            right.scales,
            dimension(tokens.len()),
            &chunks.table,
            dimension(run.start),
            dimension(run.end),
            dimension(batch.start),
            dimension(tokens.start),
        ];
        let groups = Groups::each(left.width.div_ceil(TILE) * right.width.div_ceil(columns));
        gpu.launch_sliced(program, "product_weight", profile, groups, arguments);
    }
}

fn batch_limits(gpu: &Gpu, p: &Product) -> BatchLimits {
    let tensor = TENSOR_SCRATCH_BYTES.max(scratch_bytes(gpu));
    let scratch = if slice_tiles::serves(gpu) { tensor } else { SCRATCH_BYTES };
    let most = rows_within(scratch, p.profile.slice_count() * (padded(p.n) + padded(p.k)));
    // Batches of equal size: a small last one would need as much workspace and more time.
    let even = p.rows().div_ceil(p.rows().div_ceil(most).max(1)).next_multiple_of(CHUNK);
    BatchLimits::new(gpu, even, p.rows())
}

pub(super) fn workspace(gpu: &Gpu, p: &Product) -> usize {
    let limits = batch_limits(gpu, p);
    [p.n, p.k].into_iter().map(|width| ColumnSlices::bytes(gpu, limits, width, p.profile)).sum()
}

/// The token chunks of all weights, each with the index of its weight.
fn chunks_of_weights(p: &Product, row_starts: &[usize]) -> (Vec<Range<usize>>, Vec<usize>) {
    let (mut chunks, mut weights) = (Vec::new(), Vec::new());
    for chunk in token_blocks(row_starts, CHUNK) {
        let before = p.segments.partition_point(|&start| start <= chunk.start);
        // Tokens outside all segments have no weight.
        if (1..p.segments.len()).contains(&before) {
            assert!(chunk.end <= p.segments[before], "row starts include the segment borders");
            chunks.push(chunk);
            weights.push(before - 1);
        }
    }
    (chunks, weights)
}

pub(super) fn grad_weight(
    gpu: &Gpu,
    dw: &mut GpuBuffer<f32>,
    dy: &GpuBuffer<f32>,
    x: &GpuBuffer<f32>,
    p: &Product,
    row_starts: &[usize],
    workspace: &mut GpuBuffer<u8>,
) {
    let mut parts = Parts::new(gpu, workspace);
    let limits = batch_limits(gpu, p);
    let left = ColumnSlices::take(&mut parts, limits, p.n, p.profile);
    let right = ColumnSlices::take(&mut parts, limits, p.k, p.profile);
    let (chunks, weights) = chunks_of_weights(p, row_starts);
    let chunks = TokenChunks::new(gpu, chunks);
    for batch in chunks.batches(limits) {
        left.slice(gpu, DevicePointer::from(dy), 0, &chunks, &batch, p.profile);
        right.slice(gpu, DevicePointer::from(x), 0, &chunks, &batch, p.profile);
        let (mut runs, mut first): (Vec<ChunkRun>, usize) = (Vec::new(), batch.start);
        for same in weights[batch.clone()].chunk_by(|a, b| a == b) {
            runs.push((first..first + same.len(), same[0] * p.n));
            first += same.len();
        }
        grad_weight_sliced(gpu, DevicePointer::from(&*dw), &runs, (left, right), &chunks, &batch, p.profile);
    }
}
