//! LM head and cross-entropy on a GPU (defined in `op/head_loss.rs`): the workspace holds the
//! logits of one batch of tokens and one stripe of the vocabulary.
//!
//! Batches are whole token chunks and stripes whole vocabulary blocks, both in ascending order, so
//! the sums in `dh` and `dhead` continue from their current values. The sizes of both change memory
//! and time, not bits.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::hopper::Epilogue;
use super::memory::{DevicePointer, GpuBuffer, Parts};
use super::product::{
    Arriving, Left, Output, Right, RowTiles, SCRATCH_BYTES, SlicedOperands, TransposedScratch, WeightScratch,
    WeightStripe, Weights, forward_sliced, grad_input_sliced, slice_folded, stored_rows,
};
use super::product_weight::{BatchLimits, ColumnSlices, TokenChunks, grad_weight_sliced};
use super::program::{Program, program};
use super::slices::{SlicedRows, plane_bytes};
use crate::Matrix;
use crate::backend::{Checked, Device, Run};
use crate::op::head_loss::VOCABULARY_BLOCK;
use crate::op::{HeadLoss, HeadLossBackward, HeadLossForward, HeadLossStep, SliceShape, token_blocks};
use isobit_numerics::elementary::SoftCap;
use isobit_numerics::lanes::LANES;
use isobit_numerics::slices::CHUNK;
use std::ops::Range;

pub(super) static HEAD_LOSS: Program = program!("head_loss");

const _: () = assert!(VOCABULARY_BLOCK == CHUNK, "a vocabulary block is one chunk of the input gradient");

/// Tokens per batch, if their chunks allow it.
const BATCH_TOKENS: usize = 4096;
/// Tokens or blocks that a group reduces: `TEAMS` in `gpu/head_loss.cl`.
const TEAMS: usize = GROUP / LANES;

/// Sizes of the data in flight.
#[derive(Clone, Copy)]
struct Sizes {
    limits: BatchLimits,
    /// Vocabulary rows per stripe.
    stripe: usize,
    /// Vocabulary blocks.
    blocks: usize,
}

impl Sizes {
    fn new(gpu: &Gpu, p: &HeadLoss) -> Self {
        let limits = BatchLimits::new(gpu, BATCH_TOKENS, p.tokens());
        let logits = SCRATCH_BYTES / size_of::<f32>() / limits.tokens.max(1) / VOCABULARY_BLOCK;
        let stripe = (logits.max(1) * VOCABULARY_BLOCK).min(stored_rows(p.hidden, p.profile)).min(p.vocabulary);
        Self { limits, stripe, blocks: p.vocabulary.div_ceil(VOCABULARY_BLOCK) }
    }

    fn gradient(&self, p: &HeadLoss) -> SliceShape {
        SliceShape { rows: self.limits.tokens, width: self.stripe, profile: p.profile }
    }
}

pub(super) fn workspace(gpu: &Gpu, p: &HeadLoss) -> usize {
    let sizes = Sizes::new(gpu, p);
    let Sizes { limits, stripe, blocks } = sizes;
    let both = WeightScratch::bytes(gpu, p.vocabulary, p.hidden, p.profile) + gpu.part::<f32>(limits.tokens * stripe);
    let forward = 3 * gpu.part::<f32>(limits.tokens * blocks) + gpu.part::<f32>(limits.tokens);
    let folded = sizes.gradient(p);
    let backward = gpu.part::<i8>(plane_bytes(folded))
        + gpu.part::<f32>(folded.rows * folded.width.div_ceil(CHUNK))
        + ColumnSlices::bytes(gpu, limits, stripe, p.profile)
        + ColumnSlices::bytes(gpu, limits, p.hidden, p.profile)
        + TransposedScratch::bytes(gpu, 1, stripe, p.hidden, p.profile);
    both + forward.max(backward)
}

/// The operands of the logits and the scratch for a stripe of them.
struct Logits<'a> {
    hidden: Left,
    head: Weights<'a>,
    place: DevicePointer,
    stripe: usize,
    cap: Option<SoftCap>,
}

impl<'a> Logits<'a> {
    fn new(h: &SlicedRows, head: Matrix<'a, GpuMemory>, p: &HeadLoss, sizes: &Sizes, parts: &mut Parts) -> Self {
        let scratch = WeightScratch::take(parts, p.vocabulary, p.hidden, p.profile);
        let shape = SliceShape { rows: p.vocabulary, width: p.hidden, profile: p.profile };
        let head = Weights::new(head, 1, shape, scratch);
        let place = parts.take::<f32>(sizes.limits.tokens * sizes.stripe);
        Self { hidden: Left::from(h), head, place, stripe: sizes.stripe, cap: p.soft_cap() }
    }

    /// Vocabulary rows of each stripe.
    fn stripes(&self) -> impl Iterator<Item = Range<usize>> {
        let (vocabulary, stripe) = (self.head.rows(), self.stripe);
        (0..vocabulary).step_by(stripe).map(move |first| first..(first + stripe).min(vocabulary))
    }

    /// Computes the logits of some tokens and one stripe: `[token, vocabulary row of the stripe]`.
    fn compute(&self, gpu: &Gpu, tiles: &RowTiles, tokens: &Range<usize>, stripe: &Range<usize>) -> Right {
        let right = self.head.part(gpu, &WeightStripe { weights: 0..1, rows: stripe.clone() });
        let z = Output { place: self.place, stride: stripe.len(), base: tokens.start, column: 0 };
        let operands = SlicedOperands { left: self.hidden, right, tiles, weights: &(0..1) };
        forward_sliced(gpu, z, &operands, Epilogue::default());
        if let Some(SoftCap { limit, inverse }) = self.cap {
            let length = tokens.len() * stripe.len();
            gpu.launch(&HEAD_LOSS, "head_cap", Groups::over(length), arguments![self.place, length, limit, inverse]);
        }
        right
    }
}

