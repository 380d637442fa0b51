//! LM head and cross-entropy on a GPU (defined in `op/head_loss.rs`): the workspace holds the
//! logits of one batch of tokens and one stripe of the vocabulary; where loss and gradient are
//! computed in one op, those of a smaller batch and all stripes, which then are computed only once.
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
use super::program::{Program, files};
use super::runtime::Language;
use super::slice_tiles;
use super::slices::{self, SlicedRows, plane_bytes};
use crate::Matrix;
use crate::backend::{Checked, Device, Run};
use crate::op::head_loss::VOCABULARY_BLOCK;
use crate::op::{HeadLoss, HeadLossBackward, HeadLossForward, HeadLossStep, SliceShape, token_blocks};
use isobit_numerics::elementary::SoftCap;
use isobit_numerics::lanes::LANES;
use isobit_numerics::slices::CHUNK;
use std::ops::Range;

pub(super) static HEAD_LOSS: Program =
    Program { name: "head_loss", text: files!("head_gradient.h", "head_loss.cl"), language: Language::Portable };
/// The gradient of a frozen head's logits, sliced where it is computed.
pub(super) static HEAD_SLICES: Program = Program {
    name: "head_slices",
    text: files!("quantise.cuh", "row_slices.cuh", "head_gradient.h", "head_slices.cu"),
    language: Language::Cuda,
};

const _: () = assert!(VOCABULARY_BLOCK == CHUNK, "a vocabulary block is one chunk of the input gradient");

/// Tokens per batch, if their chunks allow it.
const BATCH_TOKENS: usize = 4096;
/// Bytes that logits of a batch and the whole vocabulary may take, and on Hopper, whose cards have
/// 80 GB and more.
const KEPT_BYTES: usize = 320 << 20;
const HOPPER_KEPT_BYTES: usize = 640 << 20;
/// Vocabulary blocks of a stripe, times the tokens of its batch.
const STRIPE_BLOCKS: usize = SCRATCH_BYTES / size_of::<f32>() / VOCABULARY_BLOCK;
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
        Self::of_batches(gpu, p, BATCH_TOKENS, p.tokens())
    }

    /// Of batches whose logits are kept for all of the vocabulary; none if even the smallest batch
    /// has too many.
    fn kept(gpu: &Gpu, p: &HeadLoss) -> Option<Self> {
        let most = Self::kept_tokens(gpu, p);
        (most > 0).then(|| Self::of_batches(gpu, p, most, p.tokens()))
    }

    /// Tokens per batch in that case.
    fn kept_tokens(gpu: &Gpu, p: &HeadLoss) -> usize {
        let bytes = if slice_tiles::is_hopper(gpu) { HOPPER_KEPT_BYTES } else { KEPT_BYTES };
        (bytes / size_of::<f32>() / p.vocabulary.max(1) / CHUNK * CHUNK).min(BATCH_TOKENS)
    }

    fn of_batches(gpu: &Gpu, p: &HeadLoss, most: usize, tokens: usize) -> Self {
        let limits = BatchLimits::new(gpu, most, tokens);
        let logits = STRIPE_BLOCKS / limits.tokens.max(1);
        let stripe = (logits.max(1) * VOCABULARY_BLOCK).min(stored_rows(p.hidden, p.profile)).min(p.vocabulary);
        Self { limits, stripe, blocks: p.vocabulary.div_ceil(VOCABULARY_BLOCK) }
    }

    /// The vocabulary rows of each stripe.
    fn stripes(&self, vocabulary: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let stripe = self.stripe;
        (0..vocabulary).step_by(stripe.max(1)).map(move |first| first..(first + stripe).min(vocabulary))
    }

    /// Lengths of the logits of every stripe that has a place of its own.
    fn logits(&self, p: &HeadLoss, kept: bool) -> Vec<usize> {
        let all = self.stripes(p.vocabulary).map(|stripe| self.limits.tokens * stripe.len());
        all.take(if kept { usize::MAX } else { 1 }).collect()
    }

    fn gradient(&self, p: &HeadLoss) -> SliceShape {
        SliceShape { rows: self.limits.tokens, width: self.stripe, profile: p.profile }
    }

    /// Bytes of the operands of the logits and of the logits themselves.
    fn logits_bytes(&self, gpu: &Gpu, p: &HeadLoss, kept: bool) -> usize {
        let logits: usize = self.logits(p, kept).into_iter().map(|length| gpu.part::<f32>(length)).sum();
        WeightScratch::bytes(gpu, p.vocabulary, p.hidden, p.profile) + logits
    }

    fn reduction_bytes(&self, gpu: &Gpu) -> usize {
        3 * gpu.part::<f32>(self.limits.tokens * self.blocks) + gpu.part::<f32>(self.limits.tokens)
    }

    fn gradient_bytes(&self, gpu: &Gpu, p: &HeadLoss) -> usize {
        let folded = self.gradient(p);
        gpu.part::<i8>(plane_bytes(folded))
            + gpu.part::<f32>(folded.rows * folded.width.div_ceil(CHUNK))
            + TransposedScratch::bytes(gpu, 1, self.stripe, p.hidden, p.profile)
    }
}

