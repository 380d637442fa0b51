//! The gated delta rule (`op/delta_rule.rs`): the division into tasks. A task is a key head of a
//! document with all its value heads, chunk by chunk; if that gives fewer tasks than threads, the
//! independent column panels of the state become separate tasks.
//!
//! `tile.rs` holds the chains, `chunk.rs` and `gradients.rs` a chunk forward and back, `scratch.rs`
//! the memory.

mod chunk;
mod gradients;
mod scratch;
mod tile;

use super::CpuMemory;
use super::pool::{SharedMut, Tasks};
use crate::backend::{Checked, Run};
use crate::buffer::Workspace;
use crate::op::delta_rule::CHUNK;
use crate::op::{DeltaRule, DeltaRuleBackward, DeltaRuleForward};
use crate::{Buffer, Cpu};
use chunk::Rows;
use gradients::PanelAt;
use isobit_numerics::lanes::sum;
use scratch::{GradScratch, Kept, Scratch, Shape, Sizes};
use std::ops::Range;
use tile::PANEL;

impl Run<DeltaRuleForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut DeltaRuleForward<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        let (final_state, initial_state) = (op.final_state.as_deref_mut(), op.initial_state);
        let (final_state, initial_state) =
            (final_state.map(|state| &mut state[..]), initial_state.map(|state| &state[..]));
        let inputs: Inputs = [op.q, op.k, op.v, op.g, op.beta];
        forward(self, op.o, final_state, inputs, initial_state, &op.p, workspace);
    }
}

impl Run<DeltaRuleBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut DeltaRuleBackward<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        let grads = [&mut *op.dq, &mut *op.dk, &mut *op.dv, &mut *op.dg, &mut *op.dbeta].map(|x| &mut x[..]);
        backward(self, grads, op.d_o, [op.q, op.k, op.v, op.g, op.beta].map(|x| &x[..]), &op.p, workspace);
    }
}

/// `q`, `k`, `v`, `g`, `beta`.
pub(super) type Inputs<'a> = [&'a [f32]; 5];
/// Their gradients.
pub(super) type Outputs<'a> = [&'a mut [f32]; 5];

fn tasks(p: &DeltaRule) -> usize {
    p.documents() * p.key_heads
}

/// Whether one task handles all columns of all value heads of its key head.
fn whole(cpu: &Cpu, p: &DeltaRule) -> bool {
    tasks(p) >= cpu.threads()
}

/// Memory of a key head, forward: two alternating states.
fn forward_sizes(p: &DeltaRule) -> Sizes {
    Sizes { heads: p.group(), states: 2, grads: 0, rows: 0 }
}

/// Backward: all states of a document, and their gradients unless two can alternate.
fn backward_sizes(cpu: &Cpu, p: &DeltaRule) -> Sizes {
    let chunks = p.longest().div_ceil(CHUNK);
    let grads = if whole(cpu, p) { 2 } else { chunks.max(2) };
    Sizes { heads: p.group(), states: chunks.max(1), grads, rows: chunks * CHUNK }
}

pub(super) fn workspace(cpu: &Cpu, p: &DeltaRule) -> usize {
    let (shape, kept) = (Shape::new(cpu.path, p), cpu.threads().min(tasks(p)));
    let scratch = Workspace::bytes::<f32>(Scratch::length(shape) + GradScratch::length(shape));
    let sizes = [forward_sizes(p), backward_sizes(cpu, p)].map(|sizes| sizes.bytes(shape));
    cpu.threads() * scratch + kept * sizes[0].max(sizes[1])
}

/// A thread's own memory.
struct Scratches<'a> {
    worker: usize,
    scratch: Scratch<'a>,
    grads: GradScratch<'a>,
}

/// Everything a task reads.
struct Pass<'a> {
    cpu: &'a Cpu,
    p: &'a DeltaRule<'a>,
    shape: Shape,
    inputs: Inputs<'a>,
}

impl<'a> Pass<'a> {
    fn new(cpu: &'a Cpu, p: &'a DeltaRule<'a>, inputs: Inputs<'a>) -> Self {
        Self { cpu, p, shape: Shape::new(cpu.path, p), inputs }
    }