impl Run<HeadLossForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut HeadLossForward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let tokens = p.tokens();
        let mut parts = Parts::new(self, workspace);
        let sizes = Sizes::new(self, p);
        let logits = Logits::new(op.h, op.head, p, &sizes, &mut parts);
        let most = sizes.limits.tokens;
        let [maxima, sums] = [(); 2].map(|()| parts.take::<f32>(most * sizes.blocks));
        let firsts = parts.take::<u32>(most * sizes.blocks);
        let label_logits = parts.take::<f32>(most);
        for first in (0..tokens).step_by(most.max(1)) {
            let batch = first..(first + most).min(tokens);
            let (base, count) = (dimension(batch.start), dimension(batch.len()));
            let tiles = RowTiles::of_rows(batch.clone());
            for stripe in logits.stripes() {
                logits.compute(self, &tiles, &batch, &stripe);
                let pairs = batch.len() * stripe.len().div_ceil(VOCABULARY_BLOCK);
                let arguments = arguments![
                    maxima,
                    sums,
                    firsts,
                    label_logits,
                    logits.place,
                    op.labels,
                    base,
                    count,
                    dimension(stripe.start),
                    dimension(stripe.len()),
                    dimension(sizes.blocks),
                ];
                self.launch(&HEAD_LOSS, "head_blocks", Groups::each(pairs.div_ceil(TEAMS)), arguments);
            }
            let (labels, blocks) = (op.labels, dimension(sizes.blocks));
            let arguments = arguments![
                &*op.loss,
                &*op.lse,
                &*op.best,
                maxima,
                sums,
                firsts,
                label_logits,
                labels,
                base,
                count,
                blocks
            ];
            self.launch(&HEAD_LOSS, "head_combine", Groups::each(batch.len().div_ceil(TEAMS)), arguments);
        }
    }
}

impl Run<HeadLossBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut HeadLossBackward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        let (p, profile) = (&op.p, op.p.profile);
        let dhead = op.dhead.as_deref().map(DevicePointer::from);
        let mut parts = Parts::new(self, workspace);
        let sizes = Sizes::new(self, p);
        let logits = Logits::new(op.rows, op.head, p, &sizes, &mut parts);
        let scratch = sizes.gradient(p);
        let planes = parts.take::<i8>(plane_bytes(scratch));
        let scales = parts.take::<f32>(scratch.rows * scratch.width.div_ceil(CHUNK));
        let dz_columns = ColumnSlices::take(&mut parts, sizes.limits, sizes.stripe, profile);
        let h_columns = ColumnSlices::take(&mut parts, sizes.limits, p.hidden, profile);
        let transposed = TransposedScratch::take(self, &mut parts, 1, sizes.stripe, p.hidden, profile);
        let chunks = TokenChunks::new(self, token_blocks(p.row_starts, CHUNK).collect());
        for batch in chunks.batches(sizes.limits) {
            let rows = chunks.tokens(&batch);
            let tiles = RowTiles::of_rows(rows.clone());
            if dhead.is_some() {
                h_columns.slice(self, DevicePointer::from(op.h), 0, &chunks, &batch, profile);
            }
            for stripe in logits.stripes() {
                let right = logits.compute(self, &tiles, &rows, &stripe);
                let (first, columns) = (dimension(stripe.start), dimension(stripe.len()));
                let groups = stripe.len().div_ceil(GROUP);
                // The kernel takes a limit of zero for none.
                let SoftCap { limit, inverse } = logits.cap.unwrap_or(SoftCap { limit: 0.0, inverse: 0.0 });
                let arguments = arguments![
                    logits.place,
                    op.labels,
                    op.lse,
                    op.weight,
                    dimension(rows.start),
                    first,
                    columns,
                    dimension(groups),
                    limit,
                    inverse
                ];
                self.launch(&HEAD_LOSS, "head_gradient", Groups::each(rows.len() * groups), arguments);
                let shape = SliceShape { rows: rows.len(), width: stripe.len(), profile };
                let left = Left { planes, scales, shape, base: rows.start };
                let dz = Arriving { place: logits.place, stride: stripe.len(), column: 0 };
                let operands = SlicedOperands { left, right, tiles: &tiles, weights: &(0..1) };
                slice_folded(self, dz, &operands);
                let (dh, fresh) = (DevicePointer::from(&*op.dh), stripe.start == 0);
                grad_input_sliced(self, dh, fresh, &operands, transposed, Epilogue::default());
                if let Some(dhead) = dhead {
                    let dz_columns = dz_columns.narrowed(stripe.len());
                    dz_columns.slice(self, logits.place, rows.start, &chunks, &batch, profile);
                    let operands = (dz_columns, h_columns);
                    let run = (batch.clone(), stripe.start);
                    grad_weight_sliced(self, dhead, &[run], operands, &chunks, &batch, profile);
                }
            }
        }
        let length = op.dh.len();
        self.launch(
            &HEAD_LOSS,
            "head_ignored",
            Groups::over(length),
            arguments![&*op.dh, op.labels, length, dimension(p.hidden)],
        );
    }
}

impl Run<HeadLossStep<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut HeadLossStep<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        self.run_in(workspace, op.forward());
        self.run_in(workspace, op.backward());
    }
}
