//! Fused LM head and cross-entropy on the CPU (`op/head_loss.rs`): logits exist for one vocabulary
//! block at a time.
//!
//! Tokens are processed in super-blocks of at most 512. Forward, threads divide the vocabulary
//! blocks and store a maximum, a sum and a best index per (token, block), which are combined at the
//! end. Backward, a group of blocks is recomputed, converted to `dz` and sliced by the threads that
//! computed it; then all threads add the group to `dh` and `dhead`. Row blocks without a target
//! are skipped. If both passes run together, the logits of a smaller super-block are kept instead
//! of recomputed. The sizes of super-blocks and groups affect memory and time, not bits. The
//! workspace never shrinks as tokens are added: a plan counts it for the longest rows.

use super::CpuMemory;
use super::block::RightView;
use super::nest::{
    Epilogue, Left, Nest, OutputView, SUPER_BLOCK, Worker, part, run, run_where, super_blocks, super_blocks_of,
};
use super::panels::{Columns, Panels, Transposed, Weight, panel_bytes};
use super::path::{Path, multiversion};
use super::pool::{SharedMut, Tasks, share};
use super::slices::{
    BLOCK, CHUNK_TILES, LeftLayout, LeftMut, LeftRow, SlicedRows, TILE_DEPTH, TILE_ROWS, left_bias, right_block_bytes,
    slice_chunk,
};
use super::token_slices::{columns_to_left, columns_to_right};
use crate::backend::{Checked, Device, Run};
use crate::buffer::Workspace;
use crate::op::head_loss::{VOCABULARY_BLOCK, canonical};
use crate::op::{
    HeadLoss, HeadLossBackward, HeadLossForward, HeadLossStep, IGNORED, Product, SliceShape, token_blocks,
};
use crate::{Buffer, Cpu, Matrix};
use isobit_numerics::elementary::{SoftCap, exp, ln};
use isobit_numerics::lanes::{LANES, for_lanes, max, tree_sum};
use isobit_numerics::slices::{CHUNK, Profile};
use std::ops::Range;

const _: () = assert!(VOCABULARY_BLOCK == CHUNK, "a vocabulary block is one chunk of the input gradient");

/// Blocks per backward group, unless there are more threads.
const GROUP_MIN: usize = 4;
/// Maximum blocks per backward group; beyond this, threads divide tokens too.
const GROUP_MAX: usize = 16;
/// Panels of 32 columns that go through all chunks of the hidden width together: their logits stay
/// in cache.
const PANELS_TOGETHER: usize = 4;
/// Maximum bytes of a super-block's logits kept between the passes. It decides how many tokens a
/// super-block has, never whether logits are kept: that would make short rows need more than long
/// ones.
const KEPT_MAX: usize = 96 << 20;
/// Padding in floats between rows of logits, so that rows do not collide in the same cache sets.
const STRIDE_EXTRA: usize = 16;

/// Lengths of everything the workspace holds.
struct Sizes {
    /// Tokens per super-block.
    tokens: usize,
    /// Vocabulary blocks, in total and per backward group.
    blocks: usize,
    group_blocks: usize,
    panels: usize,
    /// Logits of one block, per thread.
    block_logits: usize,
    /// Logits of one group, shared.
    group_logits: usize,
    /// Logits of a super-block.
    all_logits: usize,
    dz: LeftLayout,
    dz_transposed: LeftLayout,
    h_transposed: usize,
}

impl Sizes {
    fn new(cpu: &Cpu, p: &HeadLoss) -> Self {
        Self::of_super_blocks(cpu, p, SUPER_BLOCK)
    }

    /// Of super-blocks whose logits are kept between the passes; none if even those of the smallest
    /// are too many.
    fn kept(cpu: &Cpu, p: &HeadLoss) -> Option<Self> {
        let most = KEPT_MAX / size_of::<f32>() / (p.vocabulary + STRIDE_EXTRA) / BLOCK * BLOCK;
        (most > 0).then(|| Self::of_super_blocks(cpu, p, most.min(SUPER_BLOCK)))
    }

