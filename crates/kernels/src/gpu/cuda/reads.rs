//! Slots for copies to the host that the host does not wait for: pinned memory and an event each.
//! Slots are used again, never freed: commands run in order, so the next copy into a slot comes
//! after one that nobody waited for.

use super::Object;
use std::collections::BTreeMap;
use std::ffi::c_void;

/// Larger reads wait: they are rare, and pinned memory is taken from the whole system.
pub(super) const BYTES_MAX: usize = 1 << 20;
const BYTES_MIN: usize = 4 << 10;

/// Bytes of the slot for a read of `bytes`.
pub(super) fn rounded(bytes: usize) -> usize {
    bytes.next_power_of_two().max(BYTES_MIN)
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) host: *mut c_void,
    /// Recorded after the copy.
    pub(super) event: Object,
    pub(super) bytes: usize,
}

/// All slots, by number, and the free ones by size.
#[derive(Default)]
pub(super) struct Reads {
    slots: Vec<Slot>,
    free: BTreeMap<usize, Vec<usize>>,
}

impl Reads {
    pub(super) fn slot(&self, number: usize) -> Slot {
        self.slots[number]
    }

    /// A free slot of this size.
    pub(super) fn take(&mut self, bytes: usize) -> Option<usize> {
        self.free.get_mut(&bytes)?.pop()
    }

    /// A new slot, which the caller takes at once.
    pub(super) fn add(&mut self, slot: Slot) -> usize {
        self.slots.push(slot);
        self.slots.len() - 1
    }

    pub(super) fn give(&mut self, number: usize) {
        self.free.entry(self.slots[number].bytes).or_default().push(number);
    }

    pub(super) fn into_slots(self) -> Vec<Slot> {
        self.slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::null_mut;

    #[test]
    fn slots_are_used_again_by_size() {
        let mut reads = Reads::default();
        let slot = |bytes| Slot { host: null_mut(), event: null_mut(), bytes };
        let [small, large] = [rounded(1), rounded(5000)];
        assert_eq!((small, large, rounded(BYTES_MAX)), (4096, 8192, BYTES_MAX));
        assert_eq!(reads.take(small), None);
        let first = reads.add(slot(small));
        let second = reads.add(slot(large));
        assert_eq!(reads.take(small), None, "both are taken");
        reads.give(first);
        assert_eq!((reads.take(large), reads.take(small), reads.take(small)), (None, Some(first), None));
        reads.give(second);
        assert_eq!(reads.take(large).map(|number| reads.slot(number).bytes), Some(large));
        assert_eq!(reads.into_slots().len(), 2);
    }
}
