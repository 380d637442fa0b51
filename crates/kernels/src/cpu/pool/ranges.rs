//! How work is divided among threads: by worker number ([`share`]), in order of request
//! ([`Tasks`]), or as ranges that idle workers steal from ([`StealingRanges`]).
//!
//! Unsafe code relies on all three: every index of `0..count` is handed out exactly once,
//! regardless of which threads ask and how often, so threads that write only what they were handed
//! never overlap.

use std::ops::{Range, RangeInclusive};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The part of `0..count` that belongs to `worker`, in whole grains. The parts of all workers tile
/// the whole.
pub fn share(count: usize, grain: usize, workers: usize, worker: usize) -> Range<usize> {
    let grains = count.div_ceil(grain);
    let at = |index: usize| (grains * index / workers * grain).min(count);
    at(worker)..at(worker + 1)
}

/// Work handed out in order of request, for tasks of unequal length or threads of unequal speed.
/// Each task is handed out once; results never depend on which thread gets it.
pub struct Tasks {
    next: AtomicUsize,
    count: usize,
}

impl Tasks {
    pub fn new(count: usize) -> Self {
        Self { next: AtomicUsize::new(0), count }
    }

    pub fn count(&self) -> usize {
        self.count
    }

    pub fn next(&self) -> Option<usize> {
        let task = self.next.fetch_add(1, Ordering::Relaxed);
        (task < self.count).then_some(task)
    }
}

/// Work-stealing ranges. Every worker has a share of `0..count` and takes from its front, large
/// ranges first and ever smaller ones; an idle worker steals from the end of the longest share
/// left. So threads of unequal speed finish together, and those of equal speed keep to their own
/// shares. Each index is handed out once, and results never depend on which thread gets it.
pub struct StealingRanges {
    shares: Vec<Mutex<Range<usize>>>,
    sizes: RangeInclusive<usize>,
}

impl StealingRanges {
    /// Divides `0..count` into ranges of these sizes.
    pub fn new(count: usize, threads: usize, sizes: RangeInclusive<usize>) -> Self {
        let shares = (0..threads).map(|worker| Mutex::new(share(count, 1, threads, worker))).collect();
        Self { shares, sizes }
    }

    /// The next range for a worker.
    pub fn next(&self, worker: usize) -> Option<Range<usize>> {
        self.next_within(worker, |_| 0..usize::MAX)
    }

    /// Like [`Self::next`], but a range stays within one `area(index)`.
    pub fn next_within(&self, worker: usize, area: impl Fn(usize) -> Range<usize>) -> Option<Range<usize>> {
        let alone = self.shares.len() == 1;
        let size = |left: usize| {
            let wanted = left.div_ceil(2).clamp(*self.sizes.start(), *self.sizes.end());
            if alone { left } else { wanted.min(left) }
        };
        {
            let mut own = self.lock(worker);
            if !own.is_empty() {
                let range = own.start..(own.start + size(own.len())).min(area(own.start).end);
                own.start = range.end;
                return Some(range);
            }
        }
        loop {
            let (left, longest) = (0..self.shares.len()).map(|other| (self.lock(other).len(), other)).max()?;
            if left == 0 {
                return None;
            }
            let mut other = self.lock(longest);
            // Its owner may have emptied it.
            if !other.is_empty() {
                let range = (other.end - size(other.len())).max(area(other.end - 1).start)..other.end;
                other.end = range.start;
                return Some(range);
            }
        }
    }

    fn lock(&self, worker: usize) -> MutexGuard<'_, Range<usize>> {
        self.shares[worker].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_a_partition_and_keep_to_their_areas() {
        for (count, threads, sizes, area) in [
            (0, 2, 1..=4, 5),
            (1, 7, 1..=4, 1),
            (103, 2, 1..=8, 10),
            (64, 1, 4..=8, 16),
            (97, 3, 4..=100, 97),
            (97, 3, 4..=9, 7),
        ] {
            let area_of = |index: usize| index / area * area..(index / area + 1) * area;
            // One thread that does everything, and threads in rotation.
            for workers in [1, threads] {
                let ranges = StealingRanges::new(count, threads, sizes.clone());
                let mut seen = vec![0; count];
                for turn in 0.. {
                    let Some(range) = ranges.next_within(turn % workers, area_of) else { break };
                    assert!(!range.is_empty() && range.start / area == (range.end - 1) / area, "{range:?} of {count}");
                    range.for_each(|index| seen[index] += 1);
                }
                assert!(seen.iter().all(|times| *times == 1), "{count} by {threads}: {seen:?}");
            }
        }
    }

    #[test]
    fn threads_of_equal_speed_keep_to_their_shares() {
        let ranges = StealingRanges::new(64, 2, 1..=usize::MAX);
        for worker in [0, 1].repeat(6) {
            let range = ranges.next(worker).expect("six ranges each");
            assert!(share(64, 1, 2, worker).contains(&range.start), "{range:?} for {worker}");
        }
    }

    #[test]
    fn shares_tile_the_whole() {
        for count in [0, 1, 5, 16, 17, 1000] {
            for grain in [1, 6, 16] {
                for workers in [1, 2, 7] {
                    let mut next = 0;
                    for worker in 0..workers {
                        let range = share(count, grain, workers, worker);
                        assert_eq!(range.start, next);
                        next = range.end;
                    }
                    assert_eq!(next, count);
                }
            }
        }
    }
}