    fn of_super_blocks(cpu: &Cpu, p: &HeadLoss, most: usize) -> Self {
        let tokens = p.tokens().min(most);
        let blocks = p.vocabulary.div_ceil(VOCABULARY_BLOCK);
        // A multiple of the thread count.
        let round = cpu.threads() * GROUP_MIN.div_ceil(cpu.threads());
        let group_blocks = round.min(GROUP_MAX).min(blocks);
        let group = (group_blocks * VOCABULARY_BLOCK).min(p.vocabulary);
        Self {
            tokens,
            blocks,
            group_blocks,
            panels: cpu.threads() * panel_bytes(p.profile),
            block_logits: tokens * (VOCABULARY_BLOCK + STRIDE_EXTRA),
            group_logits: tokens * (group + STRIDE_EXTRA),
            all_logits: tokens * (p.vocabulary + STRIDE_EXTRA),
            dz: LeftLayout::new(SliceShape { rows: tokens, width: group, profile: p.profile }),
            dz_transposed: LeftLayout::new(SliceShape { rows: group, width: tokens, profile: p.profile }),
            h_transposed: p.hidden.div_ceil(TILE_ROWS) * right_block_bytes(tokens, p.profile),
        }
    }

    /// Bytes of the forward statistics per token and block.
    fn statistics(&self) -> usize {
        3 * Workspace::bytes::<f32>(self.tokens * self.blocks) + Workspace::bytes::<f32>(self.tokens)
    }

    /// Bytes of a group's sliced gradients.
    fn sliced_group(&self) -> usize {
        Workspace::bytes::<i8>(self.dz.bytes()) + Workspace::bytes::<f32>(self.tokens * self.group_blocks)
    }
}

pub(super) fn workspace(cpu: &Cpu, p: &HeadLoss) -> usize {
    let sizes = Sizes::new(cpu, p);
    let floats = Workspace::bytes::<f32>;
    let forward = cpu.threads() * floats(sizes.block_logits) + sizes.statistics();
    let backward = floats(sizes.group_logits)
        + sizes.sliced_group()
        + Workspace::bytes::<i8>(sizes.dz_transposed.bytes())
        + floats(sizes.group_blocks * VOCABULARY_BLOCK)
        + Workspace::bytes::<i8>(sizes.h_transposed)
        + floats(p.hidden);
    2 * floats(p.vocabulary) + Workspace::bytes::<i8>(sizes.panels) + forward.max(backward)
}

/// Workspace of both passes together.
pub(super) fn step_workspace(cpu: &Cpu, p: &HeadLoss) -> usize {
    let Some(sizes) = Sizes::kept(cpu, p) else { return workspace(cpu, p) };
    let floats = Workspace::bytes::<f32>;
    let panels = Workspace::bytes::<i8>(sizes.panels);
    2 * floats(p.vocabulary) + panels + floats(sizes.all_logits) + sizes.statistics() + sizes.sliced_group()
}

/// Blocks and rows divided into tasks: one block each, and part of the rows if there are fewer
/// blocks than threads.
struct Cut {
    tasks: Tasks,
    row_parts: usize,
    rows: Range<usize>,
}

impl Cut {
    fn new(cpu: &Cpu, blocks: usize, rows: &Range<usize>) -> Self {
        let row_parts = cpu.threads().div_ceil(blocks.max(1)).min(rows.len().div_ceil(BLOCK)).max(1);
        Self { tasks: Tasks::new(blocks * row_parts), row_parts, rows: rows.clone() }
    }

    fn next(&self) -> Option<(usize, Range<usize>)> {
        let task = self.tasks.next()?;
        let mine = share(self.rows.len(), BLOCK, self.row_parts, task % self.row_parts);
        Some((task / self.row_parts, self.rows.start + mine.start..self.rows.start + mine.end))
    }
}

/// The vocabulary rows of one block.
fn block_columns(block: usize, p: &HeadLoss) -> Range<usize> {
    block * VOCABULARY_BLOCK..((block + 1) * VOCABULARY_BLOCK).min(p.vocabulary)
}

/// Both operands of the logits.
struct Logits<'a> {
    left: Left<'a>,
    right: &'a Weight<'a>,
    p: &'a HeadLoss<'a>,
}

impl<'a> Logits<'a> {
    fn new(h: &'a SlicedRows, right: &'a Weight<'a>, p: &'a HeadLoss<'a>) -> Self {
        let left = Left { tiles: &h.tiles, layout: h.layout, scales: &h.scales, chunks: p.hidden.div_ceil(CHUNK) };
        Self { left, right, p }
    }