    fn key_rows<'x>(&self, x: &'x [f32], token: usize, key_head: usize) -> Rows<'x> {
        let (heads, width) = (self.p.key_heads, self.p.key_width);
        Rows { x, first: (token * heads + key_head) * width, step: heads * width, width }
    }

    fn value_rows<'x>(&self, x: &'x [f32], token: usize, head: usize, width: usize) -> Rows<'x> {
        let heads = self.p.value_heads;
        Rows { x, first: (token * heads + head) * width, step: heads * width, width }
    }

    /// The part of a key head that its value heads share.
    fn scores(&self, scratch: &mut Scratch, tokens: &Range<usize>, key_head: usize, queries: bool) {
        let q = self.key_rows(self.inputs[0], tokens.start, key_head);
        let k = self.key_rows(self.inputs[1], tokens.start, key_head);
        chunk::scores(self.cpu.path, scratch, self.shape, tokens.len(), queries.then_some(q), k);
    }

    fn decays(&self, scratch: &mut Scratch, tokens: &Range<usize>, head: usize) {
        let g = self.value_rows(self.inputs[3], tokens.start, head, 1);
        let beta = self.value_rows(self.inputs[4], tokens.start, head, 1);
        chunk::decays(self.cpu.path, scratch, self.shape, tokens.len(), g, beta);
    }

    fn values(&self, scratch: &mut Scratch, x: &[f32], tokens: &Range<usize>, head: usize) {
        self.value_rows(x, tokens.start, head, self.p.value_width).pack(scratch.values, tokens.len());
    }

    /// The existing columns of the panels.
    fn columns(&self, panels: &Range<usize>) -> Range<usize> {
        panels.start * PANEL..(panels.end * PANEL).min(self.p.value_width)
    }

    /// Writes the columns of some panels into rows of a tensor like `v`.
    fn store(&self, out: &SharedMut<f32>, from: &[f32], tokens: &Range<usize>, head: usize, panels: &Range<usize>) {
        let columns = self.columns(panels);
        for (i, t) in tokens.clone().enumerate() {
            let at = (t * self.p.value_heads + head) * self.p.value_width;
            // SAFETY: a pair of document and key head has these tokens and this head, and of its
            // tasks one has these panels: the columns are this task's alone.
            let out = unsafe { out.slice(at + columns.start..at + columns.end) };
            out.copy_from_slice(&from[i * self.shape.value_padded..][columns.clone()]);
        }
    }

    /// Runs `task(scratches, index)` for every index on all threads; each thread has its own
    /// scratches.
    fn run(&self, scratches: &mut [f32], count: usize, task: impl Fn(&mut Scratches, usize) + Sync) {
        let (tasks, scratches) = (Tasks::new(count), SharedMut::new(scratches));
        let [length, grad_length] = [Scratch::length(self.shape), GradScratch::length(self.shape)];
        self.cpu.pool.run(|worker| {
            let at = worker * (length + grad_length);
            // SAFETY: each thread has its own task, by its number.
            let scratch = unsafe { scratches.slice(at..at + length + grad_length) };
            let (scratch, grads) = scratch.split_at_mut(length);
            let (scratch, grads) = (Scratch::new(scratch, self.shape), GradScratch::new(grads, self.shape));
            let mut scratches = Scratches { worker, scratch, grads };
            while let Some(index) = tasks.next() {
                task(&mut scratches, index);
            }
        });
    }

    /// A document's chunk by number.
    fn chunk(&self, document: usize, chunk: usize) -> Range<usize> {
        let tokens = self.p.document(document);
        tokens.start + chunk * CHUNK..(tokens.start + (chunk + 1) * CHUNK).min(tokens.end)
    }

    fn chunks(&self, document: usize) -> usize {
        self.p.document(document).len().div_ceil(CHUNK)
    }
}

/// The work of one task: some panels of some value heads of a key head of a document.
struct Task {
    /// Index of the (document, key head) pair.
    pair: usize,
    document: usize,
    key_head: usize,
    /// Value heads, counted within the key head's group.
    heads: Range<usize>,
    panels: Range<usize>,
}

impl Task {
    fn count(pass: &Pass) -> usize {
        let parts = if whole(pass.cpu, pass.p) { 1 } else { pass.p.group() * pass.shape.panels() };
        tasks(pass.p) * parts
    }

