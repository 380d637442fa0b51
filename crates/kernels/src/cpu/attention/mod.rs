//! Attention on the CPU (`op/attention.rs` defines the bits): every product runs on the block
//! kernels of the slice product.
//!
//! Rows are sliced once per call into the workspace (`operands.rs`), then threads take query blocks
//! (`forward.rs`) or whole heads (`backward.rs`) dynamically; the assignment does not affect the
//! bits. Memory is linear in the span length.

mod along;
mod backward;
mod forward;
mod gradients;
mod lanes;
mod operands;
mod softmax;
mod tile;

use super::block::RightView;
use super::path::Path;
use super::pool::{SharedMut, StealingRanges};
use crate::Cpu;
use crate::buffer::Workspace;
use crate::op::{Attention, Span};
use operands::{
    BlockRows, Blocks, Forms, ROWS, Shape, Slicer, row_maxima, store_transposed_left, store_transposed_right,
};
use std::ops::Range;

use super::CpuMemory;
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{AttentionBackward, AttentionForward};
use backward::backward;
use forward::forward;

impl Run<AttentionForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut AttentionForward<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        let AttentionForward { o, lse, q, k, v, p } = op;
        for spans in span_groups(p.spans) {
            let p = Attention { spans, ..*p };
            forward(self, &mut AttentionForward { o, lse, q, k, v, p }, workspace);
        }
    }
}

impl Run<AttentionBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut AttentionBackward<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        let AttentionBackward { dq, dk, dv, d_o, q, k, v, o, lse, p } = op;
        for spans in span_groups(p.spans) {
            let p = Attention { spans, ..*p };
            backward(self, &mut AttentionBackward { dq, dk, dv, d_o, q, k, v, o, lse, p }, workspace);
        }
    }
}

/// Keys or queries per tile: the numbers are equal here.
const TILE: usize = crate::op::attention::KEY_TILE;
const _: () = assert!(TILE == crate::op::attention::QUERY_TILE && TILE == 2 * ROWS);

pub(super) fn workspace(cpu: &Cpu, p: &Attention) -> usize {
    let trains = p.spans.iter().all(|span| span.queries.len() == span.keys.len());
    let of_group = |spans| {
        let p = Attention { spans, ..*p };
        forward::workspace(cpu, &p).max(if trains { backward::workspace(cpu, &p) } else { 0 })
    };
    span_groups(p.spans).map(of_group).max().unwrap_or(0)
}

/// Spans whose operands are sliced together. A span takes whole blocks, so a row packed from many
/// short documents would take many times the memory of a long one; in groups it takes at most twice
/// as much. Affects memory and time, not bits.
fn span_groups(spans: &[Span]) -> impl Iterator<Item = &[Span]> {
    let most = GROUP_BLOCKS_MIN.max(2 * spans.iter().map(rows_of).sum::<usize>().div_ceil(ROWS));
    let mut rest = spans;
    std::iter::from_fn(move || {
        let mut blocks = 0;
        let fits = |span: &&Span| {
            blocks += rows_of(span).div_ceil(ROWS);
            blocks <= most
        };
        let count = rest.iter().take_while(fits).count().max(1).min(rest.len());
        let (group, behind) = rest.split_at(count);
        rest = behind;
        (!group.is_empty()).then_some(group)
    })
}

/// Of its queries or of its keys: those of a text that is being generated are more.
fn rows_of(span: &Span) -> usize {
    span.queries.len().max(span.keys.len())
}

/// Blocks that go together however few tokens there are.
const GROUP_BLOCKS_MIN: usize = 16;

/// One `[t, heads, width]` tensor and the blocks of its spans.
#[derive(Clone, Copy)]
struct Tensor<'a> {
    x: &'a [f32],
    heads: usize,
    shape: Shape,
    blocks: Blocks<'a>,
}

impl<'a> Tensor<'a> {
    /// Bytes of all blocks of all heads, straight and transposed.
    fn bytes(&self) -> usize {
        self.heads * self.blocks.total() * self.shape.block_bytes()
    }

    fn transposed_bytes(&self) -> usize {
        self.heads * self.blocks.total() * self.shape.transposed_bytes()
    }

    /// Scales of all heads.
    fn scale_count(&self) -> usize {
        self.heads * self.blocks.total() * ROWS
    }

    /// Index of a block among all blocks of all heads.
    fn index(&self, head: usize, block: usize) -> usize {
        head * self.blocks.total() + block
    }

