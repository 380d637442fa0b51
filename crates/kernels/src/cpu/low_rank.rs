//! Low-rank products (`op/low_rank.rs`) as register tiles: each covers a few tokens or ranks, so
//! one load serves several multiply-adds. Tile sizes depend on the path's registers; sums do not.
//! AVX-512 has its own tiles (`low_rank_tiles.rs`) for `contract` and `outer`.
//!
//! `contract` transposes a width-major factor and `expand` packs the factor, both into the
//! workspace.

use super::CpuMemory;
#[cfg(target_arch = "x86_64")]
use super::low_rank_tiles;
use super::path::{Vector, multiversion};
use super::pool::{SharedMut, share};
use crate::backend::{Checked, Run};
use crate::buffer::Workspace;
use crate::op::low_rank::RANK_MAX;
use crate::op::{
    Contraction, FactorLayout, LowRank, LowRankContract, LowRankExpand, LowRankOuter, OuterProduct, TOKEN_BLOCK,
};
use crate::{Buffer, Cpu};
use isobit_numerics::Fma;
use isobit_numerics::lanes::{LANES, tree_sum};
use std::ops::Range;

impl Run<LowRankContract<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut LowRankContract<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        for Contraction { u, factor, p } in &mut op.parts {
            contract(self, u, op.x, factor, p, workspace);
        }
    }
}

impl Run<LowRankExpand<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut LowRankExpand<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        expand(self, op.y, op.u, op.factor, &op.p, workspace);
    }
}

impl Run<LowRankOuter<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut LowRankOuter<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        for OuterProduct { dfactor, u, x, p } in &mut op.parts {
            outer(self, dfactor, u, x, p, op.row_starts);
        }
    }
}

/// Columns per tile: four AVX-512 registers or eight AVX2 registers.
const COLUMNS_WIDE: usize = 64;
/// Columns per tile of `outer` on AVX2, which keeps four ranks in two registers each.
const COLUMNS_NARROW: usize = 16;
/// Minimum columns per thread of `outer`: one AVX-512 tile, two AVX2 tiles.
const OUTER_GRAIN: usize = 32;
/// Tokens multiplied by a few rows of the factor before the next rows: together they fit the L2
/// cache.
const CONTRACT_TOKENS: usize = 24;
/// Tokens multiplied by one panel of the factor while it is in the L1 cache.
const EXPAND_TOKENS: usize = 12;

/// Whether tiles may use the thirty-two wide registers.
fn is_wide(cpu: &Cpu) -> bool {
    cpu.path.vector() == Vector::Avx512
}

/// Elements of a factor, transposed or in panels.
fn scratch(p: &LowRank) -> usize {
    p.width.div_ceil(COLUMNS_WIDE) * COLUMNS_WIDE * p.rank
}

/// Scratch for one factor, or one per thread if there are many factors.
pub(super) fn workspace(cpu: &Cpu, p: &LowRank) -> usize {
    let scratch_count = if p.factors() == 1 { 1 } else { cpu.threads() };
    scratch_count * Workspace::bytes::<f32>(scratch(p))
}

/// Divides the tokens among threads. For each segment in a thread's range, `job` gets the thread's
/// scratch, the factor, the tokens, and their part of `out`.
fn by_segments(
    cpu: &Cpu,
    out: &mut [f32],
    width: usize,
    factor: &[f32],
    p: &LowRank,
    workspace: &mut [u8],
    job: impl Fn(&mut [f32], &[f32], Range<usize>, &mut [f32]) + Sync,
) {
    let each = scratch(p);
    let scratch_count = SharedMut::new(Workspace::new(workspace).take::<f32>(cpu.threads() * each));
    let out = SharedMut::new(out);
    cpu.pool.run(|worker| {
        let tokens = share(p.tokens(), 1, cpu.threads(), worker);
        // SAFETY: each thread has its own part.
        let scratch = unsafe { scratch_count.slice(worker * each..(worker + 1) * each) };
        for (segment, factor) in p.segments.windows(2).zip(factor.chunks_exact(p.factor_length())) {
            let here = segment[0].max(tokens.start)..segment[1].min(tokens.end);
            if !here.is_empty() {
                // SAFETY: tokens of different threads do not overlap.
                let out = unsafe { out.slice(here.start * width..here.end * width) };
                job(scratch, factor, here, out);
            }
        }
    });
}

/// Transposes some columns of the factor `[width, rank]` to `[rank, width]`; `transposed` is the
/// whole result.
fn transpose(transposed: &SharedMut<f32>, factor: &[f32], columns: &Range<usize>, p: &LowRank) {
    for j in 0..p.rank {
        // SAFETY: the caller has these columns for itself.
        let row = unsafe { transposed.slice(j * p.width + columns.start..j * p.width + columns.end) };
        for (value, l) in row.iter_mut().zip(columns.clone()) {
            *value = factor[l * p.rank + j];
        }
    }
}

