//! Attention on int8 tensor cores (`gpu/attention_mma.cu`): NVIDIA devices from compute capability 8.0 on, profile x2.
//!
//! Rows are sliced into the workspace, by width for scores and by place for what is contracted over positions. The three
//! gradients have a kernel each; those of keys and values are made per query head, then added over the heads of a group
//! in their order. Until dQ is written, its memory holds these shares. Other devices take the portable kernels.

use super::attention::{Operand, Operands, PLACE_BLOCK, narrow, trains, window};
use super::device::{Gpu, Groups, arguments};
use super::memory::{GpuBuffer, Parts, Place};
use super::program::{Build, Program};
use super::runtime::{Argument, Language};
use crate::op::Attention;
use isobit_numerics::slices::Profile;

static ATTENTION_MMA: Program =
    Program { name: "attention_mma", text: include_str!("../../gpu/attention_mma.cu"), language: Language::Cuda };

/// Of a block: `THREADS`, `ROWS`, `TILE` and `BLOCK` in the kernels, and the slices of an integer.
const THREADS: usize = 128;
const ROWS: usize = 64;
const TILE: usize = 128;
const BLOCK: usize = PLACE_BLOCK;
const SLICES: usize = 2;
/// Columns of results that a block keeps: `PART_MOST`.
const PART_MOST: usize = 128;
/// Numbers per column are kept for so many tiles: `AHEAD`.
const AHEAD: usize = 4;
/// Numbers per place: units of q and dO, lse and D; units of k and v.
const QUERY_NUMBERS: usize = 4;
const KEY_NUMBERS: usize = 2;

/// Width of the planes of a head: steps of the tensor cores.
fn padded(width: usize) -> usize {
    width.next_multiple_of(32)
}

/// In how many parts the columns of a result are made.
fn parts_of(width: usize) -> usize {
    let padded = padded(width);
    let part = if padded <= PART_MOST { padded } else { (padded / 32).div_ceil(2) * 32 };
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

    /// With the barriers of the slots and what the driver keeps for itself.
    fn most(&self) -> usize {
        self.forward.max(self.grad_query).max(self.grad_key).max(self.grad_value) + 1024
    }
}

/// `ROOMY` in the kernels.
fn is_roomy(architecture: (u32, u32)) -> bool {
    ((9, 0)..(12, 0)).contains(&architecture)
}

/// Bytes of shared memory that a block may have on a device of this compute capability.
fn shared_limit(architecture: (u32, u32)) -> usize {
    const KIB: usize = 1024;
    match architecture {
        (8, 0 | 7) => 163 * KIB,
        _ if is_roomy(architecture) => 227 * KIB,
        _ => 99 * KIB,
    }
}

/// Whether the device has these tensor cores and room for heads of these widths.
pub(super) fn serves(gpu: &Gpu, p: &Attention) -> bool {
    p.profile == Profile::X2
        && gpu.architecture().is_some_and(|it| it >= (8, 0) && Shared::new(p, it).most() <= shared_limit(it))
}

fn shared(gpu: &Gpu, p: &Attention) -> Shared {
    Shared::new(p, gpu.architecture().expect("a device that serves"))
}

/// Along what the bytes of planes are contracted.
#[derive(Clone, Copy)]
struct Packing {
    by_width: bool,
    by_place: bool,
}

const WIDTH: Packing = Packing { by_width: true, by_place: false };
const PLACE: Packing = Packing { by_width: false, by_place: true };
const BOTH: Packing = Packing { by_width: true, by_place: true };

/// Planes of an operand in the workspace. One that was not asked for is not to be read.
#[derive(Clone, Copy)]
struct Planes {
    by_width: Place,
    by_place: Place,
}

/// Where the numbers per place are that an operand's unit belongs to: which of how many.
#[derive(Clone, Copy)]
struct Units {
    numbers: Place,
    index: usize,
    count: usize,
}

fn plane_bytes(operand: &Operand, p: &Attention) -> usize {
    SLICES * operand.units(p) * padded(operand.width)
}

