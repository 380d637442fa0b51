//! Attention on int8 tensor cores (`gpu/attention_mma.cuh`): NVIDIA devices from compute capability
//! 8.0 on, profile x2.
//!
//! Rows are sliced into the workspace, by width for scores and by place for contractions over
//! positions. Each of the three gradients has its own kernel; those of keys and values are computed
//! per query head, then added over the heads of a group in order. Until dQ is written, its memory
//! holds these shares. Other devices use the portable kernels.

use super::GpuMemory;
use super::attention::{Operand, Operands, PLACE_BLOCK, narrow, trains, window};
use super::device::{Gpu, Groups, arguments};
use super::memory::{DevicePointer, GpuBuffer, Parts};
use super::program::{Build, Program, files};
use super::runtime::{Argument, Language};
use crate::op::{Attention, AttentionBackward, AttentionForward};
use isobit_numerics::slices::Profile;

/// The program in `crates/kernels/gpu/<name>.cu`, after the code common to all of them.
macro_rules! program {
    ($name:literal) => {
        Program {
            name: $name,
            text: files!("mma.cuh", "attention_mma.cuh", concat!($name, ".cu")),
            language: Language::Cuda,
        }
    };
}

pub(super) static SLICES_OF_ROWS: Program = program!("attention_slices");
pub(super) static FORWARD: Program = program!("attention_forward");
pub(super) static BACKWARD: Program = program!("attention_backward");

/// Per block: `THREADS`, `ROWS`, `TILE` and `BLOCK` in the kernels, and the slices of an integer.
const THREADS: usize = 128;
const ROWS: usize = 64;
const TILE: usize = 128;
const BLOCK: usize = PLACE_BLOCK;
const SLICES: usize = 2;
/// Result columns that a block keeps: `PART_MAX`.
const PART_MAX: usize = 128;
/// Number of tiles whose per-column numbers are kept: `AHEAD`.
const AHEAD: usize = 4;
/// Numbers per place: scales of q and dO, lse and D; scales of k and v.
const QUERY_NUMBERS: usize = 4;
const KEY_NUMBERS: usize = 2;

/// Width of the planes of a head: whole tensor-core steps.
fn padded(width: usize) -> usize {
    width.next_multiple_of(32)
}

/// The number of parts in which the columns of a result are computed.
fn parts_of(width: usize) -> usize {
    let padded = padded(width);
    let part = if padded <= PART_MAX { padded } else { (padded / 32).div_ceil(2) * 32 };
    padded.div_ceil(part)
}

/// Bytes of shared memory of the kernels: rows, a ring of slots with columns, numbers per column.
struct Shared {
    forward: usize,
    grad_query: usize,
    grad_key: usize,
    grad_value: usize,
}

impl Shared {
    fn new(p: &Attention, architecture: (u32, u32)) -> Self {
        let (key, value) = (padded(p.key_width), padded(p.value_width));
        // `each` blocks of columns per slot, or 64 columns of results.
        let bytes = |width: usize, numbers: usize, each: usize, slots: usize| {
            let block = SLICES * BLOCK * width;
            let slot = (each * block).max(SLICES * TILE * 64);
            ROWS / BLOCK * block + slots * slot + AHEAD * numbers * TILE * size_of::<f32>()
        };
        // `FORWARD_EACH`, `FORWARD_SLOTS`, `QUERY_EACH` and `QUERY_SLOTS`.
        let (each, slots) = if key <= 128 { (2, 4) } else { (1, 3) };
        let (grad_each, grad_slots) = match (key + value <= 256, is_roomy(architecture)) {
            (true, true) => (2, 2),
            (true, false) => (1, 3),
            (false, _) => (1, 2),
        };
        Self {
            forward: bytes(key, KEY_NUMBERS, each, slots),
            grad_query: bytes(key + value, KEY_NUMBERS, grad_each, grad_slots),
            grad_key: bytes(key + value, QUERY_NUMBERS, grad_each, grad_slots),
            grad_value: bytes(key, QUERY_NUMBERS, each, slots),
        }
    }