    fn new(pass: &Pass, index: usize) -> Self {
        let (group, panels) = (pass.p.group(), pass.shape.panels());
        let (pair, heads, panels) = if whole(pass.cpu, pass.p) {
            (index, 0..group, 0..panels)
        } else {
            let (head, panel) = (index / panels % group, index % panels);
            (index / panels / group, head..head + 1, panel..panel + 1)
        };
        Self { pair, document: pair / pass.p.key_heads, key_head: pair % pass.p.key_heads, heads, panels }
    }

    /// Index of the pair's kept scratch: the thread's if the pair is a single task.
    fn place(&self, pass: &Pass, worker: usize) -> usize {
        if whole(pass.cpu, pass.p) { worker } else { self.pair }
    }
}

pub(super) fn forward(
    cpu: &Cpu,
    o: &mut [f32],
    final_state: Option<&mut [f32]>,
    inputs: Inputs,
    initial_state: Option<&[f32]>,
    p: &DeltaRule,
    workspace: &mut [u8],
) {
    let pass = Pass::new(cpu, p, inputs);
    let (shape, sizes) = (pass.shape, forward_sizes(p));
    let mut workspace = Workspace::new(workspace);
    let scratches = workspace.take::<f32>(cpu.threads() * (Scratch::length(shape) + GradScratch::length(shape)));
    let kept = SharedMut::new(workspace.take::<f32>(cpu.threads().min(tasks(p)) * sizes.length(shape)));
    let (o, last) = (SharedMut::new(o), final_state.map(SharedMut::new));
    pass.run(scratches, Task::count(&pass), |Scratches { worker, scratch, .. }, index| {
        let task = Task::new(&pass, index);
        let kept = Kept::new(&kept, task.place(&pass, *worker), shape, sizes);
        let chunks = pass.chunks(task.document);
        let state_at = |head: usize| (task.document * p.value_heads + task.key_head * p.group() + head) * p.key_width;
        for head in task.heads.clone() {
            for panel in task.panels.clone() {
                // SAFETY: what is kept of these panels is this task's alone: its place is the
                // thread's where a task is a whole pair, else the pair's, whose tasks have
                // different panels.
                let state = unsafe { kept.state(head, panel, 0) };
                read_state(state, initial_state, state_at(head), panel, p);
            }
        }
        for chunk in 0..chunks {
            let tokens = pass.chunk(task.document, chunk);
            pass.scores(scratch, &tokens, task.key_head, true);
            for within in task.heads.clone() {
                let head = task.key_head * p.group() + within;
                pass.decays(scratch, &tokens, head);
                pass.values(scratch, inputs[2], &tokens, head);
                for panel in task.panels.clone() {
                    // SAFETY: this task's panel; two states take turns, so those of two chunks in a
                    // row are different slots.
                    let (state, next) =
                        unsafe { (&*kept.state(within, panel, chunk), kept.state(within, panel, chunk + 1)) };
                    let state = (chunk > 0 || initial_state.is_some()).then_some(state);
                    chunk::corrections(cpu.path, scratch, shape, tokens.len(), panel, state, true);
                    if chunk + 1 < chunks || last.is_some() {
                        chunk::advance(pass.cpu.path, next, scratch, shape, tokens.len(), panel, state);
                    }
                }
                pass.store(&o, scratch.values, &tokens, head, &task.panels);
            }
        }
        if let Some(last) = &last {
            for head in task.heads.clone() {
                for panel in task.panels.clone() {
                    // SAFETY: this task's panel, of which nothing else is borrowed any more.
                    write_state(last, unsafe { kept.state(head, panel, chunks) }, state_at(head), panel, p);
                }
            }
        }
    });
}

/// Fills a panel from a state `[key_width, value_width]` whose rows start at `row`, or with zeros.
fn read_state(panel_state: &mut [f32], states: Option<&[f32]>, row: usize, panel: usize, p: &DeltaRule) {
    panel_state.fill(0.0);
    let Some(states) = states else { return };
    let columns = panel * PANEL..((panel + 1) * PANEL).min(p.value_width);
    for (d, out) in panel_state.chunks_exact_mut(PANEL).take(p.key_width).enumerate() {
        out[..columns.len()].copy_from_slice(&states[(row + d) * p.value_width..][columns.clone()]);
    }
}