fn operand_bytes(gpu: &Gpu, operand: &Operand, p: &Attention, packing: Packing) -> usize {
    let planes = usize::from(packing.by_width) + usize::from(packing.by_place);
    planes * gpu.part::<i8>(plane_bytes(operand, p))
}

/// Whether shares of the gradient of values need memory of their own: dQ's is too narrow for them.
fn wide_shares(p: &Attention) -> bool {
    p.group() > 1 && p.value_width > p.key_width
}

pub(super) fn workspace(gpu: &Gpu, p: &Attention) -> usize {
    let all = Operands::new(p);
    let bytes = |operand: &Operand, packing| operand_bytes(gpu, operand, p, packing);
    let numbers =
        gpu.part::<f32>(all.q.units(p) * QUERY_NUMBERS) + gpu.part::<f32>(all.k.units(p) * KEY_NUMBERS);
    let forward = numbers + bytes(&all.q, WIDTH) + bytes(&all.k, WIDTH) + bytes(&all.v, PLACE);
    let shares = if wide_shares(p) { gpu.part::<f32>(all.d_o.units(p) * p.value_width) } else { 0 };
    let backward = numbers
        + bytes(&all.q, BOTH)
        + bytes(&all.k, BOTH)
        + bytes(&all.v, WIDTH)
        + bytes(&all.d_o, BOTH)
        + shares;
    if trains(p) { forward.max(backward) } else { forward }
}

/// The rows of a block of threads, as `rows_of` in the kernels reads them, for every block of a head. Those with the most
/// work come first. `rows` are queries or (`turned`) keys; `source` says where their results go.
fn rows_table(all: &Operands, p: &Attention, turned: bool, source: RowsOf) -> Vec<usize> {
    let (rows, columns) = if turned { (&all.k, &all.q) } else { (&all.q, &all.k) };
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
            // Queries see what is before them, keys are seen by what is after; a window bounds both.
            let met = if turned { length - position } else { position + count };
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

/// Tables of one call, uploaded together.
#[derive(Default)]
struct Tables {
    words: Vec<usize>,
}

impl Tables {
    /// Where the table starts, and its length.
    fn add(&mut self, table: &[usize]) -> (usize, usize) {
        let start = self.words.len();
        self.words.extend_from_slice(table);
        (start, table.len())
    }
}

/// One call on one device.
struct Call<'a> {
    gpu: &'a Gpu,
    p: &'a Attention<'a>,
    tables: GpuBuffer<u32>,
}

impl Call<'_> {
    fn table(&self, table: (usize, usize)) -> Argument {
        Place::from(&self.tables).at::<u32>(table.0)
    }

    fn launch(&self, kernel: &'static str, groups: Groups, shared: usize, arguments: &[Argument]) {
        let build = Build::with_widths(self.p.profile, padded(self.p.key_width), padded(self.p.value_width));
        self.gpu.launch_with(&ATTENTION_MMA, kernel, build, groups, shared, arguments);
    }

    /// A kernel over blocks of rows: one block of threads for each, per query head and part of the result.
    fn over_rows(&self, kernel: &'static str, table: (usize, usize), width: usize, shared: usize, args: &[Argument]) {
        let blocks = table.1 / 6 * self.p.heads * parts_of(width);
        self.launch(kernel, Groups::of(blocks, THREADS), shared, args);
    }

    /// Room for the numbers per place of queries and of keys.
    fn numbers(&self, all: &Operands, parts: &mut Parts) -> (Place, Place) {
        let query_numbers = parts.take::<f32>(all.q.units(self.p) * QUERY_NUMBERS);
        (query_numbers, parts.take::<f32>(all.k.units(self.p) * KEY_NUMBERS))
    }

    fn slice(
        &self,
        x: &GpuBuffer<f32>,
        operand: &Operand,
        blocks: (usize, usize),
        units: Units,
        packing: Packing,
        parts: &mut Parts,
    ) -> Planes {
        operand.check(x, self.p);
        let mut planes =
            |wanted: bool| if wanted { Some(parts.take::<i8>(plane_bytes(operand, self.p))) } else { None };
        let (by_width, by_place) = (planes(packing.by_width), planes(packing.by_place));
        let argument = |planes: Option<Place>| planes.map_or(Argument::U64(0), Argument::from);
        let shape = [operand.heads, operand.width, padded(operand.width), operand.places(self.p)].map(narrow);
        self.launch(
            "attention_slice_mma",
            Groups::each(blocks.1 / 2 * operand.heads),
            0,
            arguments![
                units.numbers,
                narrow(units.index),
                narrow(units.count),
                argument(by_width),
                argument(by_place),
                x,
                self.table(blocks),
                shape[0],
                shape[1],
                shape[2],
                shape[3]
            ],
        );
        Planes { by_width: by_width.unwrap_or(units.numbers), by_place: by_place.unwrap_or(units.numbers) }
    }

    /// Adds the shares of the query heads of every key head.
    fn add_heads(
        &self,
        to: &GpuBuffer<f32>,
        shares: Place,
        blocks: (usize, usize),
        share_blocks: (usize, usize),
        width: usize,
    ) {
        let shape = [self.p.kv_heads, self.p.group(), width].map(narrow);
        self.launch(
            "attention_add_heads",
            Groups::each(blocks.1 / 2 * self.p.kv_heads),
            0,
            arguments![to, shares, self.table(blocks), self.table(share_blocks), shape[0], shape[1], shape[2]],
        );
    }
}

