//! Causal convolution (`op/conv1d.rs`), in tiles of channels. Forward is parallel over tokens,
//! backward over channels, where a single pass over the tokens computes the window, `dx` and
//! `dweight`.

use super::CpuMemory;
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::{Checked, Run};
use crate::op::conv1d::KERNEL_MAX;
use crate::op::{Conv1d, Conv1dBackward, Conv1dForward, TOKEN_BLOCK, token_blocks};
use crate::{Buffer, Cpu};
use isobit_numerics::Fma;
use isobit_numerics::elementary::{silu, silu_grad};
use isobit_numerics::lanes::{LANES, Lanes};
use std::ops::Range;

/// Lane blocks per tile: its data per tap stays in the L1 cache.
const BLOCKS: usize = 8;
/// Channels per tile.
const TILE: usize = BLOCKS * LANES;

/// Values of a tile, by tap, then by lane block.
type Taps = [[Lanes; BLOCKS]; KERNEL_MAX];

/// Inputs of both passes.
struct Convolution<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    p: &'a Conv1d<'a>,
}

impl Run<Conv1dForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut Conv1dForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let Conv1dForward { y, x, weight, history, p } = op;
        let convolution = Convolution { x, weight, p };
        let before = (p.kernel - 1) * p.channels;
        self.pool.run_rows(y, p.channels, |tokens, y| {
            for (document, ends) in p.starts.windows(2).enumerate() {
                let here = tokens.start.max(ends[0])..tokens.end.min(ends[1]);
                if here.is_empty() {
                    continue;
                }
                let y = &mut y[(here.start - tokens.start) * p.channels..(here.end - tokens.start) * p.channels];
                let history = history.map_or(&[][..], |history| &history[document * before..][..before]);
                for first in (0..p.channels).step_by(TILE) {
                    forward_tile(self.path, y, &convolution, history, ends[0], here.clone(), first);
                }
            }
        });
    }
}

impl Run<Conv1dBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut Conv1dBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let Conv1dBackward { dx, dweight, dy, x, weight, p, row_starts } = op;
        let convolution = Convolution { x, weight, p };
        let dweight = dweight.as_deref_mut().map(|dweight| SharedMut::new(dweight));
        let dx = SharedMut::new(dx);
        self.pool.run_ranges(p.channels.div_ceil(TILE), 1, |tiles| {
            for first in tiles.map(|tile| tile * TILE) {
                let own = first * p.kernel..(first + TILE).min(p.channels) * p.kernel;
                // SAFETY: channels of different threads do not overlap.
                let dweight = dweight.as_ref().map(|dweight| unsafe { dweight.slice(own) });
                backward_tile(self.path, &dx, dweight, dy, &convolution, row_starts, first);
            }
        });
    }
}

/// The weights of a tile, zero for channels past the last.
#[inline(always)]
fn taps(weight: &[f32], p: &Conv1d, first: usize) -> Taps {
    let mut taps = [[[0.0; LANES]; BLOCKS]; KERNEL_MAX];
    for (index, weight) in weight.chunks_exact(p.kernel).skip(first).take(TILE).enumerate() {
        for (tap, weight) in taps.iter_mut().zip(weight) {
            tap[index / LANES][index % LANES] = *weight;
        }
    }
    taps
}

/// First channel of every block of the tile at `first`, with the block's number.
#[inline(always)]
fn blocks(first: usize, p: &Conv1d) -> impl Iterator<Item = (usize, usize)> {
    (first..p.channels).step_by(LANES).take(BLOCKS).enumerate()
}

/// A token's channels from `channel`: a lane block, or the remainder.
#[inline(always)]
fn channels<'a>(x: &'a [f32], row: usize, p: &Conv1d, channel: usize) -> &'a [f32] {
    &x[row * p.channels..(row + 1) * p.channels][channel..(channel + LANES).min(p.channels)]
}

/// `sums = fma(factors, row, sums)`; a short row updates only its own lanes.
#[inline(always)]
fn step<F: Fma>(sums: &mut Lanes, factors: &Lanes, row: &[f32]) {
    if let Some(row) = row.as_array::<LANES>() {
        for lane in 0..LANES {
            sums[lane] = F::fma(factors[lane], row[lane], sums[lane]);
        }
    } else {
        for ((sum, factor), x) in sums.iter_mut().zip(factors).zip(row) {
            *sum = F::fma(*factor, *x, *sum);
        }
    }
}

/// `dy·silu_grad(c)`.
#[inline(always)]
fn gradients<F: Fma>(c: &Lanes, dy: &[f32]) -> Lanes {
    let mut dc = [0.0; LANES];
    for lane in 0..LANES {
        dc[lane] = silu_grad::<F>(c[lane]);
    }
    if let Some(dy) = dy.as_array::<LANES>() {
        for lane in 0..LANES {
            dc[lane] *= dy[lane];
        }
    } else {
        for (dc, dy) in dc.iter_mut().zip(dy) {
            *dc *= dy;
        }
    }
    dc
}

#[inline(always)]
fn store(y: &mut [f32], lanes: &Lanes) {
    if let Some(whole) = y.first_chunk_mut() {
        *whole = *lanes;
    } else {
        y.copy_from_slice(&lanes[..y.len()]);
    }
}

