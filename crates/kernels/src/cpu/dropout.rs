//! Dropout (`op/dropout.rs`): sixteen Philox blocks at a time, enough for 64 elements of a row.
//!
//! Elements are divided among threads regardless of rows; a range that starts inside a group of 64
//! computes the whole group.

use super::path::multiversion;
use super::{CpuMemory, elements};
use crate::backend::{Checked, Run};
use crate::op::{ApplyDropout, Dropout};
use crate::{Buffer, Cpu};
use isobit_numerics::philox::keep;

/// Philox blocks computed together.
const BLOCKS: usize = 16;
/// Elements they cover.
const GROUP: usize = 4 * BLOCKS;

impl Run<ApplyDropout<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut ApplyDropout<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let ApplyDropout { y, x, p } = op;
        elements::split(self, y, |range, y| {
            for (row, ends) in p.row_starts.windows(2).enumerate() {
                let (start, end) = (ends[0] * p.width, ends[1] * p.width);
                let here = start.max(range.start)..end.min(range.end);
                if here.is_empty() {
                    continue;
                }
                let first = here.start - start;
                let part = here.start - range.start..here.end - range.start;
                drop_part(self.path, &mut y[part], &x[here], p, p.first_row + row as u32, first);
            }
        });
    }
}

multiversion! {
    /// Elements `first..` of one row.
    fn drop_part<_F>(y: &mut [f32], x: &[f32], p: &Dropout, row: u32, first: usize) {
        let mut done = 0;
        while done < y.len() {
            let element = first + done;
            let offset = element % GROUP;
            let words = group(p, row, (element / GROUP * BLOCKS) as u32);
            let count = (GROUP - offset).min(y.len() - done);
            let (y, x) = (&mut y[done..done + count], &x[done..done + count]);
            if let (Some(y), Some(x)) = (y.as_mut_array::<GROUP>(), x.as_array::<GROUP>()) {
                for index in 0..GROUP {
                    y[index] = select(x[index], words[index], p);
                }
            } else {
                for ((y, x), word) in y.iter_mut().zip(x).zip(&words[offset..]) {
                    *y = select(*x, *word, p);
                }
            }
            done += count;
        }
    }
}

#[inline(always)]
fn select(x: f32, word: u32, p: &Dropout) -> f32 {
    let kept = x * p.keep_scale;
    if keep(word, p.threshold) { kept } else { 0.0 }
}

/// The words of sixteen blocks from `first` on, in element order: `isobit_numerics::philox::block`
/// with every 32-bit word in a 64-bit lane. The upper halves are masked before each multiplication
/// and dropped at the end, so a round is two multiplications, two shifts and two exclusive ors,
/// without packing.
#[inline(always)]
fn group(p: &Dropout, row: u32, first: u32) -> [u32; GROUP] {
    const LOW: u64 = 0xffff_ffff;
    let mut pairs = [0u64; GROUP / 2];
    for lane in 0..BLOCKS {
        let mut c0 = u64::from(first.wrapping_add(lane as u32));
        let [mut c1, mut c2, mut c3] = [row, p.tensor, p.step].map(u64::from);
        let [mut k0, mut k1] = p.key.0;
        for _ in 0..10 {
            let (p0, p1) = (0xd251_1f53 * (c0 & LOW), 0xcd9e_8d57 * (c2 & LOW));
            (c0, c1, c2, c3) = ((p1 >> 32) ^ c1 ^ u64::from(k0), p1, (p0 >> 32) ^ c3 ^ u64::from(k1), p0);
            (k0, k1) = (k0.wrapping_add(0x9e37_79b9), k1.wrapping_add(0xbb67_ae85));
        }
        pairs[2 * lane] = ((c0 & LOW) | (c1 << 32)).to_le();
        pairs[2 * lane + 1] = ((c2 & LOW) | (c3 << 32)).to_le();
    }
    // SAFETY: the same number of plain bytes; pairs are little-endian, so the word of the lower
    // index comes first.
    unsafe { std::mem::transmute::<[u64; GROUP / 2], [u32; GROUP]>(pairs) }.map(u32::from_le)
}
