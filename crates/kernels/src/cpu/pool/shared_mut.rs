//! A mutable slice whose disjoint parts are written by several threads: most unsafe memory access
//! of the CPU backend goes through it.
//!
//! Bounds are always checked here. The caller promises that no two parts overlap; this holds
//! because every thread takes only what its worker number, a share or a handed-out index
//! (`ranges.rs`) makes its own.

use std::marker::PhantomData;
use std::ops::Range;

/// Made of an exclusive borrow, which it holds for `'a`: while it exists, the elements are reached
/// through it alone.
pub struct SharedMut<'a, T> {
    pointer: *mut T,
    length: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: a shared reference to it lets a thread read and write elements that were made on another
// one (`slice`), which is sending them: `T: Send`. It gives no two threads the same element, by the
// promise of `slice`, so `T: Sync` is not needed.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}
// SAFETY: it stands for the `&mut [T]` that it was made of, which is `Send` where `T` is.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { pointer: slice.as_mut_ptr(), length: slice.len(), owner: PhantomData }
    }

    /// The address of the first element. It may be used for every element; the user keeps the
    /// promise of [`Self::slice`] for the elements it touches.
    pub fn pointer(&self) -> *mut T {
        self.pointer
    }

    /// The address of the first element of `range`, which is checked to be inside. Several threads
    /// may have the address of one range and touch elements of it that are their own, which they
    /// could not through a slice of the whole.
    pub fn pointer_to(&self, range: Range<usize>) -> *mut T {
        self.check(&range);
        self.pointer.wrapping_add(range.start)
    }

    /// Prefetches the cache line of an element.
    #[inline(always)]
    pub fn prefetch(&self, index: usize) {
        crate::cpu::path::prefetch(self.pointer.wrapping_add(index));
    }

    /// The elements of `range`, which is checked to be inside.
    ///
    /// # Safety
    /// From this call to the last use of the result, nobody reads or writes an element of `range`
    /// in another way: no other thread, and not this one through another slice or address. Threads
    /// that had the elements before are ordered before this call (a job's start, its end, or a
    /// lock).
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        self.check(&range);
        // SAFETY: inside the slice that was borrowed for `'a`, which outlives `self`; nobody else
        // uses these elements, by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(range.start), range.len()) }
    }

    fn check(&self, range: &Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.length, "part within the whole");
    }
}