pub(super) fn contract(cpu: &Cpu, u: &mut [f32], x: &[f32], factor: &[f32], p: &LowRank, workspace: &mut [u8]) {
    let rows = |u: &mut [f32], tokens: Range<usize>, factor: &[f32]| {
        let x = &x[tokens.start * p.width..tokens.end * p.width];
        #[cfg(target_arch = "x86_64")]
        if is_wide(cpu) {
            return low_rank_tiles::contract_rows(cpu.path, u, x, factor, p);
        }
        contract_rows(cpu.path, u, x, factor, p);
    };
    if p.factors() > 1 {
        by_segments(cpu, u, p.rank, factor, p, workspace, |scratch, factor, tokens, u| {
            if p.layout == FactorLayout::RankMajor {
                return rows(u, tokens, factor);
            }
            transpose(&SharedMut::new(scratch), factor, &(0..p.width), p);
            rows(u, tokens, &scratch[..factor.len()]);
        });
        return;
    }
    let mut workspace = Workspace::new(workspace);
    let factor = match p.layout {
        FactorLayout::RankMajor => factor,
        FactorLayout::WidthMajor => {
            let transposed = workspace.take::<f32>(factor.len());
            let shared = SharedMut::new(transposed);
            cpu.pool.run_ranges(p.width, COLUMNS_WIDE, |columns| transpose(&shared, factor, &columns, p));
            transposed
        }
    };
    cpu.pool.run_rows(u, p.rank, |tokens, u| rows(u, tokens, factor));
}

pub(super) fn expand(cpu: &Cpu, y: &mut [f32], u: &[f32], factor: &[f32], p: &LowRank, workspace: &mut [u8]) {
    let rows = |y: &mut [f32], tokens: Range<usize>, panels: &[f32]| {
        let u = &u[tokens.start * p.rank..tokens.end * p.rank];
        if is_wide(cpu) {
            expand_rows::<true>(cpu.path, y, u, panels, p);
        } else {
            expand_rows::<false>(cpu.path, y, u, panels, p);
        }
    };
    if p.factors() > 1 {
        by_segments(cpu, y, p.width, factor, p, workspace, |scratch, factor, tokens, y| {
            let count = p.width.div_ceil(COLUMNS_WIDE);
            let packed = &mut scratch[..count * p.rank * COLUMNS_WIDE];
            pack::<COLUMNS_WIDE>(packed, 0..count, factor, p);
            rows(y, tokens, packed);
        });
        return;
    }
    let panels = Workspace::new(workspace).take::<f32>(scratch(p));
    cpu.pool.run_rows(panels, p.rank * COLUMNS_WIDE, |range, panels| pack::<COLUMNS_WIDE>(panels, range, factor, p));
    cpu.pool.run_rows(y, p.width, |tokens, y| rows(y, tokens, panels));
}

/// Packs some panels of the factor as `[panel, rank, C]`, the last panel padded with zeros, so a
/// tile reads contiguous memory.
fn pack<const C: usize>(packed: &mut [f32], panels: Range<usize>, factor: &[f32], p: &LowRank) {
    for (panel, packed) in panels.zip(packed.chunks_exact_mut(p.rank * C)) {
        let columns = panel * C..((panel + 1) * C).min(p.width);
        packed.fill(0.0);
        match p.layout {
            FactorLayout::RankMajor => {
                for (j, row) in packed.chunks_exact_mut(C).enumerate() {
                    row[..columns.len()].copy_from_slice(&factor[j * p.width..][columns.clone()]);
                }
            }
            FactorLayout::WidthMajor => {
                for (c, l) in columns.enumerate() {
                    for j in 0..p.rank {
                        packed[j * C + c] = factor[l * p.rank + j];
                    }
                }
            }
        }
    }
}

pub(super) fn outer(cpu: &Cpu, dfactor: &mut [f32], u: &[f32], x: &[f32], p: &LowRank, row_starts: &[usize]) {
    let dfactor = SharedMut::new(dfactor);
    cpu.pool.run_ranges(p.width, OUTER_GRAIN, |columns| {
        for (index, block) in p.blocks(row_starts) {
            let into = (&dfactor, index * p.factor_length());
            #[cfg(target_arch = "x86_64")]
            if is_wide(cpu) {
                // SAFETY: `run_ranges` hands out every column once, so these are this call's alone.
                unsafe { low_rank_tiles::outer_block(cpu.path, into, u, x, p, block, columns.clone()) };
                continue;
            }
            outer_block(cpu.path, into, u, x, p, block, columns.clone());
        }
    });
}