    fn source(&self, rows: &Range<usize>, index: usize, head: usize) -> BlockRows<'a> {
        let first_row = rows.start + index * ROWS;
        BlockRows { x: self.x, first_row, rows: ROWS.min(rows.end - first_row), head, heads: self.heads }
    }

    /// Offset of block `index` of a span in the transposed right tiles, which are stored group by
    /// group.
    fn transposed_at(&self, head: usize, span: usize, index: usize, group: usize) -> usize {
        let blocks = self.blocks.of(span);
        self.index(head, blocks.start) * self.shape.transposed_bytes()
            + (group * blocks.len() + index) * self.transposed_tile()
    }

    /// Transposes block `index` of a span of a head into right tiles for a contraction along rows.
    ///
    /// # Safety
    /// No one else uses this block of this head in `out` meanwhile.
    unsafe fn transpose_right(
        &self,
        path: Path,
        out: &SharedMut<i8>,
        right: &[i8],
        (head, span, index): (usize, usize, usize),
    ) {
        for group in 0..self.shape.groups() {
            let at = self.transposed_at(head, span, index, group);
            // SAFETY: the caller has this block of this head, and each group's tile of it is a
            // range of its own.
            let out = unsafe { out.slice(at..at + self.transposed_tile()) };
            store_transposed_right(path, self.shape, group, out, right);
        }
    }

    /// The same into left tiles.
    ///
    /// # Safety
    /// No one else uses this block of this head in `out` meanwhile.
    unsafe fn transpose_left(
        &self,
        path: Path,
        out: &SharedMut<i8>,
        right: &[i8],
        (head, span, index): (usize, usize, usize),
    ) {
        let block = self.index(head, self.blocks.of(span).start + index);
        // SAFETY: the caller has this block of this head.
        let out = unsafe { part(out, block, self.shape.transposed_bytes()) };
        store_transposed_left(path, self.shape, out, right);
    }

    /// Bytes of one transposed right tile, all slices.
    fn transposed_tile(&self) -> usize {
        self.shape.slices() * super::slices::TILE_BYTES
    }

    /// Up to 32 rows of a span from `first`, as right tiles.
    fn right_panel<'s>(&self, tiles: &'s [i8], head: usize, span: usize, first: usize) -> RightView<'s> {
        let block = self.index(head, self.blocks.of(span).start + first / ROWS);
        let stride = self.shape.block_bytes() / 4;
        let at = block * self.shape.block_bytes() + first % ROWS / 16 * stride;
        RightView { tiles: &tiles[at..at + 2 * stride], block_stride: stride, blocks: 2 }
    }

    /// Elements `32·panel..` of the width, contracted along the rows of the blocks from `index` of
    /// a span.
    fn transposed_panel<'s>(
        &self,
        tiles: &'s [i8],
        head: usize,
        span: usize,
        index: usize,
        panel: usize,
    ) -> RightView<'s> {
        let end = (self.index(head, self.blocks.of(span).end)) * self.shape.transposed_bytes();
        RightView {
            tiles: &tiles[self.transposed_at(head, span, index, 2 * panel)..end],
            block_stride: self.blocks.of(span).len() * self.transposed_tile(),
            blocks: (self.shape.groups() - 2 * panel).min(2),
        }
    }
}

/// Derives another form of a block from its right tiles; called with
/// `(right tiles, head, span, index of the block in the span)`.
type Transpose<'a> = &'a (dyn Fn(&[i8], usize, usize, usize) + Sync);

/// A tensor to slice, its spans' rows, and the destinations of each block form.
struct Slicing<'a> {
    tensor: Tensor<'a>,
    rows: &'a (dyn Fn(usize) -> Range<usize> + Sync),
    scales: SharedMut<'a, f32>,
    left: Option<SharedMut<'a, i8>>,
    right: Option<SharedMut<'a, i8>>,
    transposed: Option<Transpose<'a>>,
}

impl<'a> Slicing<'a> {
    /// Only scales yet; fields name further forms.
    fn new(tensor: Tensor<'a>, rows: &'a (dyn Fn(usize) -> Range<usize> + Sync), scales: &'a mut [f32]) -> Self {
        Self { tensor, rows, scales: SharedMut::new(scales), left: None, right: None, transposed: None }
    }

    /// Floats of a token read by one task: heads of a token are adjacent in memory, and long runs
    /// read faster.
    const RUN: usize = 512;
    const HEADS_MAX: usize = 16;

    /// Heads per task.
    fn heads(&self) -> usize {
        (Self::RUN / self.tensor.shape.width).min(Self::HEADS_MAX).min(self.tensor.heads)
    }

    fn tasks(&self) -> usize {
        self.tensor.heads.div_ceil(self.heads()) * self.tensor.blocks.total()
    }

