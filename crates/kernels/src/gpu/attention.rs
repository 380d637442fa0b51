//! Attention on a GPU (`op/attention.rs`): rows are sliced into the workspace, then a group owns a
//! few queries (or, for the gradients of keys and values, a few keys) and loops over the tiles
//! visible to them.
//!
//! Planes are indexed by *places*: the concatenated positions of all spans, each span padded to
//! whole blocks. So tiles start at the span's first key regardless of the tensors' rows, and rows
//! outside all spans are never read.

use super::device::{Gpu, Groups, arguments};
use super::memory::{DevicePointer, GpuBuffer, Parts};
use super::program::{Build, Program, files, program};
use super::runtime::Language;
use super::{GpuMemory, attention_mma};
use crate::backend::{Checked, Run};
use crate::op::{Attention, AttentionBackward, AttentionForward, Span};
use isobit_numerics::elementary::SoftCap;
use std::ops::Range;

impl Run<AttentionForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut AttentionForward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        forward(self, op, workspace);
    }
}

impl Run<AttentionBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut AttentionBackward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        backward(self, op, workspace);
    }
}

pub(super) static ATTENTION: Program = program!("attention");
/// The same kernels with the products of AMD's matrix cores.
pub(super) static ATTENTION_MFMA: Program =
    Program { name: "attention_mfma", text: files!("attention_mfma.cl", "attention.cl"), language: Language::Portable };

/// `PLACE_BLOCK`, `FORWARD_ROWS` and `BACKWARD_ROWS` in `gpu/attention.cl`. Blocks of places hold
/// whole blocks of rows.
pub(super) const PLACE_BLOCK: usize = 32;
const FORWARD_ROWS: usize = 16;
const BACKWARD_ROWS: usize = 16;

/// The program of the kernels.
fn kernels(gpu: &Gpu) -> &'static Program {
    if gpu.has_mfma() { &ATTENTION_MFMA } else { &ATTENTION }
}

/// A tensor of rows over places: its positions, number of heads and width.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) rows: fn(&Span) -> &Range<usize>,
    pub(super) heads: usize,
    pub(super) width: usize,
}

fn queries(span: &Span) -> &Range<usize> {
    &span.queries
}

fn keys(span: &Span) -> &Range<usize> {
    &span.keys
}

/// The four tensors of an op.
pub(super) struct Operands {
    pub(super) q: Operand,
    pub(super) k: Operand,
    pub(super) v: Operand,
    pub(super) d_o: Operand,
}

impl Operands {
    pub(super) fn new(p: &Attention) -> Self {
        Self {
            q: Operand { rows: queries, heads: p.heads, width: p.key_width },
            k: Operand { rows: keys, heads: p.kv_heads, width: p.key_width },
            v: Operand { rows: keys, heads: p.kv_heads, width: p.value_width },
            d_o: Operand { rows: queries, heads: p.heads, width: p.value_width },
        }
    }
}

/// The axis along which four neighbours are packed into a word.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Packing {
    Width,
    Place,
    Both,
}

/// An operand in the workspace. A packing that was not requested must not be read.
struct Planes {
    by_width: DevicePointer,
    by_place: DevicePointer,
    scales: DevicePointer,
}

impl Operand {
    pub(super) fn places(&self, p: &Attention) -> usize {
        p.spans.iter().map(|span| (self.rows)(span).len().next_multiple_of(PLACE_BLOCK)).sum()
    }

    /// Words of the planes by width and by place.
    fn words(&self, p: &Attention) -> (usize, usize) {
        let per_element = self.places(p) * self.heads * p.profile.slice_count();
        (per_element * self.width.div_ceil(4), per_element / 4 * self.width)
    }

    pub(super) fn scale_count(&self, p: &Attention) -> usize {
        self.places(p) * self.heads
    }

    fn bytes(&self, gpu: &Gpu, p: &Attention, packing: Packing) -> usize {
        let (by_width, by_place) = self.words(p);
        let mut bytes = gpu.part::<f32>(self.scale_count(p));
        if packing != Packing::Place {
            bytes += gpu.part::<i32>(by_width);
        }
        if packing != Packing::Width {
            bytes += gpu.part::<i32>(by_place);
        }
        bytes
    }