multiversion! {
    fn contract_rows<F>(u: &mut [f32], x: &[f32], factor: &[f32], p: &LowRank) {
        contract_tiles::<F, 2, 3, { LANES / 2 }>(u, x, factor, p);
    }
}

/// `T` tokens and `J` ranks at a time; leftover tokens go one by one.
#[inline(always)]
fn contract_tiles<F: Fma, const T: usize, const J: usize, const L: usize>(
    u: &mut [f32],
    x: &[f32],
    factor: &[f32],
    p: &LowRank,
) {
    let tokens = u.len() / p.rank;
    for start in (0..tokens).step_by(CONTRACT_TOKENS) {
        let end = (start + CONTRACT_TOKENS).min(tokens);
        for first in (0..p.rank).step_by(J) {
            // Past the last rank the tile repeats it and drops the result.
            let rows: [&[f32]; J] =
                std::array::from_fn(|j| &factor[(first + j).min(p.rank - 1) * p.width..][..p.width]);
            let row = |token: usize| &x[token * p.width..][..p.width];
            let mut store = |token: usize, sums: [f32; J]| {
                let count = J.min(p.rank - first);
                u[token * p.rank + first..][..count].copy_from_slice(&sums[..count]);
            };
            let mut token = start;
            while token + T <= end {
                let tile = contract_tile::<F, T, J, L>(std::array::from_fn(|t| row(token + t)), rows);
                for (t, sums) in tile.into_iter().enumerate() {
                    store(token + t, sums);
                }
                token += T;
            }
            for token in token..end {
                let [sums] = contract_tile::<F, 1, J, L>([row(token)], rows);
                store(token, sums);
            }
        }
    }
}

/// Lane sums of every row of `x` with every row of `m`; all have one length. Lanes are independent
/// before the tree, so with few registers they are computed `L` at a time.
#[inline(always)]
fn contract_tile<F: Fma, const T: usize, const J: usize, const L: usize>(
    x: [&[f32]; T],
    m: [&[f32]; J],
) -> [[f32; J]; T] {
    let mut lanes = [[[0.0; LANES]; J]; T];
    let x = x.map(|x| x.as_chunks::<LANES>());
    let m = m.map(|m| m.as_chunks::<LANES>());
    let blocks = x[0].0.len();
    assert!(x.iter().chain(&m).all(|part| part.0.len() == blocks), "rows of one length");
    for pass in (0..LANES).step_by(L) {
        let mut acc = [[[0.0; L]; J]; T];
        for block in 0..blocks {
            // SAFETY: every row has `blocks` blocks, asserted above.
            let (x, m) = unsafe { (x.map(|x| x.0.get_unchecked(block)), m.map(|m| m.0.get_unchecked(block))) };
            // Lanes in the outer loop, tile in the inner: a body this long is vectorised over lanes
            // rather than unrolled.
            for lane in 0..L {
                for t in 0..T {
                    for j in 0..J {
                        acc[t][j][lane] = F::fma(x[t][pass + lane], m[j][pass + lane], acc[t][j][lane]);
                    }
                }
            }
        }
        for t in 0..T {
            for j in 0..J {
                lanes[t][j][pass..pass + L].copy_from_slice(&acc[t][j]);
            }
        }
    }
    let mut sums = [[0.0; J]; T];
    for t in 0..T {
        for j in 0..J {
            for ((lane, x), m) in lanes[t][j].iter_mut().zip(x[t].1).zip(m[j].1) {
                *lane = F::fma(*x, *m, *lane);
            }
            sums[t][j] = tree_sum(lanes[t][j]);
        }
    }
    sums
}

multiversion! {
    fn expand_rows<F, const WIDE: bool>(y: &mut [f32], u: &[f32], panels: &[f32], p: &LowRank) {
        if WIDE {
            expand_tiles::<F, 6, COLUMNS_WIDE>(y, u, panels, p);
        } else {
            expand_tiles::<F, 1, COLUMNS_WIDE>(y, u, panels, p);
        }
    }
}

/// `T` tokens at a time; leftover tokens go one by one.
#[inline(always)]
fn expand_tiles<F: Fma, const T: usize, const C: usize>(y: &mut [f32], u: &[f32], panels: &[f32], p: &LowRank) {
    let (width, rank) = (p.width, p.rank);
    for (y, u) in y.chunks_mut(EXPAND_TOKENS * width).zip(u.chunks(EXPAND_TOKENS * rank)) {
        for first in (0..width).step_by(C) {
            let panel = &panels[first * rank..][..rank * C];
            let (y, y_rest) = y.split_at_mut(y.len() / (T * width) * (T * width));
            let (u, u_rest) = u.split_at(y.len() / width * rank);
            for (y, u) in y.chunks_exact_mut(T * width).zip(u.chunks_exact(T * rank)) {
                expand_tile::<F, T, C>(y, u, panel, first, p);
            }
            for (y, u) in y_rest.chunks_exact_mut(width).zip(u_rest.chunks_exact(rank)) {
                expand_tile::<F, 1, C>(y, u, panel, first, p);
            }
        }
    }
}

