//! The backward pass: operands, the assignment of tiles to tasks, and the sum over the heads of a
//! group.
//!
//! A tile of 128 queries by 128 keys (`gradients.rs`) feeds dQ of its queries and dK, dV of its
//! keys. Usually one task is a whole head of a span and computes each tile once. If that gives too
//! few tasks for the threads, queries and keys become separate tasks and each tile is computed
//! twice. Both ways add tiles in the same order.

use super::forward::shapes;
use super::gradients::{Gradients, Operands, SlicedTensor, Tile};
use super::operands::{BlockRows, Blocks, ROWS, Slicer};
use super::tile::State;
use super::{Slicing, TILE, Tensor, part, slice_all, tensor_bytes};
use crate::Cpu;
use crate::buffer::Workspace;
use crate::cpu::CpuMemory;
use crate::cpu::path::{Path, multiversion};
use crate::cpu::pool::{SharedMut, StealingRanges};
use crate::op::{Attention, AttentionBackward};
use isobit_numerics::lanes::dot;
use std::ops::Range;

pub(super) fn workspace(cpu: &Cpu, p: &Attention) -> usize {
    let (key, value) = shapes(cpu, p);
    let blocks = Blocks::count(p.spans.iter().map(|span| span.keys.len()));
    let partial = |width: usize| Workspace::bytes::<f32>(p.heads * blocks * ROWS * width);
    Workspace::bytes::<u32>(p.spans.len() + 1)
        + Workspace::bytes::<i8>(cpu.threads() * Slicer::SCRATCH_BYTES.max(State::BYTES))
        + Workspace::bytes::<f32>(cpu.threads() * State::FLOATS)
        + tensor_bytes(p.heads, blocks, key, 1, 1)
        + tensor_bytes(p.kv_heads, blocks, key, 1, 1)
        + tensor_bytes(p.kv_heads, blocks, value, 1, 0)
        + tensor_bytes(p.heads, blocks, value, 1, 1)
        + 2 * partial(1)
        + partial(p.key_width)
        + partial(p.value_width)
}

pub(super) fn backward(cpu: &Cpu, op: &mut AttentionBackward<CpuMemory>, workspace: &mut [u8]) {
    let p = &op.p;
    let (key, value) = shapes(cpu, p);
    let mut workspace = Workspace::new(workspace);
    let blocks = Blocks::new(workspace.take(p.spans.len() + 1), p.spans.iter().map(|span| span.keys.len()));
    let byte_scratch = workspace.take::<i8>(cpu.threads() * Slicer::SCRATCH_BYTES.max(State::BYTES));
    let float_scratch = workspace.take::<f32>(cpu.threads() * State::FLOATS);
    let q = Tensor { x: op.q, heads: p.heads, shape: key, blocks };
    let k = Tensor { x: op.k, heads: p.kv_heads, shape: key, blocks };
    let v = Tensor { x: op.v, heads: p.kv_heads, shape: value, blocks };
    let d_o = Tensor { x: op.d_o, heads: p.heads, shape: value, blocks };
    let operands = slice(cpu, p, [q, k, v, d_o], (op.o, op.lse), byte_scratch, &mut workspace);
    let key_partials = workspace.take::<f32>(q.scale_count() * key.width);
    let value_partials = workspace.take::<f32>(d_o.scale_count() * value.width);
    {
        let pass = Gradients {
            path: cpu.path,
            p,
            operands,
            dq: SharedMut::new(op.dq),
            key_partials: SharedMut::new(key_partials),
            value_partials: SharedMut::new(value_partials),
        };
        run(cpu, &pass, byte_scratch, float_scratch);
    }
    add_heads(cpu, op.dk, key_partials, k, p, float_scratch);
    add_heads(cpu, op.dv, value_partials, v, p, float_scratch);
}