    /// Including the barriers of the slots and the driver's reserve.
    fn most(&self) -> usize {
        self.forward.max(self.grad_query).max(self.grad_key).max(self.grad_value) + 1024
    }
}

/// `ROOMY` in the kernels.
fn is_roomy(architecture: (u32, u32)) -> bool {
    ((9, 0)..(12, 0)).contains(&architecture)
}

/// Bytes of shared memory available to a block on a device of this compute capability.
fn shared_limit(architecture: (u32, u32)) -> usize {
    const KIB: usize = 1024;
    match architecture {
        (8, 0 | 7) => 163 * KIB,
        _ if is_roomy(architecture) => 227 * KIB,
        _ => 99 * KIB,
    }
}

/// Whether the device has these tensor cores and enough shared memory for heads of these widths.
pub(super) fn serves(gpu: &Gpu, p: &Attention) -> bool {
    // These kernels have no soft-capping.
    p.profile == Profile::X2
        && p.cap.is_none()
        && gpu.architecture().is_some_and(|it| it >= (8, 0) && Shared::new(p, it).most() <= shared_limit(it))
}

/// How the programs are compiled for heads of these widths.
pub(super) fn build(profile: Profile, key_width: usize, value_width: usize) -> Build {
    Build::with_widths(profile, padded(key_width), padded(value_width))
}

fn shared(gpu: &Gpu, p: &Attention) -> Shared {
    Shared::new(p, gpu.architecture().expect("a device that serves"))
}

/// The axes along which the bytes of planes are contracted.
#[derive(Clone, Copy)]
struct Packing {
    by_width: bool,
    by_place: bool,
}

const WIDTH: Packing = Packing { by_width: true, by_place: false };
const PLACE: Packing = Packing { by_width: false, by_place: true };
const BOTH: Packing = Packing { by_width: true, by_place: true };

/// A tensor, and where its slices go. Planes that were not requested are absent.
struct Sliced<'a> {
    x: &'a GpuBuffer<f32>,
    operand: Operand,
    /// Its blocks of places within the tables.
    blocks: (usize, usize),
    by_width: Option<DevicePointer>,
    by_place: Option<DevicePointer>,
    /// Numbers per place; scales are number `index` of `count`.
    numbers: DevicePointer,
    index: usize,
    count: usize,
}

impl<'a> Sliced<'a> {
    fn of_queries(
        x: &'a GpuBuffer<f32>,
        operand: Operand,
        index: usize,
        scratch: &mut Scratch,
        packing: Packing,
    ) -> Self {
        let (numbers, blocks) = (scratch.query_numbers, scratch.query_blocks);
        Self::new(x, operand, blocks, (numbers, index, QUERY_NUMBERS), scratch, packing)
    }

    fn of_keys(x: &'a GpuBuffer<f32>, operand: Operand, index: usize, scratch: &mut Scratch, packing: Packing) -> Self {
        let (numbers, blocks) = (scratch.key_numbers, scratch.key_blocks);
        Self::new(x, operand, blocks, (numbers, index, KEY_NUMBERS), scratch, packing)
    }

    fn new(
        x: &'a GpuBuffer<f32>,
        operand: Operand,
        blocks: (usize, usize),
        (numbers, index, count): (DevicePointer, usize, usize),
        scratch: &mut Scratch,
        packing: Packing,
    ) -> Self {
        let bytes = plane_bytes(&operand, scratch.p);
        let by_width = packing.by_width.then(|| scratch.parts.take::<i8>(bytes));
        let by_place = packing.by_place.then(|| scratch.parts.take::<i8>(bytes));
        Self { x, operand, blocks, by_width, by_place, numbers, index, count }
    }

