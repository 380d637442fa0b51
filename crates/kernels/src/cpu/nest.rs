//! The loop nest of every slice product: which thread computes which block, and when.
//!
//! Rows are processed in super-blocks of 512, so one chunk of the left operand stays in the L2
//! cache. For a group of right panels of 32 columns, chunks ascend (the order of the sums), and
//! each panel is multiplied by all row blocks. Threads divide the panels, or the rows if panels are
//! few; each output element has one owner.

use super::block::{LeftView, Prepared, Sums, block_sums};
use super::epilogue::{BlockTerms, Target, epilogue_block};
use super::overlap::Overlap;
use super::panels::Panels;
use super::path::Path;
use super::pool::{SharedMut, StealingRanges};
use super::slices::{BLOCK, CHUNK_TILES, LeftLayout, TILE_DEPTH};
use crate::Cpu;
use isobit_numerics::slices::{CHUNK, Profile};
use std::ops::Range;

/// Rows whose left slices are processed together.
pub(super) const SUPER_BLOCK: usize = 512;
/// Maximum right panels that go through all chunks together, and that a thread takes at a time:
/// their outputs stay in the L2 cache.
const PANEL_GROUP: usize = 8;
/// Bytes of left slices that stay in the L2 cache over all chunks; up to this size one panel at a
/// time is best.
const LEFT_RESIDENT: usize = 1 << 20;

/// Bytes of right slices that stay in the L2 cache while all rows are multiplied.
const RIGHT_RESIDENT: usize = 1 << 20;
/// Minimum row blocks per thread in that case: loading a panel pays off only for several.
const LEAST_BLOCKS: usize = 4;

/// Panels that go through all chunks together, for a thread with `left_bytes` of left slices.
pub(super) fn panels_together(left_bytes: usize) -> usize {
    if left_bytes <= LEFT_RESIDENT { 1 } else { PANEL_GROUP }
}

/// Splits a segment into super-blocks.
pub(super) fn super_blocks(segment: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    super_blocks_of(SUPER_BLOCK, segment)
}

/// Of so many rows, a multiple of the block's, or all there are.
pub(super) fn super_blocks_of(most: usize, segment: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    segment.clone().step_by(most.max(1)).map(move |start| start..(start + most).min(segment.end))
}

/// Left operand of a loop nest.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) tiles: &'a [i8],
    pub(super) layout: LeftLayout,
    /// `[rows, chunks]`
    pub(super) scales: &'a [f32],
    pub(super) chunks: usize,
}

impl<'a> Left<'a> {
    /// The rows of a block from `row`, over one chunk.
    pub(super) fn view(&self, row: usize, chunk: usize) -> LeftView<'a> {
        LeftView {
            bytes: &self.tiles[chunk * CHUNK_TILES * self.layout.column_stride() + row * TILE_DEPTH..],
            column_stride: self.layout.column_stride(),
            slice_stride: self.layout.slice_stride(),
        }
    }
}

/// How sums become output.
#[derive(Clone, Copy)]
pub(super) struct Epilogue<'a> {
    /// Start from the output's contents instead of zero.
    pub(super) accumulate: bool,
    /// Right scales of the only chunk (weight gradient).
    pub(super) chunk_scales: Option<&'a [f32]>,
    /// Right scales applied after the last chunk (forward).
    pub(super) row_scales: Option<&'a [f32]>,
    pub(super) after: Option<LinearTerms<'a>>,
}

impl<'a> Epilogue<'a> {
    /// What becomes of the sums of a block of `(rows, columns)` after one of `chunks` chunks.
    #[inline(always)]
    fn target(
        &self,
        output: &OutputView<'a>,
        left: Left<'a>,
        (rows, columns): (Range<usize>, Range<usize>),
        chunk: usize,
        chunks: usize,
    ) -> Target<'a> {
        let is_last = chunk + 1 == chunks;
        Target {
            out: output.out,
            at: rows.start * output.stride + columns.start - output.origin,
            stride: output.stride,
            rows: rows.len(),
            width: columns.len(),
            from_zero: chunk == 0 && !self.accumulate,
            left_scales: &left.scales[rows.start * left.chunks + chunk..],
            left_stride: left.chunks,
            chunk_scales: self.chunk_scales.map(|scales| &scales[columns.clone()]),
            row_scales: self.row_scales.filter(|_| is_last).map(|scales| &scales[columns.clone()]),
            after: self.after.filter(|_| is_last).map(|terms| BlockTerms {
                bias: terms.bias.map(|bias| &bias[columns.clone()]),
                u: &terms.u[rows.start * terms.rank..],
                rank: terms.rank,
                factor: &terms.panels[columns.start * terms.rank..],
                alpha: terms.alpha,
            }),
        }
    }
}

