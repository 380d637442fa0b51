//! How ops without sums are shared out: contiguous ranges of elements, whole cache lines each.

use super::pool::SharedMut;
use crate::Cpu;
use std::ops::Range;

/// Elements below which a second thread is not worth waking.
pub(super) const GRAIN: usize = 1024;

/// Gives each thread a range of `y` and its elements.
pub(super) fn split<T: Send>(cpu: &Cpu, y: &mut [T], job: impl Fn(Range<usize>, &mut [T]) + Sync) {
    let length = y.len();
    let y = SharedMut::new(y);
    cpu.pool.run_ranges(length, GRAIN, |range| {
        // SAFETY: ranges of different threads do not overlap.
        let part = unsafe { y.slice(range.clone()) };
        job(range, part);
    });
}