    /// `Operand` in the kernels.
    fn descriptor(&self, call: &Call, groups: usize) -> [u64; 16] {
        let address = |place: Option<DevicePointer>| place.map_or(0, DevicePointer::address);
        let pair = |low: usize, high: usize| u64::from(narrow(low)) | u64::from(narrow(high)) << 32;
        let width = self.operand.width;
        let mut words = [0; 16];
        words[0] = DevicePointer::from(self.x).address();
        words[1] = DevicePointer::from(&call.tables).address() + (self.blocks.0 * size_of::<u32>()) as u64;
        words[2] = address(self.by_width);
        words[3] = address(self.by_place);
        words[4] = self.numbers.address();
        words[5] = pair(self.index, self.count);
        words[6] = pair(self.operand.heads, width);
        words[7] = pair(padded(width), self.operand.places(call.p));
        words[8] = pair(groups, 0);
        words
    }

    fn wide(&self) -> DevicePointer {
        self.by_width.expect("planes by width were asked for")
    }

    fn deep(&self) -> DevicePointer {
        self.by_place.expect("planes by place were asked for")
    }
}

/// Hands out the workspace of a call.
struct Scratch<'a> {
    p: &'a Attention<'a>,
    parts: Parts,
    query_numbers: DevicePointer,
    key_numbers: DevicePointer,
    query_blocks: (usize, usize),
    key_blocks: (usize, usize),
}

impl<'a> Scratch<'a> {
    fn new(call: &Call<'a>, plan: &Tables, workspace: &mut GpuBuffer<u8>) -> Self {
        let (p, all) = (call.p, Operands::new(call.p));
        let mut parts = Parts::new(call.gpu, workspace);
        let query_numbers = parts.take::<f32>(all.q.scale_count(p) * QUERY_NUMBERS);
        let key_numbers = parts.take::<f32>(all.k.scale_count(p) * KEY_NUMBERS);
        let (query_blocks, key_blocks) = (plan.query_blocks, plan.key_blocks);
        Self { p, parts, query_numbers, key_numbers, query_blocks, key_blocks }
    }
}

fn plane_bytes(operand: &Operand, p: &Attention) -> usize {
    SLICES * operand.scale_count(p) * padded(operand.width)
}

fn operand_bytes(gpu: &Gpu, operand: &Operand, p: &Attention, packing: Packing) -> usize {
    let planes = usize::from(packing.by_width) + usize::from(packing.by_place);
    planes * gpu.part::<i8>(plane_bytes(operand, p))
}

/// Whether shares of the gradient of values need separate memory: dQ's is too narrow for them.
fn wide_shares(p: &Attention) -> bool {
    p.group() > 1 && p.value_width > p.key_width
}

pub(super) fn workspace(gpu: &Gpu, p: &Attention) -> usize {
    let all = Operands::new(p);
    let bytes = |operand: &Operand, packing| operand_bytes(gpu, operand, p, packing);
    let numbers =
        gpu.part::<f32>(all.q.scale_count(p) * QUERY_NUMBERS) + gpu.part::<f32>(all.k.scale_count(p) * KEY_NUMBERS);
    let forward = numbers + bytes(&all.q, WIDTH) + bytes(&all.k, WIDTH) + bytes(&all.v, PLACE);
    let shares = if wide_shares(p) { gpu.part::<f32>(all.d_o.scale_count(p) * p.value_width) } else { 0 };
    let backward =
        numbers + bytes(&all.q, BOTH) + bytes(&all.k, BOTH) + bytes(&all.v, WIDTH) + bytes(&all.d_o, BOTH) + shares;
    if trains(p) { forward.max(backward) } else { forward }
}

