//! Where buffers lie in a range of device memory that only grows: in the smallest gap that is large
//! enough, the first of equals, or at the end.
//!
//! The places are a function of the calls alone, so a plan that makes the calls of a run knows how
//! far its range grows, gaps included.

use std::collections::{BTreeMap, BTreeSet};

/// Buffers start at multiples of this, which is what any kernel or copy asks for.
const ALIGNMENT: usize = 512;
/// Smaller buffers have a range of their own: they come and go in numbers that a plan does not
/// know, and would part the gaps of the large ones. The shorter rows are, the more buffers are
/// small, so this range must not become large.
pub const SMALL_MAX: usize = 1 << 18;
/// How much that range grows at a time.
pub const SMALL_STEP_BYTES: usize = 2 << 20;

/// How long a buffer stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// Through the micro-batches of an update: gradients and slices of weights. Their sizes are the
    /// same in every update, those of other buffers follow the lengths of rows. Among these they
    /// would lie where one micro-batch had room, and part the room of the next.
    Update,
    /// Within a micro-batch, or for ever.
    Other,
}

/// One range.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    taken: BTreeMap<usize, usize>,
    /// Lengths of gaps by start; neighbours are merged, and none is at the end.
    gaps: BTreeMap<usize, usize>,
    /// The same by length, then start.
    by_length: BTreeSet<(usize, usize)>,
    end: usize,
    end_max: usize,
}

impl Heap {
    /// The start of a new buffer.
    pub(crate) fn take(&mut self, bytes: usize) -> usize {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let start = if let Some(&(length, start)) = self.by_length.range((bytes, 0)..).next() {
            self.remove_gap(start, length);
            if length > bytes {
                self.add_gap(start + bytes, length - bytes);
            }
            start
        } else {
            self.end += bytes;
            self.end_max = self.end_max.max(self.end);
            self.end - bytes
        };
        self.taken.insert(start, bytes);
        start
    }

    /// Gives back the buffer at `start`.
    pub(crate) fn give(&mut self, start: usize) {
        let mut length = self.taken.remove(&start).expect("a buffer is given back once");
        let mut start = start;
        if let Some((&before, &gap)) =
            self.gaps.range(..start).next_back().filter(|(before, gap)| *before + *gap == start)
        {
            self.remove_gap(before, gap);
            (start, length) = (before, gap + length);
        }
        if let Some(&gap) = self.gaps.get(&(start + length)) {
            self.remove_gap(start + length, gap);
            length += gap;
        }
        if start + length == self.end {
            self.end = start;
        } else {
            self.add_gap(start, length);
        }
    }

    /// How far the range ever reached.
    pub(crate) fn end_max(&self) -> usize {
        self.end_max
    }

    fn add_gap(&mut self, start: usize, length: usize) {
        self.gaps.insert(start, length);
        self.by_length.insert((length, start));
    }

    fn remove_gap(&mut self, start: usize, length: usize) {
        self.gaps.remove(&start);
        self.by_length.remove(&(length, start));
    }
}

/// A range each for large buffers of an update, small buffers, and all others.
#[derive(Debug, Default)]
pub(crate) struct Heaps {
    pub(crate) ranges: [Heap; Self::COUNT],
}

impl Heaps {
    pub(crate) const COUNT: usize = 3;
    const OTHER: usize = 0;
    const SMALL: usize = 1;
    const UPDATE: usize = 2;
    /// By how much each range grows at least: a call of the driver for each step, and up to a step
    /// of each that is not used.
    pub(crate) const STEPS: [usize; Self::COUNT] = [32 << 20, SMALL_STEP_BYTES, 8 << 20];

    /// The range of a buffer.
    pub(crate) const fn range_of(bytes: usize, lifetime: Lifetime) -> usize {
        match lifetime {
            _ if bytes < SMALL_MAX => Self::SMALL,
            Lifetime::Other => Self::OTHER,
            Lifetime::Update => Self::UPDATE,
        }
    }

    /// Bytes that all ranges have taken from the device.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = self.ranges.iter().zip(Self::STEPS).map(|(range, step)| range.end_max().next_multiple_of(step));
        bytes.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_taken_again_and_neighbours_merge() {
        let mut heap = Heap::default();
        let starts = [1000, 5000, 1, 3000].map(|bytes| heap.take(bytes));
        assert_eq!((starts, heap.end_max()), ([0, 1024, 6144, 6656], 9728));
        heap.give(starts[1]);
        heap.give(starts[0]);
        assert_eq!(heap.take(6144), 0, "the merged gap");
        heap.give(starts[2]);
        heap.give(starts[3]);
        assert_eq!((heap.end, heap.end_max()), (6144, 9728), "the end comes back");
    }

    #[test]
    fn the_smallest_gap_that_is_large_enough_is_taken() {
        let mut heap = Heap::default();
        let starts = [4096, 512, 1024, 512, 2048, 512].map(|bytes| heap.take(bytes));
        for at in [0, 2, 4] {
            heap.give(starts[at]);
        }
        assert_eq!([heap.take(1024), heap.take(600), heap.take(4096)], [starts[2], starts[4], starts[0]]);
        assert_eq!(heap.take(1024), starts[4] + 1024, "the rest of a gap");
    }

    /// Any order of calls: buffers never overlap, and everything given back is one gap.
    #[test]
    fn buffers_do_not_overlap() {
        let (mut heap, mut held, mut state) = (Heap::default(), BTreeMap::new(), 1u64);
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let [kind, which] = [state >> 33, state >> 40].map(|bits| bits as usize);
            if kind % 5 < 3 {
                let bytes = which % 9000;
                let start = heap.take(bytes);
                let before = held.range(..=start).next_back().map_or(0, |(start, bytes)| start + bytes);
                let after = held.range(start..).next().map_or(usize::MAX, |(start, _)| *start);
                assert!(before <= start && start + bytes.max(1) <= after && start % ALIGNMENT == 0);
                held.insert(start, bytes.max(1));
            } else if let Some(&start) = held.keys().nth(which % held.len().max(1)) {
                held.remove(&start);
                heap.give(start);
            }
        }
        assert!(heap.end_max() > 0 && !held.is_empty());
        for start in held.keys() {
            heap.give(*start);
        }
        assert_eq!((heap.end, heap.gaps.len(), heap.by_length.len(), heap.taken.len()), (0, 0, 0, 0));
    }
}