    /// Slices one block of a few heads.
    fn run(&self, slicer: &mut Slicer, path: Path, most: &mut [[u32; ROWS]], task: usize) {
        let Self { tensor, rows, scales, left, right, transposed } = self;
        let (group, block) = (task / tensor.blocks.total(), task % tensor.blocks.total());
        let first = group * self.heads();
        let most = &mut most[..self.heads().min(tensor.heads - first)];
        let (span, index) = tensor.blocks.locate(block);
        let rows = rows(span);
        row_maxima(path, most, tensor.source(&rows, index, first), tensor.shape.width);
        for (head, most) in (first..).zip(&*most) {
            let (block, bytes) = (tensor.index(head, block), tensor.shape.block_bytes());
            // SAFETY: a task has this block of these heads, each handed out once, and with it its
            // part of every form; forms are different buffers.
            let forms = unsafe {
                Forms {
                    scales: part(scales, block, ROWS),
                    left: left.as_ref().map(|left| part(left, block, bytes)),
                    right: right.as_ref().map(|right| part(right, block, bytes)),
                }
            };
            let tiles = slicer.load(tensor.shape, tensor.source(&rows, index, head), most, forms, transposed.is_some());
            if let Some(transposed) = transposed {
                transposed(tiles, head, span, index);
            }
        }
    }
}

/// Slices every block of every tensor; `scratch` is [`Slicer::SCRATCH_BYTES`] per thread.
fn slice_all(cpu: &Cpu, scratch: &mut [i8], slicings: &[Slicing]) {
    let scratch = SharedMut::new(scratch);
    let tasks: Vec<_> =
        slicings.iter().map(|slicing| StealingRanges::new(slicing.tasks(), cpu.threads(), 1..=4)).collect();
    cpu.pool.run(|worker| {
        // SAFETY: each thread has its own part, by its number.
        let mut slicer = Slicer::new(cpu.path, unsafe { part(&scratch, worker, Slicer::SCRATCH_BYTES) });
        let mut most = [[0; ROWS]; Slicing::HEADS_MAX];
        for (slicing, tasks) in slicings.iter().zip(&tasks) {
            while let Some(tasks) = tasks.next(worker) {
                tasks.for_each(|task| slicing.run(&mut slicer, cpu.path, &mut most, task));
            }
        }
    });
}

/// Part `index` of a shared buffer divided into parts of `size`.
///
/// # Safety
/// No one else uses this part while the result is alive, through parts of any size.
#[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
unsafe fn part<'s, T>(shared: &'s SharedMut<T>, index: usize, size: usize) -> &'s mut [T] {
    // SAFETY: the caller has the elements of this part for itself.
    unsafe { shared.slice(index * size..(index + 1) * size) }
}

/// The first `N` elements of a thread's scratch, and the rest.
fn split<T, const N: usize>(scratch: &mut [T]) -> (&mut [T; N], &mut [T]) {
    scratch.split_first_chunk_mut::<N>().expect("a thread's scratch holds what it was made for")
}

/// Workspace bytes of a tensor's sliced forms (each given as `is transposed`) and its scales.
fn tensor_bytes(heads: usize, blocks: usize, shape: Shape, straight: usize, transposed: usize) -> usize {
    straight * Workspace::bytes::<i8>(heads * blocks * shape.block_bytes())
        + transposed * Workspace::bytes::<i8>(heads * blocks * shape.transposed_bytes())
        + Workspace::bytes::<f32>(heads * blocks * ROWS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_hold_every_span_once_and_few_blocks() {
        let spans = |lengths: &[usize]| {
            let mut end = 0;
            let next = |length: &usize| {
                end += length;
                Span { queries: end - length..end, keys: end - length..end }
            };
            lengths.iter().map(next).collect::<Vec<_>>()
        };
        let sizes = |lengths: &[usize]| {
            let all = spans(lengths);
            let groups: Vec<&[Span]> = span_groups(&all).collect();
            assert_eq!(groups.concat(), all);
            groups.iter().map(|group| group.len()).collect::<Vec<_>>()
        };
        assert_eq!(sizes(&[]), [0; 0]);
        assert_eq!(sizes(&[4096]), [1]);
        assert_eq!(sizes(&[0, 5, 0]), [3]);
        assert_eq!(sizes(&[100; 4]), [4], "rows of a batch stay together");
        assert_eq!(sizes(&[2; 16]), [16]);
        // 1,024 tokens: 16 blocks as one span, 512 as these.
        assert_eq!(sizes(&[2; 512]), [32; 16]);
    }
}