/// The rows of every thread block of a head, in the format that `rows_of` in the kernels reads,
/// those with the most work first. Rows are queries or, if `transposed`, keys; `source` selects
/// where their results go.
fn rows_table(all: &Operands, p: &Attention, transposed: bool, source: RowsOf) -> Vec<usize> {
    let (rows, columns) = if transposed { (&all.k, &all.q) } else { (&all.q, &all.k) };
    let mut blocks: Vec<(usize, [usize; 6])> = Vec::new();
    let (mut place, mut column) = (0, 0);
    for span in p.spans {
        let (own, length) = ((rows.rows)(span), span.keys.len());
        let start = match source {
            RowsOf::Operand(operand) => (operand.rows)(span).start,
            RowsOf::Places => place,
        };
        for first in (0..own.len()).step_by(ROWS) {
            let count = (own.len() - first).min(ROWS);
            let position = length - own.len() + first;
            // Queries see earlier keys, keys are seen by later queries; a window bounds both.
            let met = if transposed { length - position } else { position + count };
            let met = p.window.map_or(met, |window| met.min(window.saturating_add(count)));
            blocks.push((met, [place + first, count, start + first, column, position, length]));
        }
        place += own.len().next_multiple_of(BLOCK);
        column += (columns.rows)(span).len().next_multiple_of(BLOCK);
    }
    blocks.sort_by_key(|&(met, _)| std::cmp::Reverse(met));
    blocks.into_iter().flat_map(|(_, entry)| entry).collect()
}

#[derive(Clone, Copy)]
enum RowsOf<'a> {
    Operand(&'a Operand),
    Places,
}

/// The concatenated tables of a call: the start and length of each. Forward and backward use the
/// same.
struct Tables {
    words: Vec<usize>,
    query_blocks: (usize, usize),
    key_blocks: (usize, usize),
    query_rows: (usize, usize),
    /// Rows of keys, and where shares of the gradients of values are stored: at the rows of dQ, or
    /// over places.
    key_rows: (usize, usize),
    value_rows: (usize, usize),
    value_blocks: (usize, usize),
}

impl Tables {
    fn new(p: &Attention) -> Self {
        let all = Operands::new(p);
        let mut words = Vec::new();
        let mut add = |table: &[usize]| {
            let start = words.len();
            words.extend_from_slice(table);
            (start, table.len())
        };
        let query_blocks = add(&all.q.blocks(p));
        let key_blocks = add(&all.k.blocks(p));
        let query_rows = add(&rows_table(&all, p, false, RowsOf::Operand(&all.q)));
        let (mut key_rows, mut value_rows, mut value_blocks) = ((0, 0), (0, 0), query_blocks);
        if trains(p) {
            // Shares are stored at dQ's rows, or over places; without head groups the gradients go
            // directly to the rows of the keys.
            let own = RowsOf::Operand(if p.group() > 1 { &all.q } else { &all.k });
            key_rows = add(&rows_table(&all, p, true, own));
            value_rows = key_rows;
            if wide_shares(p) {
                value_rows = add(&rows_table(&all, p, true, RowsOf::Places));
                let blocks = (0..query_blocks.1 / 2).flat_map(|block| [block * BLOCK, BLOCK]);
                value_blocks = add(&blocks.collect::<Vec<_>>());
            }
        }
        Self { words, query_blocks, key_blocks, query_rows, key_rows, value_rows, value_blocks }
    }
}

/// Rows that a kernel owns: their table, the width of their results, the shared memory per block.
#[derive(Clone, Copy)]
struct Rows {
    table: (usize, usize),
    width: usize,
    shared: usize,
}

/// One call on one device.
struct Call<'a> {
    gpu: &'a Gpu,
    p: &'a Attention<'a>,
    tables: GpuBuffer<u32>,
}

impl<'a> Call<'a> {
    fn new(gpu: &'a Gpu, p: &'a Attention<'a>, tables: &Tables) -> Self {
        Self { gpu, p, tables: gpu.offsets(&tables.words) }
    }

    fn table(&self, table: (usize, usize)) -> Argument {
        DevicePointer::from(&self.tables).at::<u32>(table.0)
    }

    /// Launches a kernel over blocks of places and heads, whatever the widths.
    fn over_places(&self, kernel: &'static str, groups: usize, arguments: &[Argument]) {
        self.gpu.launch_sliced(&SLICES_OF_ROWS, kernel, self.p.profile, Groups::each(groups), arguments);
    }