pub(super) fn workspace(gpu: &Gpu, p: &HeadLoss) -> usize {
    most_bytes(gpu, p, BATCH_TOKENS, |sizes| {
        let columns = [sizes.stripe, p.hidden].map(|width| ColumnSlices::bytes(gpu, sizes.limits, width, p.profile));
        let backward = sizes.gradient_bytes(gpu, p) + columns.iter().sum::<usize>();
        sizes.logits_bytes(gpu, p, false) + sizes.reduction_bytes(gpu).max(backward)
    })
}

pub(super) fn step_workspace(gpu: &Gpu, p: &HeadLoss) -> usize {
    let most = Sizes::kept_tokens(gpu, p);
    if most == 0 {
        return workspace(gpu, p);
    }
    most_bytes(gpu, p, most, |sizes| {
        sizes.logits_bytes(gpu, p, true) + sizes.reduction_bytes(gpu) + sizes.gradient_bytes(gpu, p)
    })
}

/// The most bytes of a batch of up to so many of the op's tokens. Fewer tokens have wider stripes
/// and can need more; a plan, which counts the longest rows, must count them too. With stripes of
/// one width, more tokens need more.
fn most_bytes(gpu: &Gpu, p: &HeadLoss, most: usize, bytes: impl Fn(&Sizes) -> usize) -> usize {
    let widest = (1..=p.vocabulary.div_ceil(VOCABULARY_BLOCK)).map(|blocks| STRIPE_BLOCKS / blocks);
    let fewer = widest.filter(|tokens| *tokens < p.tokens());
    let all = fewer.chain([p.tokens()]).map(|tokens| bytes(&Sizes::of_batches(gpu, p, most, tokens)));
    all.max().unwrap_or(0)
}

/// The operands of the logits and the scratch for them: for one stripe, or for each.
struct Logits<'a> {
    hidden: Left,
    head: Weights<'a>,
    places: Vec<DevicePointer>,
    sizes: Sizes,
    cap: Option<SoftCap>,
}

impl<'a> Logits<'a> {
    fn new(
        h: &SlicedRows,
        head: Matrix<'a, GpuMemory>,
        p: &HeadLoss,
        sizes: Sizes,
        kept: bool,
        parts: &mut Parts,
    ) -> Self {
        let scratch = WeightScratch::take(parts, p.vocabulary, p.hidden, p.profile);
        let shape = SliceShape { rows: p.vocabulary, width: p.hidden, profile: p.profile };
        let head = Weights::new(head, 1, shape, scratch);
        let places = sizes.logits(p, kept).into_iter().map(|length| parts.take::<f32>(length)).collect();
        Self { hidden: Left::from(h), head, places, sizes, cap: p.soft_cap() }
    }