    fn slice(&self, gpu: &Gpu, x: &GpuBuffer<f32>, p: &Attention, packing: Packing, parts: &mut Parts) -> Planes {
        let (by_width, by_place) = self.words(p);
        let scales = parts.take::<f32>(self.scale_count(p));
        let [wide, deep] = [packing != Packing::Place, packing != Packing::Width];
        let by_width = if wide { parts.take::<i32>(by_width) } else { scales };
        let by_place = if deep { parts.take::<i32>(by_place) } else { scales };
        let blocks = gpu.offsets(&self.blocks(p));
        let shape = [self.heads, self.width, self.places(p)].map(narrow);
        gpu.launch_with(
            kernels(gpu),
            "attention_slice",
            build(p),
            Groups::each(self.places(p) / PLACE_BLOCK * self.heads),
            0,
            arguments![
                scales,
                by_width,
                by_place,
                x,
                &blocks,
                shape[0],
                shape[1],
                shape[2],
                u32::from(wide),
                u32::from(deep)
            ],
        );
        Planes { by_width, by_place, scales }
    }

    /// First row and number of rows of every block of places.
    pub(super) fn blocks(&self, p: &Attention) -> Vec<usize> {
        let blocks = p.spans.iter().flat_map(|span| {
            let rows = (self.rows)(span).clone();
            rows.clone().step_by(PLACE_BLOCK).flat_map(move |row| [row, (rows.end - row).min(PLACE_BLOCK)])
        });
        blocks.collect()
    }

    /// The rows of every group of a head, `per_group` or fewer each, in the format that `rows_of`
    /// in `gpu/attention.cl` reads, and the number of groups. `columns` is the other operand of the
    /// product.
    fn table(&self, gpu: &Gpu, columns: &Self, p: &Attention, per_group: usize) -> (GpuBuffer<u32>, usize) {
        let mut table = Vec::new();
        let (mut place, mut column) = (0, 0);
        for span in p.spans {
            let (rows, length) = ((self.rows)(span), span.keys.len());
            for first in (0..rows.len()).step_by(per_group) {
                let count = (rows.len() - first).min(per_group);
                let position = length - rows.len() + first;
                table.extend([place + first, count, rows.start + first, column, position, length]);
            }
            place += rows.len().next_multiple_of(PLACE_BLOCK);
            column += (columns.rows)(span).len().next_multiple_of(PLACE_BLOCK);
        }
        (gpu.offsets(&table), table.len() / 6)
    }
}

pub(super) fn narrow(x: usize) -> u32 {
    u32::try_from(x).expect("fewer than 2³² positions in a call")
}

/// Without a window, one that covers everything.
pub(super) fn window(p: &Attention) -> u32 {
    p.window.map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX))
}

fn build(p: &Attention) -> Build {
    Build::with_cap(p.profile, p.cap.is_some())
}

/// Without a cap, zeros, which no kernel reads.
fn cap(p: &Attention) -> SoftCap {
    p.cap_base2().unwrap_or(SoftCap { limit: 0.0, inverse: 0.0 })
}

pub(super) fn trains(p: &Attention) -> bool {
    p.spans.iter().all(|span| span.queries.len() == span.keys.len())
}

pub(super) fn workspace(gpu: &Gpu, p: &Attention) -> usize {
    if attention_mma::serves(gpu, p) {
        return attention_mma::workspace(gpu, p);
    }
    let all = Operands::new(p);
    let forward =
        all.q.bytes(gpu, p, Packing::Width) + all.k.bytes(gpu, p, Packing::Width) + all.v.bytes(gpu, p, Packing::Place);
    let backward = all.q.bytes(gpu, p, Packing::Both)
        + all.k.bytes(gpu, p, Packing::Both)
        + all.v.bytes(gpu, p, Packing::Width)
        + all.d_o.bytes(gpu, p, Packing::Both)
        + 2 * gpu.part::<f32>(all.q.scale_count(p));
    if trains(p) { forward.max(backward) } else { forward }
}

fn forward(gpu: &Gpu, op: &mut AttentionForward<GpuMemory>, workspace: &mut GpuBuffer<u8>) {
    let p = &op.p;
    let all = Operands::new(p);
    if attention_mma::serves(gpu, p) {
        return attention_mma::forward(gpu, op, workspace);
    }
    let mut parts = Parts::new(gpu, workspace);
    let q = all.q.slice(gpu, op.q, p, Packing::Width, &mut parts);
    let k = all.k.slice(gpu, op.k, p, Packing::Width, &mut parts);
    let v = all.v.slice(gpu, op.v, p, Packing::Place, &mut parts);
    let (table, blocks) = all.q.table(gpu, &all.k, p, FORWARD_ROWS);
    let SoftCap { limit, inverse } = cap(p);
    let [heads, group, key_width, value_width] = [p.heads, p.group(), p.key_width, p.value_width].map(narrow);
    let arguments = arguments![
        &*op.o,
        &*op.lse,
        q.by_width,
        q.scales,
        k.by_width,
        k.scales,
        v.by_place,
        v.scales,
        &table,
        heads,
        group,
        key_width,
        value_width,
        narrow(all.q.places(p)),
        narrow(all.k.places(p)),
        window(p),
        p.softmax_scale_base2(),
        limit,
        inverse
    ];
    gpu.launch_with(kernels(gpu), "attention_forward", build(p), Groups::each(blocks * p.heads), 0, arguments);
}

