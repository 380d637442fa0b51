//! The forward pass: 64 queries of one head at a time run over the key tiles they see, with a
//! running softmax.
//!
//! Scores of a tile are computed in panels of 32 keys, turned into probabilities row by row, and
//! sliced into bytes for the product with the values. Only visible places of a row are touched, so
//! masked places may hold anything.

use super::operands::{Blocks, ROWS, SQUARE, Shape, Slicer};
use super::softmax::{State, cap_block, divide, finish, score_block, score_maxima, slice_weights, value_block, weigh};
use super::{Slicing, TILE, Tensor, lanes, part, slice_all, tensor_bytes};
use crate::Cpu;
use crate::buffer::Workspace;
use crate::cpu::CpuMemory;
use crate::cpu::block::{LeftView, block_sums};
use crate::cpu::path::Path;
use crate::cpu::pool::{SharedMut, StealingRanges};
use crate::cpu::slices::{BLOCK, TILE_DEPTH, left_bias};
use crate::op::{Attention, AttentionForward};
use isobit_numerics::slices::Profile;
use std::ops::Range;

pub(super) fn workspace(cpu: &Cpu, p: &Attention) -> usize {
    let (key, value) = shapes(cpu, p);
    let queries = Blocks::count(p.spans.iter().map(|span| span.queries.len()));
    let keys = Blocks::count(p.spans.iter().map(|span| span.keys.len()));
    2 * Workspace::bytes::<u32>(p.spans.len() + 1)
        + Workspace::bytes::<i8>(cpu.threads() * Slicer::SCRATCH_BYTES.max(State::BYTES))
        + Workspace::bytes::<f32>(cpu.threads() * State::FLOATS)
        + tensor_bytes(p.heads, queries, key, 1, 0)
        + tensor_bytes(p.kv_heads, keys, key, 1, 0)
        + tensor_bytes(p.kv_heads, keys, value, 0, 1)
}

/// Shapes of key-like and of value-like tensors.
pub(super) fn shapes(cpu: &Cpu, p: &Attention) -> (Shape, Shape) {
    (Shape::new(cpu.path, p.key_width, p.profile), Shape::new(cpu.path, p.value_width, p.profile))
}

pub(super) fn forward(cpu: &Cpu, op: &mut AttentionForward<CpuMemory>, workspace: &mut [u8]) {
    let p = &op.p;
    let (key, value) = shapes(cpu, p);
    let mut workspace = Workspace::new(workspace);
    let queries = Blocks::new(workspace.take(p.spans.len() + 1), p.spans.iter().map(|span| span.queries.len()));
    let keys = Blocks::new(workspace.take(p.spans.len() + 1), p.spans.iter().map(|span| span.keys.len()));
    let byte_scratch = workspace.take::<i8>(cpu.threads() * Slicer::SCRATCH_BYTES.max(State::BYTES));
    let float_scratch = workspace.take::<f32>(cpu.threads() * State::FLOATS);
    let q = Tensor { x: op.q, heads: p.heads, shape: key, blocks: queries };
    let k = Tensor { x: op.k, heads: p.kv_heads, shape: key, blocks: keys };
    let v = Tensor { x: op.v, heads: p.kv_heads, shape: value, blocks: keys };
    let pass = Forward::slice(cpu, p, (q, k, v), byte_scratch, &mut workspace);

    let (o, lse) = (SharedMut::new(op.o), SharedMut::new(op.lse));
    let tasks = StealingRanges::new(p.heads * queries.total(), cpu.threads(), 1..=1);
    let (byte_scratch, float_scratch) = (SharedMut::new(byte_scratch), SharedMut::new(float_scratch));
    cpu.pool.run(|worker| {
        #[cfg(target_arch = "x86_64")]
        let _session = (cpu.path == Path::Amx).then(crate::cpu::amx::Session::start);
        // SAFETY: each thread has its own part of both, by its number.
        let scratch =
            unsafe { (part(&byte_scratch, worker, State::BYTES), part(&float_scratch, worker, State::FLOATS)) };
        let mut state = State::new(cpu.path, p.profile, scratch);
        while let Some(tasks) = tasks.next(worker) {
            for task in tasks {
                // Late queries see the most keys; idle workers steal those first.
                pass.query_block(&mut state, task / p.heads, task % p.heads, &o, &lse);
            }
        }
    });
}

struct Forward<'a> {
    path: Path,
    p: &'a Attention<'a>,
    q: Tensor<'a>,
    k: Tensor<'a>,
    v: Tensor<'a>,
    q_left: &'a [i8],
    q_scales: &'a [f32],
    k_right: &'a [i8],
    k_scales: &'a [f32],
    v_transposed: &'a [i8],
    v_scales: &'a [f32],
}

