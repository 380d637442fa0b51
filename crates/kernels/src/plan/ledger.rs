//! The ledger of the counting backend: the bytes of each holder, now and at the peak, and the work
//! done.
//!
//! A holder is the line of code that allocated the memory, so a plan can name every buffer without
//! labels.

use crate::heap::{Heaps, Lifetime};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::Location;
use std::rc::Rc;

/// The kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemoryKind {
    /// Elements of this type.
    Buffer(&'static str),
    /// Sliced activations.
    Rows,
    /// Sliced weights, or 4-bit weights.
    Weight,
}

/// Memory of one kind allocated by one line of code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// Source file and line.
    pub file: &'static str,
    pub line: u32,
    pub kind: MemoryKind,
}

/// Bytes by holder.
pub type Holdings = BTreeMap<Holder, usize>;

/// The work of one op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    pub calls: u64,
    /// Mathematical multiply-adds: a product of two sliced numbers counts as one in either profile.
    pub multiply_adds: u64,
    /// Numbers written.
    pub outputs: u64,
}

#[derive(Default)]
struct Books {
    held: Holdings,
    bytes: usize,
    /// Recorded when the total falls from the peak, not each time it rises.
    at_peak: Holdings,
    bytes_peak: usize,
    work: BTreeMap<&'static str, Work>,
    /// Where the bytes lie, on a device that has a heap.
    heaps: Option<Heaps>,
}

impl Books {
    fn is_at_peak(&self) -> bool {
        self.bytes == self.bytes_peak
    }
}

/// Shared by a backend and everything it allocated.
#[derive(Clone, Default)]
pub(super) struct Ledger(Rc<RefCell<Books>>);

/// Bytes held until the claim is dropped.
pub(super) struct Claim {
    ledger: Ledger,
    holder: Holder,
    bytes: usize,
    /// A range of the heap, and its place there.
    range: usize,
    start: usize,
}

impl Ledger {
    pub(super) fn with_heap() -> Self {
        Self(Rc::new(RefCell::new(Books { heaps: Some(Heaps::default()), ..Books::default() })))
    }

    /// Bytes that the heap takes from the device, gaps included.
    pub(super) fn heap_bytes(&self) -> Option<usize> {
        self.0.borrow().heaps.as_ref().map(Heaps::bytes)
    }

    pub(super) fn claim(
        &self,
        kind: MemoryKind,
        bytes: usize,
        lifetime: Lifetime,
        at: &'static Location<'static>,
    ) -> Claim {
        let holder = Holder { file: at.file(), line: at.line(), kind };
        let (range, mut start) = (Heaps::range_of(bytes, lifetime), 0);
        if bytes > 0 {
            let mut books = self.0.borrow_mut();
            if let Some(heaps) = &mut books.heaps {
                start = heaps.ranges[range].take(bytes);
            }
            *books.held.entry(holder).or_default() += bytes;
            books.bytes += bytes;
            books.bytes_peak = books.bytes_peak.max(books.bytes);
        }
        Claim { ledger: self.clone(), holder, bytes, range, start }
    }

    pub(super) fn did(&self, op: &'static str, multiply_adds: usize, outputs: usize) {
        let mut books = self.0.borrow_mut();
        let work = books.work.entry(op).or_default();
        work.calls += 1;
        work.multiply_adds += multiply_adds as u64;
        work.outputs += outputs as u64;
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.borrow().bytes
    }

    pub(super) fn bytes_peak(&self) -> usize {
        self.0.borrow().bytes_peak
    }

    #[cfg(test)]
    pub(super) fn held(&self) -> Holdings {
        self.0.borrow().held.clone()
    }

    pub(super) fn held_at_peak(&self) -> Holdings {
        let books = self.0.borrow();
        if books.is_at_peak() { books.held.clone() } else { books.at_peak.clone() }
    }

    pub(super) fn work(&self) -> BTreeMap<&'static str, Work> {
        self.0.borrow().work.clone()
    }

    pub(super) fn forget(&self) {
        let mut books = self.0.borrow_mut();
        books.bytes_peak = books.bytes;
        books.work.clear();
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let mut books = self.ledger.0.borrow_mut();
        if books.is_at_peak() {
            books.at_peak = books.held.clone();
        }
        if let Some(heaps) = &mut books.heaps {
            heaps.ranges[self.range].give(self.start);
        }
        books.bytes -= self.bytes;
        let left = books.held.get_mut(&self.holder).expect("what is dropped was claimed");
        *left -= self.bytes;
        if *left == 0 {
            books.held.remove(&self.holder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_remembers_who_held_what() {
        let ledger = Ledger::default();
        let at = Location::caller();
        let claim = |kind, bytes| ledger.claim(kind, bytes, Lifetime::Other, at);
        let first = claim(MemoryKind::Rows, 10);
        let second = claim(MemoryKind::Weight, 5);
        drop(first);
        let third = claim(MemoryKind::Rows, 7);
        let of =
            |holdings: Holdings, kind| holdings.iter().find(|(of, _)| of.kind == kind).map_or(0, |(_, bytes)| *bytes);
        assert_eq!((ledger.bytes(), ledger.bytes_peak()), (12, 15));
        assert_eq!((of(ledger.held_at_peak(), MemoryKind::Rows), of(ledger.held(), MemoryKind::Rows)), (10, 7));
        let fourth = claim(MemoryKind::Rows, 8);
        assert_eq!((ledger.bytes_peak(), of(ledger.held_at_peak(), MemoryKind::Rows)), (20, 15));
        drop((second, third));
        assert_eq!((ledger.bytes(), of(ledger.held_at_peak(), MemoryKind::Rows)), (8, 15));
        ledger.forget();
        assert_eq!((ledger.bytes_peak(), of(ledger.held_at_peak(), MemoryKind::Rows)), (8, 8));
        drop(fourth);
        assert!(ledger.held().is_empty());
    }
}