pub(super) fn forward(
    gpu: &Gpu,
    (o, lse): (&mut GpuBuffer<f32>, &mut GpuBuffer<f32>),
    (q, k, v): (&GpuBuffer<f32>, &GpuBuffer<f32>, &GpuBuffer<f32>),
    p: &Attention,
    workspace: &mut GpuBuffer<u8>,
) {
    let all = Operands::new(p);
    let mut tables = Tables::default();
    let query_blocks = tables.add(&all.q.blocks(p));
    let key_blocks = tables.add(&all.k.blocks(p));
    let rows = tables.add(&rows_table(&all, p, false, RowsOf::Operand(&all.q)));
    let call = Call { gpu, p, tables: gpu.offsets(&tables.words) };
    let mut parts = Parts::new(gpu, workspace);
    let (query_numbers, key_numbers) = call.numbers(&all, &mut parts);
    let units = |index| Units { numbers: key_numbers, index, count: KEY_NUMBERS };
    let query_units = Units { numbers: query_numbers, index: 0, count: QUERY_NUMBERS };
    let q = call.slice(q, &all.q, query_blocks, query_units, WIDTH, &mut parts);
    let k = call.slice(k, &all.k, key_blocks, units(0), WIDTH, &mut parts);
    let v = call.slice(v, &all.v, key_blocks, units(1), PLACE, &mut parts);
    let [heads, group, value_width] = [p.heads, p.group(), p.value_width].map(narrow);
    let arguments = arguments![
        o,
        lse,
        q.by_width,
        query_numbers,
        k.by_width,
        v.by_place,
        key_numbers,
        call.table(rows),
        heads,
        group,
        value_width,
        narrow(all.q.places(p)),
        narrow(all.k.places(p)),
        window(p),
        p.scale_base2()
    ];
    call.over_rows("attention_forward_mma", rows, p.value_width, shared(gpu, p).forward, arguments);
}