/// Slices all operands into the workspace, with the inner products and log-sum-exps of their
/// queries. `scratch` is that of the threads.
fn slice<'a>(
    cpu: &Cpu,
    p: &'a Attention<'a>,
    [q, k, v, d_o]: [Tensor<'a>; 4],
    (o, lse): (&[f32], &[f32]),
    scratch: &mut [i8],
    workspace: &mut Workspace<'a>,
) -> Operands<'a> {
    let [q_scales, k_scales, v_scales, d_o_scales] = [q, k, v, d_o].map(|x| workspace.take::<f32>(x.scale_count()));
    let [q_left, k_right, v_right, d_o_left] = [q, k, v, d_o].map(|x| workspace.take::<i8>(x.bytes()));
    let [q_transposed, k_transposed, d_o_transposed] = [q, k, d_o].map(|x| workspace.take::<i8>(x.transposed_bytes()));
    let [delta, lse_blocks] = [(); 2].map(|()| workspace.take::<f32>(d_o.scale_count()));
    let queries = |span: usize| p.spans[span].queries.clone();
    let keys = |span: usize| p.spans[span].keys.clone();
    {
        let [q_out, k_out, d_o_out] =
            [&mut *q_transposed, &mut *k_transposed, &mut *d_o_transposed].map(SharedMut::new);
        let (delta, lse_blocks) = (SharedMut::new(&mut *delta), SharedMut::new(&mut *lse_blocks));
        // SAFETY: `slice_all` calls it once for every block of every head of `q`.
        let transpose_q = |right: &[i8], head: usize, span: usize, index: usize| unsafe {
            q.transpose_left(cpu.path, &q_out, right, (head, span, index));
        };
        // SAFETY: `slice_all` calls it once for every block of every head of `k`.
        let transpose_k = |right: &[i8], head: usize, span: usize, index: usize| unsafe {
            k.transpose_right(cpu.path, &k_out, right, (head, span, index));
        };
        let transpose_d_o = |right: &[i8], head: usize, span: usize, index: usize| {
            let block = d_o.index(head, d_o.blocks.of(span).start + index);
            // SAFETY: called by the one task that has this block of this head; the three are
            // different buffers.
            let (delta, lse_blocks) = unsafe {
                d_o.transpose_left(cpu.path, &d_o_out, right, (head, span, index));
                (part(&delta, block, ROWS), part(&lse_blocks, block, ROWS))
            };
            let source = d_o.source(&queries(span), index, head);
            fill_statistics(cpu.path, delta, lse_blocks, source, (o, lse), d_o.shape.width);
        };
        let [q_left, d_o_left] = [&mut *q_left, &mut *d_o_left].map(|x| Some(SharedMut::new(x)));
        let [k_right, v_right] = [&mut *k_right, &mut *v_right].map(|x| Some(SharedMut::new(x)));
        let [of_q, of_k] = [Slicing::new(q, &queries, q_scales), Slicing::new(k, &keys, k_scales)];
        let [of_v, of_d_o] = [Slicing::new(v, &keys, v_scales), Slicing::new(d_o, &queries, d_o_scales)];
        slice_all(
            cpu,
            scratch,
            &[
                Slicing { left: q_left, transposed: Some(&transpose_q), ..of_q },
                Slicing { right: k_right, transposed: Some(&transpose_k), ..of_k },
                Slicing { right: v_right, ..of_v },
                Slicing { left: d_o_left, transposed: Some(&transpose_d_o), ..of_d_o },
            ],
        );
    }
    Operands {
        q: SlicedTensor { tensor: q, straight: q_left, transposed: q_transposed, scales: q_scales },
        k: SlicedTensor { tensor: k, straight: k_right, transposed: k_transposed, scales: k_scales },
        v: SlicedTensor { tensor: v, straight: v_right, transposed: &[], scales: v_scales },
        d_o: SlicedTensor { tensor: d_o, straight: d_o_left, transposed: d_o_transposed, scales: d_o_scales },
        lse: lse_blocks,
        delta,
    }
}

/// `D = dO·O` and the log-sum-exp of the queries of a block; padding rows have zeros.
fn fill_statistics(
    path: Path,
    delta: &mut [f32],
    lse_block: &mut [f32],
    source: BlockRows,
    (o, lse): (&[f32], &[f32]),
    width: usize,
) {
    let outputs = BlockRows { x: o, ..source };
    delta[source.rows..].fill(0.0);
    lse_block[source.rows..].fill(0.0);
    for row in 0..source.rows {
        // One row per call: with a loop here the compiler vectorizes the wrong axis.
        delta[row] = inner(path, source.row(row, width), outputs.row(row, width));
        lse_block[row] = lse[(source.first_row + row) * source.heads + source.head];
    }
}

multiversion! {
    fn inner<F>(a: &[f32], b: &[f32]) -> f32 {
        dot::<F>(a, b)
    }
}