    /// Logits of `rows` and one vocabulary block.
    fn block(
        &self,
        worker: &mut Worker,
        output: &OutputView,
        rows: Range<usize>,
        columns: &Range<usize>,
        wanted: &impl Fn(Range<usize>) -> bool,
    ) {
        let p = self.p;
        let (left, n) = (self.left, p.vocabulary);
        let nest = Nest { left, rows: rows.clone(), n, contraction: p.hidden, profile: p.profile };
        let epilogue =
            Epilogue { accumulate: false, chunk_scales: None, row_scales: Some(self.right.scales()), after: None };
        let panels = columns.start / BLOCK..columns.end.div_ceil(BLOCK);
        for first in panels.clone().step_by(PANELS_TOGETHER) {
            let panels = first..(first + PANELS_TOGETHER).min(panels.end);
            part(worker, output, &nest, (self.right, epilogue), panels, rows.clone(), wanted);
        }
    }

    /// Logits of some tokens, block by block, and their statistics for the loss.
    fn statistics(
        &self,
        cpu: &Cpu,
        tokens: &Range<usize>,
        labels: &[i32],
        partial: &Partials,
        scratch: &mut [i8],
        target: &LogitsTarget,
    ) {
        let p = self.p;
        let scratch = SharedMut::new(scratch);
        let cut = Cut::new(cpu, partial.blocks, tokens);
        cpu.pool.run(|worker| {
            #[cfg(target_arch = "x86_64")]
            let _session = (cpu.path == Path::Amx).then(super::amx::Session::start);
            let bytes = panel_bytes(p.profile);
            // SAFETY: each thread has its own part.
            let own = unsafe { scratch.slice(worker * bytes..(worker + 1) * bytes) };
            let mut state = Worker::new(cpu.path, p.profile, own);
            while let Some((block, my_rows)) = cut.next() {
                let columns = block_columns(block, p);
                let (out, stride, origin) = match target {
                    LogitsTarget::Own { z, each } => {
                        let stride = VOCABULARY_BLOCK + STRIDE_EXTRA;
                        // SAFETY: each thread has its own part, by its number.
                        let z = unsafe { z.slice(worker * each..(worker + 1) * each) };
                        (&SharedMut::new(z), stride, my_rows.start * stride + columns.start)
                    }
                    LogitsTarget::Kept { z } => {
                        (*z, p.vocabulary + STRIDE_EXTRA, tokens.start * (p.vocabulary + STRIDE_EXTRA))
                    }
                };
                let output = OutputView { out, stride, origin };
                self.block(&mut state, &output, my_rows.clone(), &columns, &|_| true);
                for row in my_rows.clone() {
                    let at = row * stride + columns.start - origin;
                    // SAFETY: this row and block are this thread's alone, the logits and the cell.
                    unsafe {
                        let z = out.slice(at..at + columns.len());
                        if let Some(cap) = p.soft_cap() {
                            cap_logits(cpu.path, z, cap);
                        }
                        partial.set(cpu.path, row - tokens.start, block, z, &columns, labels[row]);
                    }
                }
            }
        });
    }
}

fn head_of<'a>(
    cpu: &Cpu,
    head: Matrix<'a, CpuMemory>,
    p: &HeadLoss,
    scales: &'a mut [f32],
    multipliers: &'a mut [f32],
) -> Weight<'a> {
    let product =
        Product { segments: &[0, p.tokens()], n: p.vocabulary, k: p.hidden, profile: p.profile, accumulate: false };
    Weight::of(cpu, head, 0, &product, scales, multipliers)
}

impl Run<HeadLossForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut HeadLossForward<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        let HeadLossForward { loss, lse, best, h, head, labels, p } = op;
        p.check_labels(labels);
        let sizes = Sizes::new(self, p);
        let mut workspace = Workspace::new(workspace);
        let (scales, multipliers) = (workspace.take::<f32>(p.vocabulary), workspace.take::<f32>(p.vocabulary));
        let scratch = workspace.take::<i8>(sizes.panels);
        let z_each = Workspace::bytes::<f32>(sizes.block_logits) / size_of::<f32>();
        let z = workspace.take::<f32>(self.threads() * z_each);
        let mut statistics = Statistics::new(&mut workspace, &sizes);
        let right = head_of(self, *head, p, scales, multipliers);
        let logits = Logits::new(h, &right, p);
        for tokens in super_blocks(0..p.tokens()) {
            let partial = statistics.partials();
            let z = SharedMut::new(z);
            logits.statistics(self, &tokens, labels, &partial, scratch, &LogitsTarget::Own { z: &z, each: z_each });
            let outputs = [&mut loss[tokens.clone()], &mut lse[tokens.clone()]];
            combine(self, outputs, &mut best[tokens.clone()], &partial, &labels[tokens]);
        }
    }
}