fn write_state(states: &SharedMut<f32>, panel_state: &[f32], row: usize, panel: usize, p: &DeltaRule) {
    let columns = panel * PANEL..((panel + 1) * PANEL).min(p.value_width);
    for (d, from) in panel_state.chunks_exact(PANEL).take(p.key_width).enumerate() {
        let at = (row + d) * p.value_width;
        // SAFETY: the state of a task's own head, and of it the columns of a task's own panel.
        unsafe { states.slice(at + columns.start..at + columns.end) }.copy_from_slice(&from[..columns.len()]);
    }
}

/// The state before every chunk, and `Y`.
fn recompute(pass: &Pass, scratch: &mut Scratch, kept: Kept, task: &Task) {
    let (shape, chunks) = (pass.shape, pass.chunks(task.document));
    for chunk in 0..chunks {
        let tokens = pass.chunk(task.document, chunk);
        pass.scores(scratch, &tokens, task.key_head, false);
        for within in task.heads.clone() {
            let head = task.key_head * pass.p.group() + within;
            pass.decays(scratch, &tokens, head);
            pass.values(scratch, pass.inputs[2], &tokens, head);
            for panel in task.panels.clone() {
                // SAFETY: what is kept of this panel is this task's alone, and this state is only
                // read while it is borrowed.
                let state = (chunk > 0).then(|| unsafe { &*kept.state(within, panel, chunk) });
                chunk::corrections(pass.cpu.path, scratch, shape, tokens.len(), panel, state, false);
                if chunk + 1 < chunks {
                    // SAFETY: this task's panel; all states of a document are kept, so the next one
                    // is another slot than `state`.
                    let next = unsafe { kept.state(within, panel, chunk + 1) };
                    chunk::advance(pass.cpu.path, next, scratch, shape, tokens.len(), panel, state);
                }
                // SAFETY: this task's panel; the rows of `Y` are another part than the states.
                let y = unsafe { kept.rows(0, within, panel, chunk * CHUNK..(chunk + 1) * CHUNK) };
                for (y, from) in y.chunks_exact_mut(PANEL).zip(scratch.y.chunks_exact(shape.value_padded)) {
                    y.copy_from_slice(&from[panel * PANEL..][..PANEL]);
                }
            }
        }
    }
}

/// Gradients of `δ`, `v` and the state for one chunk of one value head. The scratch holds the key
/// head's scores.
fn columns_backward(
    pass: &Pass,
    scratches: &mut Scratches,
    kept: Kept,
    task: &Task,
    at: &At,
    d_o: &[f32],
    dv: &SharedMut<f32>,
) {
    let (Scratches { scratch, grads, .. }, shape, n) = (scratches, pass.shape, at.tokens.len());
    let head = task.key_head * pass.p.group() + at.head;
    pass.decays(scratch, &at.tokens, head);
    pass.values(scratch, d_o, &at.tokens, head);
    gradients::decayed(pass.cpu.path, grads, scratch, shape);
    for panel in task.panels.clone() {
        // SAFETY: what is kept of this panel is this task's alone, and this gradient is only read
        // while it is borrowed.
        let after =
            (at.chunk + 1 < pass.chunks(task.document)).then(|| unsafe { &*kept.grad(at.head, panel, at.chunk) });
        // SAFETY: this task's panel; at least two gradients are kept, so that of the chunk before
        // is another slot than `after`.
        let before = (at.chunk > 0).then(|| unsafe { kept.grad(at.head, panel, at.chunk - 1) });
        gradients::panel_backward(pass.cpu.path, grads, scratch, PanelAt { shape, n, panel }, after, before);
        // SAFETY: this task's panel; the rows of the gradient of `δ` are another part than the
        // gradients of states.
        let d_delta = unsafe { kept.rows(1, at.head, panel, at.chunk * CHUNK..(at.chunk + 1) * CHUNK) };
        for (out, from) in d_delta.chunks_exact_mut(PANEL).zip(grads.d_delta.chunks_exact(shape.value_padded)) {
            out.copy_from_slice(&from[panel * PANEL..][..PANEL]);
        }
    }
    pass.store(dv, grads.dy, &at.tokens, head, &task.panels);
}