/// Distributes the tiles.
fn run(cpu: &Cpu, pass: &Gradients, byte_scratch: &mut [i8], float_scratch: &mut [f32]) {
    let p = pass.p;
    let (byte_scratch, float_scratch) = (SharedMut::new(byte_scratch), SharedMut::new(float_scratch));
    let work = |task: &(dyn Fn(&mut State, usize) + Sync), count: usize| {
        let tasks = StealingRanges::new(count, cpu.threads(), 1..=1);
        cpu.pool.run(|worker| {
            #[cfg(target_arch = "x86_64")]
            let _session = (cpu.path == Path::Amx).then(crate::cpu::amx::Session::start);
            // SAFETY: each thread has its own part of both, by its number.
            let scratch =
                unsafe { (part(&byte_scratch, worker, State::BYTES), part(&float_scratch, worker, State::FLOATS)) };
            let mut state = State::new(cpu.path, p.profile, scratch);
            while let Some(tasks) = tasks.next(worker) {
                tasks.for_each(|index| task(&mut state, index));
            }
        });
    };
    let query_tile = |state: &mut State, tile: Tile| {
        let (first_query, length) = (tile.first_query, p.spans[tile.span].keys.len());
        pass.start_queries(state);
        for first_key in (p.visible(first_query).start / TILE * TILE..=first_query).step_by(TILE) {
            pass.tile(state, &Tile { first_key, ..tile });
        }
        pass.store_queries(state, tile.span, tile.head, first_query..length.min(first_query + TILE));
    };
    if whole_heads(p, cpu.threads()) {
        let whole = |state: &mut State, task: usize| {
            let (span, head) = (task / p.heads, task % p.heads);
            let length = p.spans[span].keys.len();
            // ORDER: for a query key tiles ascend, for a key query tiles.
            for first_query in (0..length).step_by(TILE) {
                query_tile(state, Tile { span, head, first_query, first_key: 0, queries: true, keys: true });
            }
        };
        return work(&whole, p.spans.len() * p.heads);
    }
    // The last tiles of a span see the most keys, so blocks are taken from the end. Only blocks
    // that start a tile are tasks.
    let blocks = pass.operands.q.tensor.blocks;
    let count = blocks.total() * p.heads;
    let locate = |task: usize| {
        let (span, index) = blocks.locate((count - 1 - task) / p.heads);
        (span, index * ROWS, (count - 1 - task) % p.heads)
    };
    let queries = |state: &mut State, task: usize| {
        let (span, first_query, head) = locate(task);
        if !first_query.is_multiple_of(TILE) {
            return;
        }
        query_tile(state, Tile { span, head, first_query, first_key: 0, queries: true, keys: false });
    };
    work(&queries, count);
    let keys = |state: &mut State, task: usize| {
        let (span, first_key, head) = locate(task);
        if !first_key.is_multiple_of(TILE) {
            return;
        }
        for first_query in query_tiles(p, first_key, p.spans[span].keys.len()) {
            pass.tile(state, &Tile { span, head, first_query, first_key, queries: false, keys: true });
        }
    };
    work(&keys, count);
}

/// First queries of the tiles that see part of the key tile.
fn query_tiles(p: &Attention, first_key: usize, length: usize) -> impl Iterator<Item = usize> {
    let last_key = length.min(first_key + TILE) - 1;
    let end = p.window.map_or(length, |window| length.min(last_key + window));
    (first_key..end).step_by(TILE)
}

/// Whether whole heads keep the threads busy: five products in whole heads, seven when split.
/// Affects time only, not bits.
fn whole_heads(p: &Attention, threads: usize) -> bool {
    let cost = |length: usize| length.div_ceil(TILE) * length.div_ceil(TILE);
    let largest = p.spans.iter().map(|span| cost(span.keys.len())).max().unwrap_or(0);
    let total: usize = p.spans.iter().map(|span| cost(span.keys.len()) * p.heads).sum();
    5 * (largest * p.heads.div_ceil(threads)).max(total.div_ceil(threads)) <= 7 * total.div_ceil(threads)
}

/// Adds the key gradients of a group's heads and transposes them back: partials are
/// `[head][block][width][64 keys]`.
fn add_heads(cpu: &Cpu, out: &mut [f32], partials: &[f32], tensor: Tensor, p: &Attention, scratch: &mut [f32]) {
    let width = tensor.shape.width;
    let size = ROWS * width;
    let tasks = StealingRanges::new(p.kv_heads * tensor.blocks.total(), cpu.threads(), 1..=p.kv_heads);
    let (out, scratch) = (SharedMut::new(out), SharedMut::new(scratch));
    cpu.pool.run(|worker| {
        // SAFETY: each thread has its own part, by its number.
        let sum = unsafe { part(&scratch, worker, State::FLOATS) };
        for task in std::iter::from_fn(|| tasks.next(worker)).flatten() {
            let (block, kv) = (task / p.kv_heads, task % p.kv_heads);
            let (span, index) = tensor.blocks.locate(block);
            let partial = |head: usize| &partials[(head * tensor.blocks.total() + block) * size..][..size];
            // ORDER: heads ascend, from the first one's value.
            let heads: Range<usize> = kv * p.group()..(kv + 1) * p.group();
            sum[..size].copy_from_slice(partial(heads.start));
            for head in heads.skip(1) {
                add(cpu.path, &mut sum[..size], partial(head));
            }
            let source = tensor.source(&p.spans[span].keys, index, kv);
            for row in 0..source.rows {
                // SAFETY: a task is one block of keys of one head, handed out once; the rows of a
                // block are of one span, and spans do not overlap.
                let out = unsafe { part(&out, (source.first_row + row) * p.kv_heads + kv, width) };
                for (d, out) in out.iter_mut().enumerate() {
                    *out = sum[d * ROWS + row];
                }
            }
        }
    });
}

multiversion! {
    fn add<_F>(sum: &mut [f32], x: &[f32]) {
        for (sum, x) in sum.iter_mut().zip(x) {
            *sum += x;
        }
    }
}