#[inline(always)]
fn expand_tile<F: Fma, const T: usize, const C: usize>(
    y: &mut [f32],
    u: &[f32],
    panel: &[f32],
    first: usize,
    p: &LowRank,
) {
    let mut acc = [[0.0; C]; T];
    for (j, m) in panel.as_chunks::<C>().0.iter().enumerate() {
        let u: [f32; T] = std::array::from_fn(|t| u[t * p.rank + j]);
        for t in 0..T {
            for c in 0..C {
                acc[t][c] = F::fma(u[t], m[c], acc[t][c]);
            }
        }
    }
    let count = C.min(p.width - first);
    for t in 0..T {
        let y = &mut y[t * p.width + first..][..count];
        if let Some(y) = y.as_mut_array::<C>() {
            for c in 0..C {
                y[c] = F::fma(p.alpha, acc[t][c], y[c]);
            }
        } else {
            let sums = acc[t];
            for (y, sum) in y.iter_mut().zip(sums) {
                *y = F::fma(p.alpha, sum, *y);
            }
        }
    }
}

multiversion! {
    fn outer_block<F>(
        dfactor: (&SharedMut<f32>, usize),
        u: &[f32],
        x: &[f32],
        p: &LowRank,
        block: Range<usize>,
        columns: Range<usize>,
    ) {
        outer_tiles::<F, 4, COLUMNS_NARROW>(dfactor, u, x, p, block, columns);
    }
}

/// Adds one block of tokens to one thread's columns; the gradient of its factor starts at `origin`.
#[inline(always)]
#[expect(clippy::large_stack_arrays, reason = "two arrays of 32 KiB, well within a thread's stack")]
fn outer_tiles<F: Fma, const J: usize, const C: usize>(
    (dfactor, origin): (&SharedMut<f32>, usize),
    u: &[f32],
    x: &[f32],
    p: &LowRank,
    block: Range<usize>,
    columns: Range<usize>,
) {
    // `alpha·u`, ranks padded to whole tiles; the padding's results are not stored.
    let mut scaled = [[0.0; RANK_MAX]; TOKEN_BLOCK];
    for (scaled, u) in scaled.iter_mut().zip(u[block.start * p.rank..block.end * p.rank].chunks_exact(p.rank)) {
        for (scaled, u) in scaled.iter_mut().zip(u) {
            *scaled = p.alpha * u;
        }
    }
    let mut panel = [[0.0; C]; TOKEN_BLOCK];
    for first in columns.clone().step_by(C) {
        let count = C.min(columns.end - first);
        for (panel, t) in panel.iter_mut().zip(block.clone()) {
            let from = &x[t * p.width + first..][..count];
            if let Some(from) = from.as_array::<C>() {
                *panel = *from;
            } else {
                panel[..count].copy_from_slice(from);
            }
        }
        for rank in (0..p.rank).step_by(J) {
            let sums = outer_tile::<F, J, C>(&scaled[..block.len()], &panel[..block.len()], rank);
            for j in 0..J.min(p.rank - rank) {
                match p.layout {
                    FactorLayout::RankMajor => {
                        let at = origin + p.at(rank + j, first);
                        // SAFETY: columns of different threads do not overlap.
                        let dfactor = unsafe { dfactor.slice(at..at + count) };
                        for (dfactor, sum) in dfactor.iter_mut().zip(&sums[j]) {
                            *dfactor += sum;
                        }
                    }
                    FactorLayout::WidthMajor => {
                        let here = origin + first * p.rank..origin + (first + count) * p.rank;
                        // SAFETY: all ranks of these columns lie here, and nothing else; columns of
                        // different threads do not overlap.
                        let dfactor = unsafe { dfactor.slice(here) };
                        for (row, sum) in dfactor.chunks_exact_mut(p.rank).zip(&sums[j]) {
                            row[rank + j] += sum;
                        }
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn outer_tile<F: Fma, const J: usize, const C: usize>(
    scaled: &[[f32; RANK_MAX]],
    panel: &[[f32; C]],
    rank: usize,
) -> [[f32; C]; J] {
    let mut acc = [[0.0; C]; J];
    // ORDER: ascending tokens.
    for (scaled, x) in scaled.iter().zip(panel) {
        let scaled: &[f32; J] = scaled[rank..].first_chunk().expect("ranks are padded to whole tiles");
        for j in 0..J {
            for c in 0..C {
                acc[j][c] = F::fma(scaled[j], x[c], acc[j][c]);
            }
        }
    }
    acc
}