    fn stripes(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        self.sizes.stripes(self.head.rows())
    }

    /// Limit of the soft cap and its inverse; kernels take a limit of zero for none.
    fn cap_numbers(&self) -> (f32, f32) {
        self.cap.map_or((0.0, 0.0), |SoftCap { limit, inverse }| (limit, inverse))
    }

    /// Where the logits of a stripe are: `[token, vocabulary row of the stripe]`.
    fn place(&self, stripe: &Range<usize>) -> DevicePointer {
        self.places[if self.places.len() == 1 { 0 } else { stripe.start / self.sizes.stripe }]
    }

    /// The head's rows of a stripe.
    fn right(&self, gpu: &Gpu, stripe: &Range<usize>) -> Right {
        self.head.part(gpu, &WeightStripe { weights: 0..1, rows: stripe.clone() })
    }

    /// Computes the logits of some tokens and one stripe.
    fn compute(&self, gpu: &Gpu, tiles: &RowTiles, tokens: &Range<usize>, stripe: &Range<usize>) -> Right {
        let (right, place) = (self.right(gpu, stripe), self.place(stripe));
        let z = Output { place, stride: stripe.len(), base: tokens.start, column: 0 };
        let operands = SlicedOperands { left: self.hidden, right, tiles, weights: &(0..1) };
        forward_sliced(gpu, z, &operands, Epilogue::default());
        if let Some(SoftCap { limit, inverse }) = self.cap {
            let length = tokens.len() * stripe.len();
            gpu.launch(&HEAD_LOSS, "head_cap", Groups::over(length), arguments![place, length, limit, inverse]);
        }
        right
    }
}

/// Maximum, sum and first maximum of every vocabulary block, and the labels' logits.
struct Reduction {
    maxima: DevicePointer,
    sums: DevicePointer,
    firsts: DevicePointer,
    label_logits: DevicePointer,
    blocks: u32,
}

impl Reduction {
    fn take(parts: &mut Parts, sizes: &Sizes) -> Self {
        let length = sizes.limits.tokens * sizes.blocks;
        let [maxima, sums] = [(); 2].map(|()| parts.take::<f32>(length));
        let firsts = parts.take::<u32>(length);
        let label_logits = parts.take::<f32>(sizes.limits.tokens);
        Self { maxima, sums, firsts, label_logits, blocks: dimension(sizes.blocks) }
    }

    /// Of the logits `z` of one stripe.
    fn stripe(
        &self,
        gpu: &Gpu,
        z: DevicePointer,
        labels: &GpuBuffer<i32>,
        tokens: &Range<usize>,
        stripe: &Range<usize>,
    ) {
        let Self { maxima, sums, firsts, label_logits, blocks } = *self;
        // The kernel numbers them with 32 bits.
        let pairs = dimension(tokens.len() * stripe.len().div_ceil(VOCABULARY_BLOCK)) as usize;
        let arguments = arguments![
            maxima,
            sums,
            firsts,
            label_logits,
            z,
            labels,
            dimension(tokens.start),
            dimension(tokens.len()),
            dimension(stripe.start),
            dimension(stripe.len()),
            blocks,
        ];
        gpu.launch(&HEAD_LOSS, "head_blocks", Groups::each(pairs.div_ceil(TEAMS)), arguments);
    }

    /// Loss, log-sum-exp and best token of all stripes.
    fn combine(&self, gpu: &Gpu, op: &HeadLossForward<GpuMemory>, tokens: &Range<usize>) {
        let Self { maxima, sums, firsts, label_logits, blocks } = *self;
        let (base, count) = (dimension(tokens.start), dimension(tokens.len()));
        let (loss, lse, best, labels) = (&*op.loss, &*op.lse, &*op.best, op.labels);
        let arguments = arguments![loss, lse, best, maxima, sums, firsts, label_logits, labels, base, count, blocks];
        gpu.launch(&HEAD_LOSS, "head_combine", Groups::each(tokens.len().div_ceil(TEAMS)), arguments);
    }
}