/// Both passes, one super-block at a time, unless the logits of the smallest are too many to keep.
impl Run<HeadLossStep<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut HeadLossStep<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        if let Some(sizes) = Sizes::kept(self, &op.p) {
            return step(self, op, &sizes, workspace);
        }
        self.run_in(workspace, op.forward());
        self.run_in(workspace, op.backward());
    }
}

/// Both passes, keeping the logits of one super-block at a time.
fn step(cpu: &Cpu, op: &mut HeadLossStep<'_, CpuMemory>, sizes: &Sizes, workspace: &mut [u8]) {
    let HeadLossStep { loss, lse, best, dh, rows, head, labels, weight, p, .. } = op;
    p.check_labels(labels);
    let mut workspace = Workspace::new(workspace);
    let (scales, multipliers) = (workspace.take::<f32>(p.vocabulary), workspace.take::<f32>(p.vocabulary));
    let scratch = workspace.take::<i8>(sizes.panels);
    let z = workspace.take::<f32>(sizes.all_logits);
    let mut statistics = Statistics::new(&mut workspace, sizes);
    let (tiles, group_scales) =
        (workspace.take::<i8>(sizes.dz.bytes()), workspace.take::<f32>(sizes.tokens * sizes.group_blocks));
    let right = head_of(cpu, *head, p, scales, multipliers);
    for tokens in super_blocks_of(sizes.tokens, 0..p.tokens()) {
        {
            let (partial, z) = (statistics.partials(), SharedMut::new(&mut *z));
            Logits::new(rows, &right, p).statistics(
                cpu,
                &tokens,
                labels,
                &partial,
                scratch,
                &LogitsTarget::Kept { z: &z },
            );
            let outputs = [&mut loss[tokens.clone()], &mut lse[tokens.clone()]];
            combine(cpu, outputs, &mut best[tokens.clone()], &partial, &labels[tokens.clone()]);
        }
        let pass = Backward { logits: Logits::new(rows, &right, p), labels, lse, weight };
        let dh = &mut dh[tokens.start * p.hidden..tokens.end * p.hidden];
        zero_ignored(dh, &labels[tokens.clone()], p);
        let mut room = GroupScratch { dz: z, tiles, scales: group_scales, kept: true };
        for group in Group::all(&tokens, sizes, p) {
            pass.slice_group(cpu, &mut room, &group, scratch);
            pass.grad_input(cpu, dh, &room, &group, scratch);
        }
    }
}

/// Zeroes the gradient of ignored tokens.
fn zero_ignored(dh: &mut [f32], labels: &[i32], p: &HeadLoss) {
    for (dh, _) in dh.chunks_exact_mut(p.hidden).zip(labels).filter(|(_, label)| **label == IGNORED) {
        dh.fill(0.0);
    }
}

/// Destination of the forward pass's logits.
enum LogitsTarget<'a> {
    /// One block per thread, `each` floats apart.
    Own { z: &'a SharedMut<'a, f32>, each: usize },
    /// All blocks of the super-block, `[tokens, vocabulary]`.
    Kept { z: &'a SharedMut<'a, f32> },
}

/// Storage for the forward statistics.
struct Statistics<'a> {
    maxima: &'a mut [f32],
    sums: &'a mut [f32],
    bests: &'a mut [u32],
    label_logits: &'a mut [f32],
    blocks: usize,
}

impl<'a> Statistics<'a> {
    fn new(workspace: &mut Workspace<'a>, sizes: &Sizes) -> Self {
        let cells = sizes.tokens * sizes.blocks;
        Self {
            maxima: workspace.take(cells),
            sums: workspace.take(cells),
            bests: workspace.take(cells),
            label_logits: workspace.take(sizes.tokens),
            blocks: sizes.blocks,
        }
    }

    fn partials(&mut self) -> Partials<'_> {
        Partials {
            maxima: SharedMut::new(self.maxima),
            sums: SharedMut::new(self.sums),
            bests: SharedMut::new(self.bests),
            label_logits: SharedMut::new(self.label_logits),
            blocks: self.blocks,
        }
    }
}