/// What a linear layer adds to its product: bias and adapter.
#[derive(Clone, Copy)]
pub(super) struct LinearTerms<'a> {
    pub(super) bias: Option<&'a [f32]>,
    /// `[rows, rank]`, with rows numbered as in the nest.
    pub(super) u: &'a [f32],
    pub(super) rank: usize,
    /// `[panel, rank, BLOCK]`
    pub(super) panels: &'a [f32],
    pub(super) alpha: f32,
}

/// The shape of a loop nest: `out[first_row.., n] ← left[first_row.., contraction] · right`.
pub(super) struct Nest<'a> {
    pub(super) left: Left<'a>,
    pub(super) rows: Range<usize>,
    pub(super) n: usize,
    pub(super) contraction: usize,
    pub(super) profile: Profile,
}

pub(super) fn run(
    cpu: &Cpu,
    out: &mut [f32],
    nest: &Nest,
    epilogue: Epilogue,
    scratch: &mut [i8],
    panels_of: &impl Panels,
) {
    run_where(cpu, out, nest, epilogue, scratch, panels_of, &|_| true);
}

/// Like [`run`], but skips row blocks that are not `wanted`.
pub(super) fn run_where(
    cpu: &Cpu,
    out: &mut [f32],
    nest: &Nest,
    epilogue: Epilogue,
    scratch: &mut [i8],
    panels_of: &impl Panels,
    wanted: &(impl Fn(Range<usize>) -> bool + Sync),
) {
    let rows = std::slice::from_ref(&nest.rows);
    run_areas(cpu, out, nest, rows, scratch, &|_| (panels_of, epilogue), wanted);
}

/// Like [`run_where`] for several areas of rows, each with its own right operand and epilogue:
/// threads move from one to the next without waiting for each other.
pub(super) fn run_areas<'a, P: Panels + 'a>(
    cpu: &Cpu,
    out: &mut [f32],
    nest: &Nest,
    areas: &[Range<usize>],
    scratch: &mut [i8],
    of_area: &(impl Fn(usize) -> (&'a P, Epilogue<'a>) + Sync),
    wanted: &(impl Fn(Range<usize>) -> bool + Sync),
) {
    let out = SharedMut::new(out);
    let right_bytes = nest.n * nest.contraction * nest.profile.slice_count();
    let right_resident = right_bytes <= RIGHT_RESIDENT && (0..areas.len()).all(|area| !of_area(area).0.made());
    deal(cpu, nest.n.div_ceil(BLOCK), areas, right_resident, scratch, &|own, next| {
        let output = OutputView { out: &out, stride: nest.n, origin: 0 };
        let worker = &mut Worker::new(cpu.path, nest.profile, own);
        while let Some(WorkRange { area, panels, rows }) = next() {
            part(worker, &output, nest, of_area(area), panels, rows, wanted);
        }
    });
}

/// Some panels and rows of an area.
pub(super) struct WorkRange {
    pub(super) area: usize,
    pub(super) panels: Range<usize>,
    pub(super) rows: Range<usize>,
}

/// Returns a thread's next range.
pub(super) type Next<'a> = &'a mut dyn FnMut() -> Option<WorkRange>;