fn backward(gpu: &Gpu, op: &mut AttentionBackward<GpuMemory>, workspace: &mut GpuBuffer<u8>) {
    let p = &op.p;
    let all = Operands::new(p);
    if attention_mma::serves(gpu, p) {
        return attention_mma::backward(gpu, op, workspace);
    }
    let mut parts = Parts::new(gpu, workspace);
    let d_o = all.d_o.slice(gpu, op.d_o, p, Packing::Both, &mut parts);
    let q = all.q.slice(gpu, op.q, p, Packing::Both, &mut parts);
    let k = all.k.slice(gpu, op.k, p, Packing::Both, &mut parts);
    let v = all.v.slice(gpu, op.v, p, Packing::Width, &mut parts);
    let [delta, lse] = [(); 2].map(|()| parts.take::<f32>(all.q.scale_count(p)));
    let blocks = gpu.offsets(&all.q.blocks(p));
    let [heads, value_width, places] = [p.heads, p.value_width, all.q.places(p)].map(narrow);
    gpu.launch_with(
        kernels(gpu),
        "attention_delta",
        build(p),
        Groups::each(all.q.places(p) / PLACE_BLOCK * p.heads),
        0,
        arguments![delta, lse, op.d_o, op.o, op.lse, &blocks, heads, value_width, places],
    );
    let backward = Backward { gpu, p, all, q, k, v, d_o, delta, lse };
    backward.grad_query(op.dq);
    backward.grad_key(op.dk, op.dv);
}

/// The sliced operands of a backward pass, with the inner products and log-sum-exps by place. All
/// positions are queries, so queries and keys have the same places.
struct Backward<'a> {
    gpu: &'a Gpu,
    p: &'a Attention<'a>,
    all: Operands,
    q: Planes,
    k: Planes,
    v: Planes,
    d_o: Planes,
    delta: DevicePointer,
    lse: DevicePointer,
}

impl Backward<'_> {
    fn grad_query(&self, dq: &GpuBuffer<f32>) {
        let Self { gpu, p, all, q, k, v, d_o, .. } = self;
        let (table, blocks) = all.q.table(gpu, &all.k, p, BACKWARD_ROWS);
        let SoftCap { limit, inverse } = cap(p);
        let arguments = arguments![
            dq,
            q.by_width,
            q.scales,
            k.by_width,
            k.by_place,
            k.scales,
            v.by_width,
            v.scales,
            d_o.by_width,
            d_o.scales,
            self.delta,
            self.lse,
            &table,
            narrow(p.heads),
            narrow(p.group()),
            narrow(p.key_width),
            narrow(p.value_width),
            narrow(all.q.places(p)),
            window(p),
            p.softmax_scale,
            p.softmax_scale_base2(),
            limit,
            inverse
        ];
        gpu.launch_with(kernels(gpu), "attention_grad_query", build(p), Groups::each(blocks * p.heads), 0, arguments);
    }

    fn grad_key(&self, dk: &GpuBuffer<f32>, dv: &GpuBuffer<f32>) {
        let Self { gpu, p, all, q, k, v, d_o, .. } = self;
        let (table, blocks) = all.k.table(gpu, &all.q, p, BACKWARD_ROWS);
        let SoftCap { limit, inverse } = cap(p);
        let arguments = arguments![
            dk,
            dv,
            q.by_width,
            q.by_place,
            q.scales,
            k.by_width,
            k.scales,
            v.by_width,
            v.scales,
            d_o.by_width,
            d_o.by_place,
            d_o.scales,
            self.delta,
            self.lse,
            &table,
            narrow(p.kv_heads),
            narrow(p.group()),
            narrow(p.key_width),
            narrow(p.value_width),
            narrow(all.q.places(p)),
            window(p),
            p.softmax_scale,
            p.softmax_scale_base2(),
            limit,
            inverse
        ];
        gpu.launch_with(kernels(gpu), "attention_grad_key", build(p), Groups::each(blocks * p.kv_heads), 0, arguments);
    }
}