/// A chunk of a document for one value head.
struct At {
    chunk: usize,
    tokens: Range<usize>,
    /// Counted within the key head's group.
    head: usize,
}

/// Destinations of all gradients except that of `v`.
struct Sums<'a> {
    dq: SharedMut<'a, f32>,
    dk: SharedMut<'a, f32>,
    dg: SharedMut<'a, f32>,
    dbeta: SharedMut<'a, f32>,
}

/// Gradients of `q`, `k`, `g`, `beta` for one chunk of one value head. The scratches hold what
/// [`columns_backward`] left there for all panels.
fn sums_backward(pass: &Pass, scratches: &mut Scratches, kept: Kept, task: &Task, at: &At, sums: &Sums) {
    let (Scratches { scratch, grads, .. }, shape, p, n) = (scratches, pass.shape, pass.p, at.tokens.len());
    let head = task.key_head * p.group() + at.head;
    let path = pass.cpu.path;
    // A first chunk has no state before it, a last one no gradient after it.
    let has = [at.chunk > 0, at.chunk + 1 < pass.chunks(task.document)];
    let mut products = [0.0; crate::op::delta_rule::HEAD_WIDTH_MAX];
    for panel in 0..shape.panels() {
        let rows = at.chunk * CHUNK..(at.chunk + 1) * CHUNK;
        // SAFETY: one task has this chunk of this head: that which wrote it, or the only one of a
        // later job to read it.
        let y = unsafe { &*kept.rows(0, at.head, panel, rows) };
        gradients::unpack(path, scratch.y, scratch.delta, scratch.beta, PanelAt { shape, n, panel }, y);
        // SAFETY: the state and the gradient that belong to this chunk, different parts of what one
        // task has: that which wrote them, or the only one of a later job to read them.
        let (before, after) =
            unsafe { (&*kept.state(at.head, panel, at.chunk), &*kept.grad(at.head, panel, at.chunk)) };
        if has[0] {
            gradients::transpose_state(path, grads.state_transposed, shape, panel, before);
        }
        if has[1] {
            gradients::transpose_state(path, grads.grad_transposed, shape, panel, after);
        }
        if has == [true, true] {
            gradients::state_product(path, &mut products[panel * PANEL..][..PANEL], shape, before, after);
        }
    }
    gradients::chunk_backward(path, grads, scratch, shape, n, sum(&products[..p.value_width]), has);
    for (i, t) in at.tokens.clone().enumerate() {
        let key_row = (t * p.key_heads + task.key_head) * p.key_width;
        for (out, from) in [(&sums.dq, &*grads.from_q), (&sums.dk, &*grads.from_k)] {
            // SAFETY: one task has these tokens of this key head, whatever the value head.
            let out = unsafe { out.slice(key_row..key_row + p.key_width) };
            let from = &from[i * shape.key_padded..][..p.key_width];
            // ORDER: value heads ascend; the first one's value is the start of the sum.
            if at.head == 0 {
                out.copy_from_slice(from);
            } else {
                out.iter_mut().zip(from).for_each(|(out, from)| *out += from);
            }
        }
        let scalar = t * p.value_heads + head;
        // SAFETY: one task has this token of this value head; the two gradients are different
        // tensors.
        unsafe {
            sums.dg.slice(scalar..scalar + 1)[0] = grads.reads[i];
            sums.dbeta.slice(scalar..scalar + 1)[0] = grads.ends[i];
        }
    }
}

/// The backward pass of all documents and heads.
struct Backward<'a> {
    pass: Pass<'a>,
    kept: SharedMut<'a, f32>,
    sizes: Sizes,
    d_o: &'a [f32],
    dv: SharedMut<'a, f32>,
    sums: Sums<'a>,
}