/// Runs a job on every thread, with its own part of the scratch and, on AMX, within a session. Each
/// thread takes ranges of the areas (of rows, each with all panels) until none are left, so a core
/// slowed by its neighbour does not hold up the others. If the right operand stays in a core's
/// cache, threads divide the rows as other ops do and find in cache what they wrote themselves.
pub(super) fn deal(
    cpu: &Cpu,
    panels: usize,
    areas: &[Range<usize>],
    right_resident: bool,
    scratch: &mut [i8],
    job: &(impl Fn(&mut [i8], Next) + Sync),
) {
    let row_blocks = |rows: &Range<usize>| rows.len().div_ceil(BLOCK);
    let all_blocks = areas.iter().map(row_blocks).sum::<usize>();
    // Few panels (narrow outputs), or small weights and many rows: threads divide the rows instead.
    let few_panels = panels * areas.len() < 2 * cpu.threads() && all_blocks > panels;
    let by_rows = few_panels || (right_resident && all_blocks >= 2 * LEAST_BLOCKS * cpu.threads());
    // Items of work before each area, then the total.
    let mut before = vec![0];
    before.extend(areas.iter().scan(0, |sum, rows| {
        *sum += if by_rows { row_blocks(rows) } else { panels };
        Some(*sum)
    }));
    let sizes = match (few_panels, by_rows) {
        (true, _) => 1..=usize::MAX,
        (_, true) => LEAST_BLOCKS..=usize::MAX,
        _ => 1..=PANEL_GROUP,
    };
    let ranges = StealingRanges::new(before[areas.len()], cpu.threads(), sizes);
    let area_of = |item: usize| before.partition_point(|before| *before <= item) - 1;
    let scratch_each = scratch.len() / cpu.threads();
    let scratch = SharedMut::new(scratch);
    cpu.pool.run(|worker| {
        #[cfg(target_arch = "x86_64")]
        let _session = (cpu.path == Path::Amx).then(super::amx::Session::start);
        // SAFETY: each thread has its own part.
        let own = unsafe { scratch.slice(worker * scratch_each..(worker + 1) * scratch_each) };
        job(own, &mut || {
            let items = ranges.next_within(worker, |item| before[area_of(item)]..before[area_of(item) + 1])?;
            let area = area_of(items.start);
            let (items, rows) = (items.start - before[area]..items.end - before[area], areas[area].clone());
            if by_rows {
                let rows = rows.start + items.start * BLOCK..(rows.start + items.end * BLOCK).min(rows.end);
                return Some(WorkRange { area, panels: 0..panels, rows });
            }
            Some(WorkRange { area, panels: items, rows })
        });
    });
}

/// Layout of a nest's output: element `(row, column)` at `row·stride + column − origin`.
pub(super) struct OutputView<'a> {
    pub(super) out: &'a SharedMut<'a, f32>,
    pub(super) stride: usize,
    pub(super) origin: usize,
}

/// Per-thread state: a block's sums, the prepared right panel, and scratch to build panels in.
pub(super) struct Worker<'a> {
    path: Path,
    sums: [Sums; 2],
    prepared: Prepared,
    own: &'a mut [i8],
}

impl<'a> Worker<'a> {
    #[expect(clippy::large_stack_arrays, reason = "two blocks of 12 KiB, well within a thread's stack")]
    pub(super) fn new(path: Path, profile: Profile, own: &'a mut [i8]) -> Self {
        Self { path, sums: [Sums::new(), Sums::new()], prepared: Prepared::new(path, profile), own }
    }
}

/// One thread's part of a nest with its right operand and epilogue. Row blocks that are not
/// `wanted` are skipped. On AMX the caller holds a session.
pub(super) fn part(
    worker: &mut Worker,
    output: &OutputView,
    nest: &Nest,
    (panels_of, epilogue): (&impl Panels, Epilogue),
    my_panels: Range<usize>,
    my_rows: Range<usize>,
    wanted: &impl Fn(Range<usize>) -> bool,
) {
    let Worker { path, sums, prepared, own } = worker;
    let path = *path;
    let mut overlap = Overlap::new(sums);
    let chunks = nest.contraction.div_ceil(CHUNK);
    let group_size = panels_together(my_rows.len() * nest.contraction * nest.left.layout.slices);
    for group in my_panels.clone().step_by(group_size) {
        let group = group..(group + group_size).min(my_panels.end);
        for (chunk, index) in (0..chunks).flat_map(|chunk| group.clone().map(move |index| (chunk, index))) {
            let columns = CHUNK.min(nest.contraction - chunk * CHUNK).div_ceil(TILE_DEPTH);
            let first_column = index * BLOCK;
            let width = BLOCK.min(nest.n - first_column);
            let right = panels_of.panel(path, own, chunk, first_column);
            prepared.prepare(path, right, columns);
            for row in my_rows.clone().step_by(BLOCK) {
                let rows = BLOCK.min(my_rows.end - row);
                if !wanted(row..row + rows) {
                    continue;
                }
                let block = (row..row + rows, first_column..first_column + width);
                let target = epilogue.target(output, nest.left, block, chunk, chunks);
                let view = nest.left.view(row, chunk);
                if path == Path::Amx && nest.profile == Profile::X2 && width == BLOCK {
                    overlap.block(view, right, columns, target);
                    continue;
                }
                if chunk == 0 {
                    target.prefetch();
                }
                let sums = overlap.finish();
                block_sums(path, sums, view, rows, right, prepared, columns);
                match nest.profile {
                    Profile::X2 => epilogue_block::<2>(path, sums, &target),
                    Profile::X3 => epilogue_block::<3>(path, sums, &target),
                }
            }
        }
    }
    overlap.finish();
}
