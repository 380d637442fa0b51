//! Causal convolution (`op/conv1d.rs`), tile by tile of channels. Forward shares tokens out, backward channels: there one pass over the
//! tokens has the window, the sums that become `dx`, and those that become `dweight`.

use super::path::multiversion;
use super::pool::SharedMut;
use crate::Cpu;
use crate::op::conv1d::KERNEL_MAX;
use crate::op::{Conv1d, TOKEN_BLOCK, token_blocks};
use isobit_numerics::elementary::{silu, silu_grad};
use std::ops::Range;

/// Channels of a tile: whole cache lines of a token, and windows of them stay in the first-level cache.
const TILE: usize = 128;

type Lane = [f32; TILE];

pub(super) fn forward(cpu: &Cpu, y: &mut [f32], x: &[f32], weight: &[f32], history: Option<&[f32]>, p: &Conv1d) {
    check([y.len(), x.len(), weight.len()], p);
    assert!(history.is_none_or(|history| history.len() == p.history()), "{} taps before each document", p.kernel - 1);
    let before = (p.kernel - 1) * p.channels;
    cpu.pool.run_rows(y, p.channels, |tokens, y| {
        for (document, ends) in p.starts.windows(2).enumerate() {
            let here = tokens.start.max(ends[0])..tokens.end.min(ends[1]);
            if here.is_empty() {
                continue;
            }
            let y = &mut y[(here.start - tokens.start) * p.channels..(here.end - tokens.start) * p.channels];
            let history = history.map_or(&[][..], |history| &history[document * before..][..before]);
            for first in (0..p.channels).step_by(TILE) {
                forward_tile(cpu.path, y, x, weight, history, p, ends[0], here.clone(), first);
            }
        }
    });
}

fn check(lengths: [usize; 3], p: &Conv1d) {
    p.check();
    let length = p.tokens() * p.channels;
    assert_eq!(lengths, [length, length, p.channels * p.kernel], "convolution");
}

pub(super) fn backward(
    cpu: &Cpu,
    dx: &mut [f32],
    dweight: Option<&mut [f32]>,
    dy: &[f32],
    x: &[f32],
    weight: &[f32],
    p: &Conv1d,
    row_starts: &[usize],
) {
    check([dy.len(), x.len(), weight.len()], p);
    assert_eq!(dx.len(), x.len(), "convolution");
    let dweight = dweight.map(|dweight| {
        assert_eq!(dweight.len(), weight.len(), "convolution");
        assert_eq!(row_starts[row_starts.len() - 1], p.tokens(), "rows of data end with the tokens");
        SharedMut::new(dweight)
    });
    let dx = SharedMut::new(dx);
    cpu.pool.run_ranges(p.channels.div_ceil(TILE), 1, |tiles| {
        for first in tiles.map(|tile| tile * TILE) {
            let own = first * p.kernel..(first + TILE).min(p.channels) * p.kernel;
            // SAFETY: channels of different threads do not overlap.
            let dweight = dweight.as_ref().map(|dweight| unsafe { dweight.slice(own) });
            backward_tile(cpu.path, &dx, dweight, dy, x, weight, p, row_starts, first);
        }
    });
}

/// The weights of a tile, tap by tap. Channels past the last are zero.
#[inline(always)]
fn taps(weight: &[f32], p: &Conv1d, first: usize) -> [Lane; KERNEL_MAX] {
    let mut taps = [[0.0; TILE]; KERNEL_MAX];
    for (lane, weight) in weight.chunks_exact(p.kernel).skip(first).take(TILE).enumerate() {
        for (tap, weight) in taps.iter_mut().zip(weight) {
            tap[lane] = *weight;
        }
    }
    taps
}

/// A token's channels of a tile, filled up with zeros.
#[inline(always)]
fn loaded(x: &[f32], row: usize, p: &Conv1d, first: usize) -> Lane {
    let x = &x[row * p.channels..][first..(first + TILE).min(p.channels)];
    let mut lane = [0.0; TILE];
    lane[..x.len()].copy_from_slice(x);
    lane
}

multiversion! {
    /// Channels `first ..` of the tokens `here` of the document that begins at `start`; `y` has these tokens alone.
    fn forward_tile<F>(
        y: &mut [f32],
        x: &[f32],
        weight: &[f32],
        history: &[f32],
        p: &Conv1d,
        start: usize,
        here: Range<usize>,
        first: usize,
    ) {
        let taps = taps(weight, p, first);
        let width = TILE.min(p.channels - first);
        for (y, t) in y.chunks_exact_mut(p.channels).zip(here) {
            let mut sums = [0.0; TILE];
            for (j, tap) in taps[..p.kernel].iter().enumerate() {
                let row = if t + j + 1 >= start + p.kernel {
                    loaded(x, t + j + 1 - p.kernel, p, first)
                } else if history.is_empty() {
                    continue;
                } else {
                    loaded(history, t + j - start, p, first)
                };
                for lane in 0..TILE {
                    sums[lane] = F::fma(tap[lane], row[lane], sums[lane]);
                }
            }
            let mut out = [0.0; TILE];
            for lane in 0..TILE {
                out[lane] = silu::<F>(sums[lane]);
            }
            y[first..first + width].copy_from_slice(&out[..width]);
        }
    }
}