    /// Launches a kernel over blocks of rows: one thread block for each, per query head and part of
    /// the result.
    fn over_rows(&self, (program, kernel): (&Program, &'static str), rows: Rows, arguments: &[Argument]) {
        let p = self.p;
        let build = build(p.profile, p.key_width, p.value_width);
        let groups = Groups::of(rows.table.1 / 6 * p.heads * parts_of(rows.width), THREADS);
        self.gpu.launch_with(program, kernel, build, groups, rows.shared, arguments);
    }

    /// Slices up to four operands.
    fn slice(&self, all: &[&Sliced]) {
        let mut groups = 0;
        let mut descriptors: Vec<_> = all
            .iter()
            .map(|sliced| {
                groups += sliced.blocks.1 / 2 * sliced.operand.heads;
                Argument::Descriptor(sliced.descriptor(self, groups))
            })
            .collect();
        let last = descriptors[descriptors.len() - 1];
        descriptors.resize(4, last);
        self.over_places("attention_slice_mma", groups, &descriptors);
    }

    /// Adds the shares of the query heads of every key head.
    fn add_heads(
        &self,
        to: &GpuBuffer<f32>,
        shares: DevicePointer,
        blocks: (usize, usize),
        share_blocks: (usize, usize),
        width: usize,
    ) {
        let shape = [self.p.kv_heads, self.p.group(), width].map(narrow);
        self.over_places(
            "attention_add_heads",
            blocks.1 / 2 * self.p.kv_heads,
            arguments![to, shares, self.table(blocks), self.table(share_blocks), shape[0], shape[1], shape[2]],
        );
    }
}

pub(super) fn forward(gpu: &Gpu, op: &mut AttentionForward<GpuMemory>, workspace: &mut GpuBuffer<u8>) {
    let p = &op.p;
    let (all, tables) = (Operands::new(p), Tables::new(p));
    let call = Call::new(gpu, p, &tables);
    let mut scratch = Scratch::new(&call, &tables, workspace);
    let q = Sliced::of_queries(op.q, all.q, 0, &mut scratch, WIDTH);
    let k = Sliced::of_keys(op.k, all.k, 0, &mut scratch, WIDTH);
    let v = Sliced::of_keys(op.v, all.v, 1, &mut scratch, PLACE);
    call.slice(&[&q, &k, &v]);
    let rows = tables.query_rows;
    let [heads, group, value_width] = [p.heads, p.group(), p.value_width].map(narrow);
    let arguments = arguments![
        &*op.o,
        &*op.lse,
        q.wide(),
        scratch.query_numbers,
        k.wide(),
        v.deep(),
        scratch.key_numbers,
        call.table(rows),
        heads,
        group,
        value_width,
        narrow(all.q.places(p)),
        narrow(all.k.places(p)),
        window(p),
        p.softmax_scale_base2()
    ];
    let rows = Rows { table: rows, width: p.value_width, shared: shared(gpu, p).forward };
    call.over_rows((&FORWARD, "attention_forward_mma"), rows, arguments);
}

pub(super) fn backward(gpu: &Gpu, op: &mut AttentionBackward<GpuMemory>, workspace: &mut GpuBuffer<u8>) {
    let p = &op.p;
    let (all, tables) = (Operands::new(p), Tables::new(p));
    let call = Call::new(gpu, p, &tables);
    let mut scratch = Scratch::new(&call, &tables, workspace);
    let q = Sliced::of_queries(op.q, all.q, 0, &mut scratch, BOTH);
    let d_o = Sliced::of_queries(op.d_o, all.d_o, 1, &mut scratch, BOTH);
    let k = Sliced::of_keys(op.k, all.k, 0, &mut scratch, BOTH);
    let v = Sliced::of_keys(op.v, all.v, 1, &mut scratch, WIDTH);
    call.slice(&[&q, &d_o, &k, &v]);
    let [dq, dk, dv] = [&*op.dq, &*op.dk, &*op.dv].map(DevicePointer::from);
    let shares = if wide_shares(p) { scratch.parts.take::<f32>(all.d_o.scale_count(p) * p.value_width) } else { dq };
    let (query_numbers, key_numbers) = (scratch.query_numbers, scratch.key_numbers);
    // All positions are queries, so queries and keys have the same places.
    let places = narrow(all.q.places(p));
    let Tables { query_blocks, key_blocks, value_blocks, .. } = tables;
    call.over_places(
        "attention_delta_mma",
        query_blocks.1 / 2 * p.heads,
        arguments![
            query_numbers,
            op.d_o,
            op.o,
            op.lse,
            call.table(query_blocks),
            narrow(p.heads),
            narrow(p.value_width),
            places
        ],
    );
    let pass = Backward { call, tables, q, k, v, d_o, query_numbers, key_numbers, places, shared: shared(gpu, p) };
    if p.group() == 1 {
        pass.grad_value(dv);
        pass.grad_key(dk);
    } else {
        pass.grad_value(shares);
        pass.call.add_heads(op.dv, shares, key_blocks, value_blocks, p.value_width);
        pass.grad_key(dq);
        pass.call.add_heads(op.dk, dq, key_blocks, query_blocks, p.key_width);
    }
    pass.grad_query(dq);
}

/// The sliced operands of a backward pass.
struct Backward<'a> {
    call: Call<'a>,
    tables: Tables,
    q: Sliced<'a>,
    k: Sliced<'a>,
    v: Sliced<'a>,
    d_o: Sliced<'a>,
    query_numbers: DevicePointer,
    key_numbers: DevicePointer,
    places: u32,
    shared: Shared,
}