/// Forward statistics per (token, block), and the label's logit per token.
struct Partials<'a> {
    maxima: SharedMut<'a, f32>,
    sums: SharedMut<'a, f32>,
    bests: SharedMut<'a, u32>,
    label_logits: SharedMut<'a, f32>,
    blocks: usize,
}

impl Partials<'_> {
    /// # Safety
    /// No other thread may have this (row, block).
    unsafe fn set(&self, path: Path, row: usize, block: usize, z: &[f32], columns: &Range<usize>, label: i32) {
        let (m, s, index) = block_statistics(path, z);
        let at = row * self.blocks + block;
        // SAFETY: this cell is the caller's; a label lies in one block, so its row's logit is too.
        unsafe {
            self.maxima.slice(at..at + 1)[0] = m;
            self.sums.slice(at..at + 1)[0] = s;
            self.bests.slice(at..at + 1)[0] = if index == u32::MAX { index } else { columns.start as u32 + index };
            if label != IGNORED && columns.contains(&(label as usize)) {
                self.label_logits.slice(row..row + 1)[0] = z[label as usize - columns.start];
            }
        }
    }
}

fn combine(cpu: &Cpu, [loss, lse]: [&mut [f32]; 2], best: &mut [u32], partial: &Partials, labels: &[i32]) {
    let (loss, lse, best) = (SharedMut::new(loss), SharedMut::new(lse), SharedMut::new(best));
    cpu.pool.run_ranges(labels.len(), 1, |rows| {
        for row in rows {
            let cells = row * partial.blocks..(row + 1) * partial.blocks;
            // SAFETY: rows of different threads do not overlap.
            unsafe {
                let (maxima, bests) = (partial.maxima.slice(cells.clone()), partial.bests.slice(cells.clone()));
                let (m, log) = log_sum_exp(cpu.path, maxima, partial.sums.slice(cells));
                let label_logit = partial.label_logits.slice(row..row + 1)[0];
                let with_maximum = maxima.iter().zip(bests).filter(|(m_b, _)| **m_b == m).map(|(_, best)| *best);
                let smallest = with_maximum.min().unwrap_or(u32::MAX);
                lse.slice(row..row + 1)[0] = log;
                loss.slice(row..row + 1)[0] = if labels[row] == IGNORED { 0.0 } else { canonical(log - label_logit) };
                best.slice(row..row + 1)[0] = if smallest == u32::MAX { 0 } else { smallest };
            }
        }
    });
}

multiversion! {
    /// Maximum, sum of exponentials and first index of the maximum (`u32::MAX` if all are NaN) of
    /// one block of logits.
    fn block_statistics<F>(z: &[f32]) -> (f32, f32, u32) {
        let (whole, tail) = z.as_chunks::<LANES>();
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for z in whole {
            for lane in 0..LANES {
                lanes[lane] = max(z[lane], lanes[lane]);
            }
        }
        for (lane, &z) in tail.iter().enumerate() {
            lanes[lane] = max(z, lanes[lane]);
        }
        let m = lanes.into_iter().fold(f32::NEG_INFINITY, |m, z| max(z, m));
        let mut sums = [0.0f32; LANES];
        let mut first = [u32::MAX; LANES];
        for (base, z) in whole.iter().enumerate() {
            let base = (base * LANES) as u32;
            for lane in 0..LANES {
                let index = if z[lane] == m { base + lane as u32 } else { u32::MAX };
                first[lane] = first[lane].min(index);
            }
            for lane in 0..LANES {
                sums[lane] += exp::<F>(z[lane] - m);
            }
        }
        let base = (whole.len() * LANES) as u32;
        for (lane, &z) in tail.iter().enumerate() {
            if z == m {
                first[lane] = first[lane].min(base + lane as u32);
            }
            sums[lane] += exp::<F>(z - m);
        }
        (m, tree_sum(sums), first.into_iter().min().unwrap_or(u32::MAX))
    }
}

multiversion! {
    /// The maximum over blocks and `m + ln Σ s_b·exp(m_b − m)`.
    fn log_sum_exp<F>(maxima: &[f32], sums: &[f32]) -> (f32, f32) {
        let m = maxima.iter().fold(f32::NEG_INFINITY, |m, &m_b| max(m_b, m));
        let mut acc = [0.0; LANES];
        for_lanes(&mut acc, sums.len(), |acc, b| acc + sums[b] * exp::<F>(maxima[b] - m));
        (m, canonical(m + ln::<F>(tree_sum(acc))))
    }
}