multiversion! {
    fn backward_tile<F>(
        dx: &SharedMut<'_, f32>,
        dweight: Option<&mut [f32]>,
        dy: &[f32],
        x: &[f32],
        weight: &[f32],
        p: &Conv1d,
        row_starts: &[usize],
        first: usize,
    ) {
        let (taps, last) = (taps(weight, p, first), p.kernel - 1);
        let width = TILE.min(p.channels - first);
        let store = |t: usize, lane: &Lane| {
            let at = t * p.channels + first;
            // SAFETY: channels of different threads do not overlap.
            unsafe { dx.slice(at..at + width) }.copy_from_slice(&lane[..width]);
        };
        let mut sums = WeightSums::new(dweight, p.kernel, row_starts);
        for ends in p.starts.windows(2) {
            // Tap `j` is the input, and `later[j]` the growing gradient, of token `t − last + j`.
            let (mut window, mut later) = ([[0.0; TILE]; KERNEL_MAX], [[0.0; TILE]; KERNEL_MAX]);
            for t in ends[0]..ends[1] {
                window.copy_within(1..p.kernel, 0);
                window[last] = loaded(x, t, p, first);
                let there = last.saturating_sub(t - ends[0])..p.kernel;
                let mut c = [0.0; TILE];
                for j in there.clone() {
                    for lane in 0..TILE {
                        c[lane] = F::fma(taps[j][lane], window[j][lane], c[lane]);
                    }
                }
                let mut dc = loaded(dy, t, p, first);
                for lane in 0..TILE {
                    dc[lane] *= silu_grad::<F>(c[lane]);
                }
                for j in there.clone() {
                    for lane in 0..TILE {
                        later[j][lane] = F::fma(taps[j][lane], dc[lane], later[j][lane]);
                    }
                }
                if sums.reaches(t) {
                    for j in there.clone() {
                        for lane in 0..TILE {
                            sums.block[j][lane] = F::fma(dc[lane], window[j][lane], sums.block[j][lane]);
                        }
                    }
                }
                if there.start == 0 {
                    store(t - last, &later[0]);
                }
                later.copy_within(1..p.kernel, 0);
                later[last] = [0.0; TILE];
            }
            for j in last.saturating_sub(ends[1] - ends[0])..last {
                store(ends[1] + j - last, &later[j]);
            }
        }
        sums.fold();
    }
}

/// The running sums of a tile's `dweight`, folded in at the end of every block of tokens.
struct WeightSums<'a, I> {
    dweight: Option<&'a mut [f32]>,
    kernel: usize,
    blocks: I,
    end: usize,
    block: [Lane; KERNEL_MAX],
}

impl<'a> WeightSums<'a, ()> {
    fn new(
        dweight: Option<&'a mut [f32]>,
        kernel: usize,
        row_starts: &'a [usize],
    ) -> WeightSums<'a, impl Iterator<Item = Range<usize>> + 'a> {
        let mut blocks = token_blocks(row_starts, TOKEN_BLOCK);
        let end = blocks.next().map_or(0, |block| block.end);
        WeightSums { dweight, kernel, blocks, end, block: [[0.0; TILE]; KERNEL_MAX] }
    }
}

impl<I: Iterator<Item = Range<usize>>> WeightSums<'_, I> {
    /// Makes ready for token `t`, which comes after all before; says whether there is anything to sum up.
    #[inline(always)]
    fn reaches(&mut self, t: usize) -> bool {
        if self.dweight.is_none() {
            return false;
        }
        if t >= self.end {
            self.fold();
            self.end = self.blocks.next().map_or(usize::MAX, |block| block.end);
        }
        true
    }

    fn fold(&mut self) {
        let Some(dweight) = self.dweight.as_mut().filter(|_| self.end > 0) else { return };
        for (lane, dweight) in dweight.chunks_exact_mut(self.kernel).enumerate() {
            for (dweight, block) in dweight.iter_mut().zip(&self.block) {
                *dweight += block[lane];
            }
        }
        self.block = [[0.0; TILE]; KERNEL_MAX];
    }
}
