//! Dropout (`op/dropout.rs`): sixteen Philox blocks side by side, which is 64 elements of a row.
//!
//! Threads share the elements without regard to rows; a range that starts inside a group of 64 computes the whole group.

use super::elements;
use super::path::multiversion;
use crate::Cpu;
use crate::op::Dropout;
use isobit_numerics::philox::{block, keep};

/// Philox blocks computed together.
const BLOCKS: usize = 16;
/// Elements they decide about.
const GROUP: usize = 4 * BLOCKS;

pub(super) fn apply(cpu: &Cpu, y: &mut [f32], x: &[f32], p: &Dropout) {
    let length = p.row_starts[p.row_starts.len() - 1] * p.width;
    assert_eq!((x.len(), y.len()), (length, length), "tokens of all rows");
    elements::split(cpu, y, |range, y| {
        for (row, ends) in p.row_starts.windows(2).enumerate() {
            let (start, end) = (ends[0] * p.width, ends[1] * p.width);
            let here = start.max(range.start)..end.min(range.end);
            if here.is_empty() {
                continue;
            }
            let first = here.start - start;
            let part = here.start - range.start..here.end - range.start;
            drop_part(cpu.path, &mut y[part], &x[here], p, p.first_row + row as u32, first);
        }
    });
}

multiversion! {
    /// Elements `first..` of one row.
    fn drop_part<_F>(y: &mut [f32], x: &[f32], p: &Dropout, row: u32, first: usize) {
        let mut words = [0; GROUP];
        let mut done = 0;
        while done < y.len() {
            let element = first + done;
            let offset = element % GROUP;
            group(&mut words, p, row, (element / GROUP * BLOCKS) as u32);
            let count = (GROUP - offset).min(y.len() - done);
            let words = &words[offset..offset + count];
            for ((y, x), word) in y[done..done + count].iter_mut().zip(&x[done..done + count]).zip(words) {
                let kept = x * p.keep_scale;
                *y = if keep(*word, p.threshold) { kept } else { 0.0 };
            }
            done += count;
        }
    }
}

/// The words of sixteen blocks from `first` on, in element order.
#[inline(always)]
fn group(words: &mut [u32; GROUP], p: &Dropout, row: u32, first: u32) {
    let mut columns = [[0; BLOCKS]; 4];
    for lane in 0..BLOCKS {
        let four = block(p.key, p.step, row, p.tensor, first.wrapping_add(lane as u32));
        for word in 0..4 {
            columns[word][lane] = four[word];
        }
    }
    for lane in 0..BLOCKS {
        for word in 0..4 {
            words[4 * lane + word] = columns[word][lane];
        }
    }
}