impl Backward<'_> {
    fn kept(&self, place: usize) -> Kept<'_> {
        Kept::new(&self.kept, place, self.pass.shape, self.sizes)
    }

    /// Everything of one key head.
    fn whole(&self, scratches: &mut Scratches, task: &Task) {
        let pass = &self.pass;
        let kept = self.kept(task.place(pass, scratches.worker));
        recompute(pass, &mut scratches.scratch, kept, task);
        for chunk in (0..pass.chunks(task.document)).rev() {
            let tokens = pass.chunk(task.document, chunk);
            pass.scores(&mut scratches.scratch, &tokens, task.key_head, true);
            for head in task.heads.clone() {
                let at = At { chunk, tokens: tokens.clone(), head };
                columns_backward(pass, scratches, kept, task, &at, self.d_o, &self.dv);
                sums_backward(pass, scratches, kept, task, &at, &self.sums);
            }
        }
    }

    /// The gradients carried between chunks, of some columns of one value head.
    fn columns(&self, scratches: &mut Scratches, task: &Task) {
        let pass = &self.pass;
        let kept = self.kept(task.pair);
        recompute(pass, &mut scratches.scratch, kept, task);
        for chunk in (0..pass.chunks(task.document)).rev() {
            let tokens = pass.chunk(task.document, chunk);
            pass.scores(&mut scratches.scratch, &tokens, task.key_head, true);
            let at = At { chunk, tokens, head: task.heads.start };
            columns_backward(pass, scratches, kept, task, &at, self.d_o, &self.dv);
        }
    }

    /// The gradients summed over all columns, of one chunk of one key head. The job that ran
    /// [`Self::columns`] is over.
    fn chunk_sums(&self, scratches: &mut Scratches, document: usize, chunk: usize, key_head: usize) {
        let (pass, shape) = (&self.pass, self.pass.shape);
        let pair = document * pass.p.key_heads + key_head;
        let task = Task { pair, document, key_head, heads: 0..pass.p.group(), panels: 0..shape.panels() };
        let tokens = pass.chunk(document, chunk);
        pass.scores(&mut scratches.scratch, &tokens, key_head, true);
        for head in task.heads.clone() {
            let kept = self.kept(pair);
            let value_head = key_head * pass.p.group() + head;
            pass.decays(&mut scratches.scratch, &tokens, value_head);
            pass.values(&mut scratches.scratch, self.d_o, &tokens, value_head);
            for panel in task.panels.clone() {
                // SAFETY: the job that wrote it is over, and one task has this chunk of this head.
                let d_delta = unsafe { &*kept.rows(1, head, panel, chunk * CHUNK..(chunk + 1) * CHUNK) };
                let Scratches { scratch, grads, .. } = &mut *scratches;
                let at = PanelAt { shape, n: tokens.len(), panel };
                gradients::unpack(pass.cpu.path, grads.d_delta, grads.dy, scratch.beta, at, d_delta);
            }
            let at = At { chunk, tokens: tokens.clone(), head };
            sums_backward(pass, scratches, kept, &task, &at, &self.sums);
        }
    }
}

pub(super) fn backward(
    cpu: &Cpu,
    [dq, dk, dv, dg, dbeta]: Outputs,
    d_o: &[f32],
    inputs: Inputs,
    p: &DeltaRule,
    workspace: &mut [u8],
) {
    let pass = Pass::new(cpu, p, inputs);
    let (shape, sizes) = (pass.shape, backward_sizes(cpu, p));
    let mut workspace = Workspace::new(workspace);
    let scratches = workspace.take::<f32>(cpu.threads() * (Scratch::length(shape) + GradScratch::length(shape)));
    let kept = SharedMut::new(workspace.take::<f32>(cpu.threads().min(tasks(p)) * sizes.length(shape)));
    let dv = SharedMut::new(dv);
    let [dq, dk, dg, dbeta] = [dq, dk, dg, dbeta].map(SharedMut::new);
    let all = Backward { pass, kept, sizes, d_o, dv, sums: Sums { dq, dk, dg, dbeta } };
    let pass = &all.pass;
    if whole(cpu, p) {
        pass.run(scratches, Task::count(pass), |scratches, index| all.whole(scratches, &Task::new(pass, index)));
        return;
    }
    pass.run(scratches, Task::count(pass), |scratches, index| all.columns(scratches, &Task::new(pass, index)));
    let chunks: Vec<usize> = (0..p.documents()).map(|document| pass.chunks(document)).collect();
    pass.run(scratches, chunks.iter().sum::<usize>() * p.key_heads, |scratches, index| {
        let (mut document, mut chunk) = (0, index / p.key_heads);
        while chunk >= chunks[document] {
            chunk -= chunks[document];
            document += 1;
        }
        all.chunk_sums(scratches, document, chunk, index % p.key_heads);
    });
}