/// One tile of keys for one block of queries.
struct Step {
    span: usize,
    head: usize,
    kv: usize,
    /// Index of the query block among all.
    block: usize,
    /// First key of the tile.
    first_key: usize,
    /// Rows that see part of the tile, and the places visible to any of them.
    rows: Range<usize>,
    places: Range<usize>,
}

impl<'a> Forward<'a> {
    /// Slices the operands into the workspace; `scratch` is that of the threads.
    fn slice(
        cpu: &Cpu,
        p: &'a Attention<'a>,
        (q, k, v): (Tensor<'a>, Tensor<'a>, Tensor<'a>),
        scratch: &mut [i8],
        workspace: &mut Workspace<'a>,
    ) -> Self {
        let (q_left, q_scales) = (workspace.take::<i8>(q.bytes()), workspace.take(q.scale_count()));
        let (k_right, k_scales) = (workspace.take::<i8>(k.bytes()), workspace.take(k.scale_count()));
        let (v_transposed, v_scales) = (workspace.take::<i8>(v.transposed_bytes()), workspace.take(v.scale_count()));
        let query_rows = |span: usize| p.spans[span].queries.clone();
        let key_rows = |span: usize| p.spans[span].keys.clone();
        {
            let transposed = SharedMut::new(v_transposed);
            // SAFETY: `slice_all` calls it once for every block of every head.
            let transpose_v = |right: &[i8], head: usize, span: usize, index: usize| unsafe {
                v.transpose_right(cpu.path, &transposed, right, (head, span, index));
            };
            let left = Some(SharedMut::new(q_left));
            let right = Some(SharedMut::new(k_right));
            slice_all(
                cpu,
                scratch,
                &[
                    Slicing { left, ..Slicing::new(q, &query_rows, q_scales) },
                    Slicing { right, ..Slicing::new(k, &key_rows, k_scales) },
                    Slicing { transposed: Some(&transpose_v), ..Slicing::new(v, &key_rows, v_scales) },
                ],
            );
        }
        Self { path: cpu.path, p, q, k, v, q_left, q_scales, k_right, k_scales, v_transposed, v_scales }
    }

    fn query_block(&self, state: &mut State, block: usize, head: usize, o: &SharedMut<f32>, lse: &SharedMut<f32>) {
        let p = self.p;
        let (span, index) = self.q.blocks.locate(block);
        let queries = &p.spans[span].queries;
        let rows = ROWS.min(queries.len() - index * ROWS);
        let position = p.spans[span].first_position() + index * ROWS;
        state.m.fill(f32::NEG_INFINITY);
        state.l.fill(0.0);
        let stride = self.row_stride();
        state.o[..rows * stride].fill(0.0);
        // ORDER: tiles ascend.
        for first_key in (p.visible(position).start / TILE * TILE..position + rows).step_by(TILE) {
            let active = first_key.saturating_sub(position)
                ..p.window.map_or(rows, |window| rows.min((first_key + TILE + window - 1).saturating_sub(position)));
            for row in active.clone() {
                let keys = p.visible(position + row);
                state.visible[row] = (keys.start.saturating_sub(first_key), (keys.end - first_key).min(TILE));
            }
            if active.is_empty() {
                continue;
            }
            let places = state.visible[active.start].0..state.visible[active.end - 1].1;
            let step = Step { span, head, kv: head / p.group(), block, first_key, rows: active, places };
            self.scores(state, &step);
            self.softmax(state, &step);
            self.values(state, &step);
        }
        let mut ends = [0.0; ROWS];
        finish(self.path, state, &mut ends);
        for row in 0..rows {
            let at = (queries.start + index * ROWS + row) * p.heads + head;
            // SAFETY: tasks are blocks of queries of one head, each handed out once: this row of
            // this head is this task's alone.
            let (o, lse) = unsafe { (part(o, at, p.value_width), part(lse, at, 1)) };
            divide(self.path, o, &state.o[row * stride..][..p.value_width], state.l[row]);
            lse[0] = ends[row];
        }
    }

    /// Floats between rows of the running sum: whole panels of 32.
    fn row_stride(&self) -> usize {
        self.p.value_width.next_multiple_of(BLOCK)
    }

    /// Halves of 32 rows that see part of the tile, each with its active rows.
    fn halves(step: &Step) -> impl Iterator<Item = Range<usize>> {
        let rows = step.rows.clone();
        [0, BLOCK]
            .into_iter()
            .map(move |first| rows.start.max(first)..rows.end.min(first + BLOCK))
            .filter(|rows| !rows.is_empty())
    }

    fn scores(&self, state: &mut State, step: &Step) {
        let (p, shape) = (self.p, self.k.shape);
        let q = &self.q_left[self.q.index(step.head, step.block) * shape.block_bytes()..][..shape.block_bytes()];
        let q_scales = &self.q_scales[self.q.index(step.head, step.block) * ROWS..][..ROWS];
        let k_scales = &self.k_scales[self.k.index(step.kv, self.k.blocks.of(step.span).start) * ROWS..];
        for panel in step.places.start / BLOCK..step.places.end.div_ceil(BLOCK) {
            let (first, place) = (step.first_key + panel * BLOCK, panel * BLOCK);
            let right = self.k.right_panel(self.k_right, step.kv, step.span, first);
            state.panel.prepare(self.path, shape, right);
            for rows in Self::halves(step) {
                if state.visible[rows.end - 1].1 <= place || state.visible[rows.start].0 >= place + BLOCK {
                    continue;
                }
                let start = rows.start / BLOCK * BLOCK;
                let left = LeftView {
                    bytes: &q[start * TILE_DEPTH..],
                    column_stride: shape.slices() * SQUARE,
                    slice_stride: SQUARE,
                };
                let count = rows.end - start;
                state.panel.sums(self.path, shape, &mut state.sums, left, count, right);
                let z = &mut state.z[start * TILE + place..];
                let (q_scales, k_scales) = (&q_scales[start..start + count], &k_scales[first..first + BLOCK]);
                let (sums, softmax_scale) = (&state.sums, p.softmax_scale_base2());
                match p.profile {
                    Profile::X2 => score_block::<2>(self.path, z, sums, q_scales, k_scales, softmax_scale),
                    Profile::X3 => score_block::<3>(self.path, z, sums, q_scales, k_scales, softmax_scale),
                }
                if let Some(cap) = p.cap_base2() {
                    cap_block(self.path, z, count, cap);
                }
            }
        }
    }

    fn softmax(&self, state: &mut State, step: &Step) {
        let v_scales = &self.v_scales[self.v.index(step.kv, self.v.blocks.of(step.span).start) * ROWS..];
        // The span's scales may end with a block of 64 keys; nothing beyond it is visible.
        let mut scales = [0.0; TILE];
        let count = TILE.min(self.v.blocks.of(step.span).len() * ROWS - step.first_key);
        scales[..count].copy_from_slice(&v_scales[step.first_key..step.first_key + count]);
        let bias = left_bias(self.path) as i8;
        for rows in Self::halves(step) {
            score_maxima(self.path, state, rows.clone());
            let most = lanes::maxima(self.path, &state.lanes);
            weigh(self.path, state, rows.clone(), &most, &scales);
            let totals = lanes::sums(self.path, &state.lanes);
            let largest = lanes::integer_maxima(self.path, &state.magnitudes);
            match self.p.profile {
                Profile::X2 => slice_weights::<2>(self.path, state, rows, &step.places, (&totals, &largest), bias),
                Profile::X3 => slice_weights::<3>(self.path, state, rows, &step.places, (&totals, &largest), bias),
            }
        }
    }

    fn values(&self, state: &mut State, step: &Step) {
        let (p, shape) = (self.p, self.v.shape);
        let columns = step.places.start / TILE_DEPTH..step.places.end.div_ceil(TILE_DEPTH);
        let (column_stride, stride) = (shape.slices() * SQUARE, self.row_stride());
        for panel in 0..shape.groups().div_ceil(2) {
            let index = step.first_key / ROWS + columns.start;
            let right = self.v.transposed_panel(self.v_transposed, step.kv, step.span, index, panel);
            state.panel.prepared.prepare(self.path, right, columns.len());
            for rows in Self::halves(step) {
                let start = rows.start / BLOCK * BLOCK;
                let bytes = &state.weights[columns.start * column_stride + start * TILE_DEPTH..];
                let left = LeftView { bytes, column_stride, slice_stride: SQUARE };
                let count = rows.end - start;
                let prepared = &state.panel.prepared;
                block_sums(self.path, &mut state.sums, left, count, right, prepared, columns.len());
                match p.profile {
                    Profile::X2 => value_block::<2>(self.path, state, rows, panel * BLOCK, stride),
                    Profile::X3 => value_block::<3>(self.path, state, rows, panel * BLOCK, stride),
                }
            }
        }
    }
}