/// Scratch for the slices of a stripe's gradient, and for the head's rows transposed.
struct GradientScratch {
    planes: DevicePointer,
    scales: DevicePointer,
    transposed: TransposedScratch,
}

impl GradientScratch {
    fn take(gpu: &Gpu, parts: &mut Parts, p: &HeadLoss, sizes: &Sizes) -> Self {
        let shape = sizes.gradient(p);
        let planes = parts.take::<i8>(plane_bytes(shape));
        let scales = parts.take::<f32>(shape.rows * shape.width.div_ceil(CHUNK));
        Self { planes, scales, transposed: TransposedScratch::take(gpu, parts, 1, sizes.stripe, p.hidden, p.profile) }
    }

    /// Turns the logits of a stripe into their gradients and adds what they give for `dh`.
    fn stripe(
        &self,
        gpu: &Gpu,
        op: &HeadLossBackward<GpuMemory>,
        logits: &Logits,
        right: Right,
        tiles: &RowTiles,
        stripe: &Range<usize>,
    ) {
        let rows = &tiles.rows;
        let shape = SliceShape { rows: rows.len(), width: stripe.len(), profile: op.p.profile };
        let left = Left { planes: self.planes, scales: self.scales, shape, base: rows.start };
        let operands = SlicedOperands { left, right, tiles, weights: &(0..1) };
        if op.dhead.is_none() && slices::in_fours(gpu, &[stripe.len(), right.first]) {
            slice_gradient(gpu, op, logits, &operands, stripe);
        } else {
            store_gradient(gpu, op, logits, rows, stripe);
            let dz = Arriving { place: logits.place(stripe), stride: stripe.len(), column: 0 };
            slice_folded(gpu, dz, &operands, None);
        }
        let (dh, fresh) = (DevicePointer::from(&*op.dh), stripe.start == 0);
        grad_input_sliced(gpu, dh, fresh, &operands, self.transposed, Epilogue::default());
    }
}

/// Logits of a stripe become their gradients, in place.
fn store_gradient(
    gpu: &Gpu,
    op: &HeadLossBackward<GpuMemory>,
    logits: &Logits,
    rows: &Range<usize>,
    stripe: &Range<usize>,
) {
    let groups = stripe.len().div_ceil(GROUP);
    let (limit, inverse) = logits.cap_numbers();
    let arguments = arguments![
        logits.place(stripe),
        op.labels,
        op.lse,
        op.weight,
        dimension(rows.start),
        dimension(stripe.start),
        dimension(stripe.len()),
        dimension(groups),
        limit,
        inverse
    ];
    gpu.launch(&HEAD_LOSS, "head_gradient", Groups::each(rows.len() * groups), arguments);
}

/// The gradients of a stripe's logits as slices, without storing them.
fn slice_gradient(
    gpu: &Gpu,
    op: &HeadLossBackward<GpuMemory>,
    logits: &Logits,
    operands: &SlicedOperands,
    stripe: &Range<usize>,
) {
    let SlicedOperands { left, right, tiles, .. } = *operands;
    let (rows, (limit, inverse)) = (&tiles.rows, logits.cap_numbers());
    let arguments = arguments![
        left.planes,
        left.scales,
        logits.place(stripe),
        right.scales.at::<f32>(right.first),
        op.labels,
        op.lse,
        op.weight,
        dimension(rows.start),
        dimension(rows.len()),
        dimension(left.shape.rows),
        dimension(stripe.start),
        dimension(stripe.len()),
        limit,
        inverse
    ];
    let groups = slices::row_groups(rows.len(), stripe.len());
    gpu.launch_sliced(&HEAD_SLICES, "head_gradient_slices", op.p.profile, groups, arguments);
}

/// `dh` of an ignored token is zero, whatever the head holds.
fn clear_ignored(gpu: &Gpu, op: &HeadLossBackward<GpuMemory>) {
    let (length, hidden) = (op.dh.len(), dimension(op.p.hidden));
    gpu.launch(&HEAD_LOSS, "head_ignored", Groups::over(length), arguments![&*op.dh, op.labels, length, hidden]);
}