multiversion! {
    /// Channels `first ..` of the tokens `here` of the document that begins at `start`; `y` holds
    /// only these tokens.
    fn forward_tile<F>(
        y: &mut [f32],
        convolution: &Convolution,
        history: &[f32],
        start: usize,
        here: Range<usize>,
        first: usize,
    ) {
        let Convolution { x, weight, p } = *convolution;
        let (taps, last) = (taps(weight, p, first), p.kernel - 1);
        for (y, t) in y.chunks_exact_mut(p.channels).zip(here) {
            for (block, channel) in blocks(first, p) {
                let mut sums = [0.0; LANES];
                let absent = last.saturating_sub(t - start);
                if !history.is_empty() {
                    for j in 0..absent {
                        step::<F>(&mut sums, &taps[j][block], channels(history, t + j - start, p, channel));
                    }
                }
                for j in absent..p.kernel {
                    step::<F>(&mut sums, &taps[j][block], channels(x, t + j - last, p, channel));
                }
                let mut out = [0.0; LANES];
                for lane in 0..LANES {
                    out[lane] = silu::<F>(sums[lane]);
                }
                store(&mut y[channel..], &out);
            }
        }
    }
}

multiversion! {
    fn backward_tile<F>(
        dx: &SharedMut<'_, f32>,
        dweight: Option<&mut [f32]>,
        dy: &[f32],
        convolution: &Convolution,
        row_starts: &[usize],
        first: usize,
    ) {
        let Convolution { x, weight, p } = *convolution;
        let (taps, last) = (taps(weight, p, first), p.kernel - 1);
        let end = (first + TILE).min(p.channels);
        // Partial gradients of the last tokens: that of token `t` is at `t % kernel`.
        let mut growing: Taps = [[[0.0; LANES]; BLOCKS]; KERNEL_MAX];
        let mut sums = WeightSums::new(dweight, p.kernel, row_starts);
        for ends in p.starts.windows(2) {
            for t in ends[0]..ends[1] {
                let there = last.saturating_sub(t - ends[0])..p.kernel;
                let summed = sums.reaches(t);
                growing[t % p.kernel] = [[0.0; LANES]; BLOCKS];
                for (block, channel) in blocks(first, p) {
                    let mut c = [0.0; LANES];
                    for j in there.clone() {
                        step::<F>(&mut c, &taps[j][block], channels(x, t + j - last, p, channel));
                    }
                    let dc = gradients::<F>(&c, channels(dy, t, p, channel));
                    for j in there.clone() {
                        step::<F>(&mut growing[(t + j - last) % p.kernel][block], &taps[j][block], &dc);
                    }
                    if summed {
                        for j in there.clone() {
                            step::<F>(&mut sums.block[j][block], &dc, channels(x, t + j - last, p, channel));
                        }
                    }
                }
                // At the document's end all remaining ones are complete.
                let done = if t + 1 == ends[1] { p.kernel } else { 1 };
                for done in (there.start..done).map(|j| t + j - last) {
                    // SAFETY: channels of different threads do not overlap.
                    let dx = unsafe { dx.slice(done * p.channels + first..done * p.channels + end) };
                    for (dx, lanes) in dx.chunks_mut(LANES).zip(&growing[done % p.kernel]) {
                        store(dx, lanes);
                    }
                }
            }
        }
        sums.flush();
    }
}

/// The running sums of a tile's `dweight`, added at the end of every block of tokens.
struct WeightSums<'a, I> {
    dweight: Option<&'a mut [f32]>,
    kernel: usize,
    blocks: I,
    end: usize,
    block: Taps,
}

impl<'a> WeightSums<'a, ()> {
    fn new(
        dweight: Option<&'a mut [f32]>,
        kernel: usize,
        row_starts: &'a [usize],
    ) -> WeightSums<'a, impl Iterator<Item = Range<usize>> + 'a> {
        let mut blocks = token_blocks(row_starts, TOKEN_BLOCK);
        let end = blocks.next().map_or(0, |block| block.end);
        WeightSums { dweight, kernel, blocks, end, block: [[[0.0; LANES]; BLOCKS]; KERNEL_MAX] }
    }
}

impl<I: Iterator<Item = Range<usize>>> WeightSums<'_, I> {
    /// Prepares for token `t`; tokens come in ascending order. Returns whether there is anything to
    /// sum.
    #[inline(always)]
    fn reaches(&mut self, t: usize) -> bool {
        if self.dweight.is_none() {
            return false;
        }
        if t >= self.end {
            self.flush();
            self.end = self.blocks.next().map_or(usize::MAX, |block| block.end);
        }
        true
    }

    fn flush(&mut self) {
        let Some(dweight) = self.dweight.as_mut().filter(|_| self.end > 0) else { return };
        for (channel, dweight) in dweight.chunks_exact_mut(self.kernel).enumerate() {
            for (dweight, block) in dweight.iter_mut().zip(&self.block) {
                *dweight += block[channel / LANES][channel % LANES];
            }
        }
        self.block = [[[0.0; LANES]; BLOCKS]; KERNEL_MAX];
    }
}