multiversion! {
    /// `z` becomes `(exp(z − lse) − [at the label])·weight`; a label out of range is not in this
    /// block.
    fn grad_logits<F>(z: &mut [f32], lse: f32, weight: f32, label: usize) {
        let label_grad = z.get(label).map(|z| (exp::<F>(z - lse) - 1.0) * weight);
        let (whole, tail) = z.as_chunks_mut::<LANES>();
        for z in whole {
            for lane in 0..LANES {
                z[lane] = exp::<F>(z[lane] - lse) * weight;
            }
        }
        for z in tail {
            *z = exp::<F>(*z - lse) * weight;
        }
        if let Some(grad) = label_grad {
            z[label] = grad;
        }
    }
}

multiversion! {
    fn cap_logits<F>(z: &mut [f32], cap: SoftCap) {
        for z in z {
            *z = cap.apply::<F>(*z);
        }
    }
}

multiversion! {
    /// `grad_logits` of capped logits: times the slope of the cap.
    fn grad_capped_logits<F>(z: &mut [f32], of_token: (f32, f32), label: usize, cap: SoftCap) {
        let (lse, weight) = of_token;
        let label_grad = z.get(label).map(|z| ((exp::<F>(z - lse) - 1.0) * weight) * cap.slope::<F>(*z));
        for z in z.iter_mut() {
            *z = (exp::<F>(*z - lse) * weight) * cap.slope::<F>(*z);
        }
        if let Some(grad) = label_grad {
            z[label] = grad;
        }
    }
}

impl Run<HeadLossBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut HeadLossBackward<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        let HeadLossBackward { dh, dhead, rows, h, head, labels, lse, weight, p } = op;
        p.check_labels(labels);
        let sizes = Sizes::new(self, p);
        let mut workspace = Workspace::new(workspace);
        let (scales, multipliers) = (workspace.take::<f32>(p.vocabulary), workspace.take::<f32>(p.vocabulary));
        let scratch = workspace.take::<i8>(sizes.panels);
        let mut room = GroupScratch {
            dz: workspace.take::<f32>(sizes.group_logits),
            tiles: workspace.take::<i8>(sizes.dz.bytes()),
            scales: workspace.take::<f32>(sizes.tokens * sizes.group_blocks),
            kept: false,
        };
        let mut transposed = TransposedScratch {
            dz_tiles: workspace.take::<i8>(sizes.dz_transposed.bytes()),
            dz_scales: workspace.take::<f32>(sizes.group_blocks * VOCABULARY_BLOCK),
            h_tiles: workspace.take::<i8>(sizes.h_transposed),
            h_scales: workspace.take::<f32>(p.hidden),
            p,
        };
        let right = head_of(self, *head, p, scales, multipliers);
        let pass = Backward { logits: Logits::new(rows, &right, p), labels, lse, weight };
        zero_ignored(dh, labels, p);
        // Chunks of tokens matter only to the gradient of the head.
        let whole = [0, p.tokens()];
        let row_starts = if dhead.is_some() { p.row_starts } else { &whole[..] };
        for tokens in packed(row_starts) {
            if dhead.is_none() && labels[tokens.clone()].iter().all(|label| *label == IGNORED) {
                continue;
            }
            for group in Group::all(&tokens, &sizes, p) {
                pass.slice_group(self, &mut room, &group, scratch);
                let dh = &mut dh[tokens.start * p.hidden..tokens.end * p.hidden];
                pass.grad_input(self, dh, &room, &group, scratch);
                let Some(dhead) = dhead else { continue };
                let dhead = &mut dhead[group.columns.start * p.hidden..group.columns.end * p.hidden];
                for chunk in token_blocks(row_starts, CHUNK).filter(|chunk| tokens.contains(&chunk.start)) {
                    let h = &h[chunk.start * p.hidden..chunk.end * p.hidden];
                    let rows = chunk.start - tokens.start..chunk.end - tokens.start;
                    let dz = &room.dz[rows.start * group.stride()..rows.end * group.stride()];
                    transposed.grad_weight(self, dhead, h, dz, &group, scratch);
                }
            }
        }
    }
}