impl Run<HeadLossForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut HeadLossForward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        let (tokens, sizes) = (op.p.tokens(), Sizes::new(self, &op.p));
        let mut parts = Parts::new(self, workspace);
        let logits = Logits::new(op.h, op.head, &op.p, sizes, false, &mut parts);
        let reduction = Reduction::take(&mut parts, &sizes);
        let most = sizes.limits.tokens;
        for first in (0..tokens).step_by(most.max(1)) {
            let batch = first..(first + most).min(tokens);
            let tiles = RowTiles::of_rows(batch.clone());
            for stripe in logits.stripes() {
                logits.compute(self, &tiles, &batch, &stripe);
                reduction.stripe(self, logits.place(&stripe), op.labels, &batch, &stripe);
            }
            reduction.combine(self, op, &batch);
        }
    }
}

impl Run<HeadLossBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut HeadLossBackward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        let (p, profile, sizes) = (&op.p, op.p.profile, Sizes::new(self, &op.p));
        let dhead = op.dhead.as_deref().map(DevicePointer::from);
        let mut parts = Parts::new(self, workspace);
        let logits = Logits::new(op.rows, op.head, p, sizes, false, &mut parts);
        let scratch = GradientScratch::take(self, &mut parts, p, &sizes);
        let dz_columns = ColumnSlices::take(&mut parts, sizes.limits, sizes.stripe, profile);
        let h_columns = ColumnSlices::take(&mut parts, sizes.limits, p.hidden, profile);
        let chunks = TokenChunks::new(self, token_blocks(p.row_starts, CHUNK).collect());
        for batch in chunks.batches(sizes.limits) {
            let rows = chunks.tokens(&batch);
            let tiles = RowTiles::of_rows(rows.clone());
            if dhead.is_some() {
                h_columns.slice(self, DevicePointer::from(op.h), 0, &chunks, &batch, profile);
            }
            for stripe in logits.stripes() {
                let right = logits.compute(self, &tiles, &rows, &stripe);
                scratch.stripe(self, op, &logits, right, &tiles, &stripe);
                if let Some(dhead) = dhead {
                    let dz_columns = dz_columns.narrowed(stripe.len());
                    dz_columns.slice(self, logits.place(&stripe), rows.start, &chunks, &batch, profile);
                    let operands = (dz_columns, h_columns);
                    let run = (batch.clone(), stripe.start);
                    grad_weight_sliced(self, dhead, &[run], operands, &chunks, &batch, profile);
                }
            }
        }
        clear_ignored(self, op);
    }
}

impl Run<HeadLossStep<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut HeadLossStep<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        let Some(sizes) = Sizes::kept(self, &op.p) else {
            self.run_in(workspace, op.forward());
            return self.run_in(workspace, op.backward());
        };
        let p = op.p;
        let mut parts = Parts::new(self, workspace);
        let logits = Logits::new(op.rows, op.head, &p, sizes, true, &mut parts);
        let reduction = Reduction::take(&mut parts, &sizes);
        let scratch = GradientScratch::take(self, &mut parts, &p, &sizes);
        let chunks = TokenChunks::new(self, token_blocks(p.row_starts, CHUNK).collect());
        for batch in chunks.batches(sizes.limits) {
            let rows = chunks.tokens(&batch);
            let tiles = RowTiles::of_rows(rows.clone());
            for stripe in logits.stripes() {
                logits.compute(self, &tiles, &rows, &stripe);
                reduction.stripe(self, logits.place(&stripe), op.labels, &rows, &stripe);
            }
            reduction.combine(self, &op.forward(), &rows);
            for stripe in logits.stripes() {
                scratch.stripe(self, &op.backward(), &logits, logits.right(self, &stripe), &tiles, &stripe);
            }
        }
        clear_ignored(self, &op.backward());
    }
}