impl Backward<'_> {
    /// Launches the kernel of one gradient, whose own arguments come first.
    fn launch(&self, kernel: &'static str, rows: Rows, own: &[Argument]) {
        let p = self.call.p;
        let common = arguments![
            self.call.table(rows.table),
            narrow(p.heads),
            narrow(p.group()),
            narrow(rows.width),
            self.places,
            window(p),
            p.softmax_scale,
            p.softmax_scale_base2()
        ];
        self.call.over_rows((&BACKWARD, kernel), rows, &[own, common].concat());
    }

    fn grad_value(&self, to: DevicePointer) {
        let Self { q, k, d_o, query_numbers, key_numbers, .. } = self;
        let width = self.call.p.value_width;
        let rows = Rows { table: self.tables.value_rows, width, shared: self.shared.grad_value };
        let own = arguments![to, q.wide(), d_o.deep(), *query_numbers, k.wide(), *key_numbers];
        self.launch("attention_grad_value_mma", rows, own);
    }

    fn grad_key(&self, to: DevicePointer) {
        let Self { q, k, v, d_o, query_numbers, key_numbers, .. } = self;
        let width = self.call.p.key_width;
        let rows = Rows { table: self.tables.key_rows, width, shared: self.shared.grad_key };
        let own = arguments![to, q.wide(), q.deep(), d_o.wide(), *query_numbers, k.wide(), v.wide(), *key_numbers];
        self.launch("attention_grad_key_mma", rows, own);
    }

    fn grad_query(&self, to: DevicePointer) {
        let Self { q, k, v, d_o, query_numbers, key_numbers, .. } = self;
        let width = self.call.p.key_width;
        let rows = Rows { table: self.tables.query_rows, width, shared: self.shared.grad_query };
        let own = arguments![to, q.wide(), d_o.wide(), *query_numbers, k.wide(), k.deep(), v.wide(), *key_numbers];
        self.launch("attention_grad_query_mma", rows, own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Api, Selector};
    use crate::op::Span;

    fn absent(architecture: (u32, u32)) -> Gpu {
        Gpu::absent(Selector { api: Api::Cuda, index: 0 }, Some(architecture))
    }

    fn op(spans: &[Span], key_width: usize, value_width: usize, profile: Profile) -> Attention<'_> {
        Attention {
            spans,
            heads: 12,
            kv_heads: 2,
            key_width,
            value_width,
            softmax_scale: 1.0,
            window: None,
            cap: None,
            profile,
        }
    }

    fn document(length: usize) -> [Span; 1] {
        [Span { queries: 0..length, keys: 0..length }]
    }

    #[test]
    fn constants_are_those_of_the_device_code() {
        let warps = THREADS / 32;
        let defines = [
            format!("TILE {TILE}u"),
            format!("BLOCK {BLOCK}u"),
            format!("BLOCKS {}", TILE / BLOCK),
            format!("WARPS {warps}"),
            "THREADS (32u * WARPS)".to_string(),
            format!("ROWS ({}u * WARPS)", ROWS / warps),
            format!("PART_MAX {PART_MAX}"),
            format!("AHEAD {AHEAD}u"),
            "ROOMY (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)".to_string(),
            "FORWARD_EACH (KEY_WIDTH <= 128 ? 2 : 1)".to_string(),
            "FORWARD_SLOTS (KEY_WIDTH <= 128 ? 4 : 3)".to_string(),
            "QUERY_EACH (ROOMY && KEY_WIDTH + VALUE_WIDTH <= 256 ? 2 : 1)".to_string(),
            "QUERY_SLOTS (!ROOMY && KEY_WIDTH + VALUE_WIDTH <= 256 ? 3 : 2)".to_string(),
        ];
        let lines: Vec<&str> = include_str!("../../gpu/attention_mma.cuh").lines().collect();
        for define in defines {
            assert!(lines.contains(&format!("#define {define}").as_str()), "{define}");
        }
    }

    #[test]
    fn what_is_served_depends_on_device_widths_and_profile() {
        let spans = document(100);
        let [usual, wide] = [(128, 128), (256, 256)].map(|(key, value)| op(&spans, key, value, Profile::X2));
        let both = |architecture| [&usual, &wide].map(|p| serves(&absent(architecture), p));
        assert_eq!(both((7, 5)), [false, false]);
        assert_eq!(both((8, 0)), [true, true]);
        assert_eq!(both((8, 6)), [true, false]);
        assert_eq!(both((9, 0)), [true, true]);
        assert_eq!(both((12, 0)), [true, false]);
        assert!(!serves(&absent((9, 0)), &op(&spans, 128, 128, Profile::X3)));
    }

    #[test]
    fn memory_is_linear_in_length() {
        let gpu = absent((9, 0));
        let bytes = |length: usize, value_width| {
            let spans = document(length);
            workspace(&gpu, &op(&spans, 128, value_width, Profile::X2))
        };
        for value_width in [128, 160] {
            assert_eq!(bytes(4096, value_width), 4 * bytes(1024, value_width));
        }
        // Twelve and two heads: planes of q and dO twice, of k twice and v once, two slices;
        // numbers per place.
        assert_eq!(bytes(1024, 128), 1024 * (256 * (2 * 12 + 2 * 12 + 2 * 2 + 2) + 4 * (4 * 12 + 2 * 2)));
    }

    #[test]
    fn blocks_with_the_most_work_come_first() {
        let spans = [document(100)[0].clone(), Span { queries: 100..300, keys: 100..300 }];
        let p = op(&spans, 64, 64, Profile::X2);
        let all = Operands::new(&p);
        let positions = |transposed| {
            let table = rows_table(&all, &p, transposed, RowsOf::Places);
            table.chunks(6).map(|entry| (entry[0], entry[1], entry[4])).collect::<Vec<_>>()
        };
        // Place, rows and position: queries see earlier keys, keys are seen by later queries.
        let queries = [(320, 8, 192), (256, 64, 128), (192, 64, 64), (64, 36, 64), (0, 64, 0), (128, 64, 0)];
        let keys = [(128, 64, 0), (192, 64, 64), (0, 64, 0), (256, 64, 128), (64, 36, 64), (320, 8, 192)];
        assert_eq!((positions(false), positions(true)), (queries.to_vec(), keys.to_vec()));
    }
}