/// Whole chunks of tokens, packed into super-blocks.
fn packed(row_starts: &[usize]) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut chunks = token_blocks(row_starts, CHUNK).peekable();
    std::iter::from_fn(move || {
        let mut tokens = chunks.next()?;
        while let Some(next) = chunks.next_if(|next| next.end - tokens.start <= SUPER_BLOCK) {
            tokens.end = next.end;
        }
        Some(tokens)
    })
}

/// Some tokens and some vocabulary blocks.
struct Group {
    tokens: Range<usize>,
    blocks: Range<usize>,
    columns: Range<usize>,
}

impl Group {
    /// All vocabulary blocks of some tokens, in order.
    fn all(tokens: &Range<usize>, sizes: &Sizes, p: &HeadLoss) -> impl Iterator<Item = Self> {
        let (each, blocks, vocabulary) = (sizes.group_blocks, sizes.blocks, p.vocabulary);
        (0..blocks).step_by(each).map(move |first| Self {
            tokens: tokens.clone(),
            blocks: first..(first + each).min(blocks),
            columns: first * VOCABULARY_BLOCK..((first + each) * VOCABULARY_BLOCK).min(vocabulary),
        })
    }

    /// Floats between rows of `dz`.
    fn stride(&self) -> usize {
        self.columns.len() + STRIDE_EXTRA
    }

    fn layout(&self, p: &HeadLoss) -> LeftLayout {
        LeftLayout::new(SliceShape { rows: self.tokens.len(), width: self.columns.len(), profile: p.profile })
    }
}

/// `dz` of one group: as numbers, and times the head's scales, sliced along the vocabulary.
struct GroupScratch<'a> {
    dz: &'a mut [f32],
    tiles: &'a mut [i8],
    scales: &'a mut [f32],
    /// `dz` already holds all logits of the group's tokens, kept by the forward pass.
    kept: bool,
}

struct Backward<'a> {
    logits: Logits<'a>,
    labels: &'a [i32],
    lse: &'a [f32],
    weight: &'a [f32],
}

/// The head contracted along its rows, starting at some chunk.
struct TransposedFrom<'a> {
    head: Transposed<'a>,
    chunk: usize,
}

impl Panels for TransposedFrom<'_> {
    fn made(&self) -> bool {
        true
    }

    fn panel<'s>(&'s self, path: Path, own: &'s mut [i8], chunk: usize, first: usize) -> RightView<'s> {
        self.head.panel(path, own, self.chunk + chunk, first)
    }
}