pub(super) fn backward(
    gpu: &Gpu,
    (dq, dk, dv): (&mut GpuBuffer<f32>, &mut GpuBuffer<f32>, &mut GpuBuffer<f32>),
    d_o: &GpuBuffer<f32>,
    (q, k, v): (&GpuBuffer<f32>, &GpuBuffer<f32>, &GpuBuffer<f32>),
    (o, lse): (&GpuBuffer<f32>, &GpuBuffer<f32>),
    p: &Attention,
    workspace: &mut GpuBuffer<u8>,
) {
    let all = Operands::new(p);
    let (shared, grouped) = (shared(gpu, p), p.group() > 1);
    let mut tables = Tables::default();
    let query_blocks = tables.add(&all.q.blocks(p));
    let key_blocks = tables.add(&all.k.blocks(p));
    let place_blocks: Vec<_> = (0..query_blocks.1 / 2).flat_map(|block| [block * BLOCK, BLOCK]).collect();
    let place_blocks = tables.add(&place_blocks);
    let query_rows = tables.add(&rows_table(&all, p, false, RowsOf::Operand(&all.q)));
    // Shares lie where dQ's rows do, or over places; gradients of key heads of their own where the keys do.
    let own = RowsOf::Operand(if grouped { &all.q } else { &all.k });
    let key_rows = tables.add(&rows_table(&all, p, true, own));
    let (value_rows, value_blocks) = if wide_shares(p) {
        (tables.add(&rows_table(&all, p, true, RowsOf::Places)), place_blocks)
    } else {
        (key_rows, query_blocks)
    };
    let call = Call { gpu, p, tables: gpu.offsets(&tables.words) };

    let mut parts = Parts::new(gpu, workspace);
    let (query_numbers, key_numbers) = call.numbers(&all, &mut parts);
    let query_units = |index| Units { numbers: query_numbers, index, count: QUERY_NUMBERS };
    let key_units = |index| Units { numbers: key_numbers, index, count: KEY_NUMBERS };
    let q = call.slice(q, &all.q, query_blocks, query_units(0), BOTH, &mut parts);
    let sliced_d_o = call.slice(d_o, &all.d_o, query_blocks, query_units(1), BOTH, &mut parts);
    let k = call.slice(k, &all.k, key_blocks, key_units(0), BOTH, &mut parts);
    let v = call.slice(v, &all.v, key_blocks, key_units(1), WIDTH, &mut parts);
    let dq_place = Place::from(&*dq);
    let shares =
        if wide_shares(p) { parts.take::<f32>(all.d_o.units(p) * p.value_width) } else { dq_place };

    let [heads, group] = [p.heads, p.group()].map(narrow);
    let [key_width, value_width] = [p.key_width, p.value_width].map(narrow);
    // All positions are queries, so queries and keys have the same places.
    let places = narrow(all.q.places(p));
    let (scale, scale2, window) = (p.scale, p.scale_base2(), window(p));
    call.launch(
        "attention_delta_mma",
        Groups::each(query_blocks.1 / 2 * p.heads),
        0,
        arguments![query_numbers, d_o, o, lse, call.table(query_blocks), heads, value_width, places],
    );

    let to = if grouped { shares } else { Place::from(&*dv) };
    call.over_rows(
        "attention_grad_value_mma",
        value_rows,
        p.value_width,
        shared.grad_value,
        arguments![
            to,
            q.by_width,
            sliced_d_o.by_place,
            query_numbers,
            k.by_width,
            key_numbers,
            call.table(value_rows),
            heads,
            group,
            value_width,
            places,
            window,
            scale,
            scale2
        ],
    );
    if grouped {
        call.add_heads(dv, shares, key_blocks, value_blocks, p.value_width);
    }
    let to = if grouped { dq_place } else { Place::from(&*dk) };
    call.over_rows(
        "attention_grad_key_mma",
        key_rows,
        p.key_width,
        shared.grad_key,
        arguments![
            to,
            q.by_width,
            q.by_place,
            sliced_d_o.by_width,
            query_numbers,
            k.by_width,
            v.by_width,
            key_numbers,
            call.table(key_rows),
            heads,
            group,
            key_width,
            places,
            window,
            scale,
            scale2
        ],
    );
    if grouped {
        call.add_heads(dk, dq_place, key_blocks, query_blocks, p.key_width);
    }
    call.over_rows(
        "attention_grad_query_mma",
        query_rows,
        p.key_width,
        shared.grad_query,
        arguments![
            dq_place,
            q.by_width,
            sliced_d_o.by_width,
            query_numbers,
            k.by_width,
            k.by_place,
            v.by_width,
            key_numbers,
            call.table(query_rows),
            heads,
            group,
            key_width,
            places,
            window,
            scale,
            scale2
        ],
    );
}