impl Backward<'_> {
    fn any_target(&self, rows: Range<usize>) -> bool {
        self.labels[rows].iter().any(|label| *label != IGNORED)
    }

    /// Recomputes the logits of a group, unless they were kept, and produces `dz`, as numbers and
    /// sliced.
    fn slice_group(&self, cpu: &Cpu, room: &mut GroupScratch, group: &Group, scratch: &mut [i8]) {
        let p = self.logits.p;
        let layout = group.layout(p);
        let (stride, first_column) =
            if room.kept { (p.vocabulary + STRIDE_EXTRA, 0) } else { (group.stride(), group.columns.start) };
        let kept = room.kept;
        let (dz, tiles) = (SharedMut::new(&mut *room.dz), SharedMut::new(&mut *room.tiles));
        let (scales, scratch) = (SharedMut::new(&mut *room.scales), SharedMut::new(scratch));
        let origin = group.tokens.start * stride + first_column;
        let cut = Cut::new(cpu, group.blocks.len(), &group.tokens);
        cpu.pool.run(|worker| {
            #[cfg(target_arch = "x86_64")]
            let _session = (cpu.path == Path::Amx).then(super::amx::Session::start);
            let bytes = panel_bytes(p.profile);
            // SAFETY: each thread has its own part.
            let own = unsafe { scratch.slice(worker * bytes..(worker + 1) * bytes) };
            let mut worker = Worker::new(cpu.path, p.profile, own);
            while let Some((chunk, my_rows)) = cut.next() {
                let columns = block_columns(group.blocks.start + chunk, p);
                let output = OutputView { out: &dz, stride, origin };
                if !kept {
                    let wanted = |rows: Range<usize>| self.any_target(rows);
                    self.logits.block(&mut worker, &output, my_rows.clone(), &columns, &wanted);
                }
                for row in my_rows.clone() {
                    let at = row * stride + columns.start - origin;
                    // SAFETY: this row and block are this thread's alone.
                    let z = unsafe { dz.slice(at..at + columns.len()) };
                    let local = row - group.tokens.start;
                    let factors = if self.labels[row] == IGNORED {
                        z.fill(0.0);
                        None
                    } else {
                        let label = (self.labels[row] as usize).wrapping_sub(columns.start);
                        let (lse, weight) = (self.lse[row], self.weight[row]);
                        match p.soft_cap() {
                            None => grad_logits(cpu.path, z, lse, weight, label),
                            Some(cap) => {
                                // Kept logits are capped already.
                                if !kept {
                                    cap_logits(cpu.path, z, cap);
                                }
                                grad_capped_logits(cpu.path, z, (lse, weight), label, cap);
                            }
                        }
                        Some(&self.logits.right.scales()[columns.clone()])
                    };
                    let to = LeftRow {
                        tiles: &tiles,
                        at: chunk * CHUNK_TILES * layout.column_stride() + local * TILE_DEPTH,
                        column_stride: layout.column_stride(),
                        slice_stride: layout.slice_stride(),
                        bias: left_bias(cpu.path),
                    };
                    let scale = match p.profile {
                        Profile::X2 => slice_chunk::<2>(cpu.path, &to, z, factors),
                        Profile::X3 => slice_chunk::<3>(cpu.path, &to, z, factors),
                    };
                    let at = local * group.blocks.len() + chunk;
                    // SAFETY: the cell of this row and chunk, which are this thread's alone.
                    unsafe { scales.slice(at..at + 1)[0] = scale };
                }
            }
        });
    }

    /// Adds the group's contribution to `dh` of its tokens.
    fn grad_input(&self, cpu: &Cpu, dh: &mut [f32], room: &GroupScratch, group: &Group, scratch: &mut [i8]) {
        let p = self.logits.p;
        let left = Left { tiles: room.tiles, layout: group.layout(p), scales: room.scales, chunks: group.blocks.len() };
        let rows = 0..group.tokens.len();
        let nest = Nest { left, rows, n: p.hidden, contraction: group.columns.len(), profile: p.profile };
        let epilogue =
            Epilogue { accumulate: group.blocks.start > 0, chunk_scales: None, row_scales: None, after: None };
        let head = TransposedFrom { head: Transposed(self.logits.right), chunk: group.blocks.start };
        let start = group.tokens.start;
        let wanted = |rows: Range<usize>| self.any_target(start + rows.start..start + rows.end);
        run_where(cpu, dh, &nest, epilogue, scratch, &head, &wanted);
    }
}

/// `dz` and `h` of one chunk of tokens, sliced along the tokens.
struct TransposedScratch<'a> {
    dz_tiles: &'a mut [i8],
    dz_scales: &'a mut [f32],
    h_tiles: &'a mut [i8],
    h_scales: &'a mut [f32],
    p: &'a HeadLoss<'a>,
}

impl TransposedScratch<'_> {
    /// Adds one chunk of tokens to the group's rows of `dhead`.
    fn grad_weight(&mut self, cpu: &Cpu, dhead: &mut [f32], h: &[f32], dz: &[f32], group: &Group, scratch: &mut [i8]) {
        let p = self.p;
        let (tokens, width) = (h.len() / p.hidden, group.columns.len());
        let shape = SliceShape { rows: width, width: tokens, profile: p.profile };
        let layout = LeftLayout::new(shape);
        let sliced = LeftMut { shape, layout, tiles: &mut *self.dz_tiles, scales: &mut *self.dz_scales };
        columns_to_left(cpu, sliced, dz, group.stride());
        columns_to_right(cpu, self.h_tiles, self.h_scales, h, p.hidden, p.profile);
        let left = Left { tiles: self.dz_tiles, layout, scales: self.dz_scales, chunks: 1 };
        let epilogue = Epilogue { accumulate: true, chunk_scales: Some(self.h_scales), row_scales: None, after: None };
        let block_bytes = right_block_bytes(tokens, p.profile);
        let panels = Columns { tiles: self.h_tiles, block_bytes, width: p.hidden };
        for rows in super_blocks(0..width) {
            let nest = Nest { left, rows, n: p.hidden, contraction: tokens, profile: p.profile };
            run(cpu, dhead, &nest, epilogue, scratch, &panels);
        }
    }
}
