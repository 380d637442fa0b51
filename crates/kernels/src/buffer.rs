//! Host memory for tensors: zeroed, aligned to a cache line, never grown. Large buffers are mappings of their own, in huge
//! pages where the system has them: a product walks rows that are many pages apart.

use crate::backend::Length;
use half::{bf16, f16};
use isobit_numerics::cast;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a tensor element may be. Every type is plain bytes for which all bit patterns are valid.
pub trait Element: Copy + Default + Send + Sync + PartialEq + std::fmt::Debug + 'static {
    const NAME: &'static str;
    /// Bits in the low end, for comparison and printing.
    fn bits(self) -> u64;
    /// The value as float32, exactly; integers are not converted and give zero.
    fn to_f32(self) -> f32 {
        0.0
    }
}

macro_rules! element {
    ($type:ty, $name:literal, $self:ident => $bits:expr $(, $to_f32:expr)?) => {
        impl Element for $type {
            const NAME: &'static str = $name;
            fn bits($self) -> u64 {
                $bits
            }
            $(#[inline(always)]
            fn to_f32($self) -> f32 {
                $to_f32
            })?
        }
    };
}
element!(f32, "f32", self => u64::from(self.to_bits()), self);
element!(bf16, "bf16", self => u64::from(self.to_bits()), cast::bf16_to_f32(self.to_bits()));
element!(f16, "f16", self => u64::from(self.to_bits()), cast::f16_to_f32(self.to_bits()));
element!(u8, "u8", self => u64::from(self));
element!(i8, "i8", self => u64::from(self as u8));
element!(u32, "u32", self => u64::from(self));
element!(i32, "i32", self => u64::from(self as u32));

const ALIGNMENT: usize = 64;
const ALIGNMENT_NOT_ZERO: std::num::NonZero<usize> = std::num::NonZero::new(ALIGNMENT).expect("not zero");

/// Bytes from which a buffer is a mapping of its own.
const LARGE: usize = 4 << 20;

/// Bytes of all buffers of the process, now and at most. Nothing is decided by them: tests hold plans against them.
static HELD: AtomicUsize = AtomicUsize::new(0);
static HELD_MOST: AtomicUsize = AtomicUsize::new(0);

/// Bytes that buffers of this process hold.
pub fn held_bytes() -> usize {
    HELD.load(Ordering::Relaxed)
}

/// The most they held at once since [`forget_held_bytes_peak`].
pub fn held_bytes_peak() -> usize {
    HELD_MOST.load(Ordering::Relaxed)
}

/// The peak starts again from what is held.
pub fn forget_held_bytes_peak() {
    HELD_MOST.store(held_bytes(), Ordering::Relaxed);
}

/// What is thrown where the system has no memory for a buffer: ops and tapes hand out buffers, not results, and whoever
/// started the work decides what a lack of memory means. It unwinds without a word; `std::panic::catch_unwind` gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Of the buffer that could not be had.
    pub bytes: usize,
}

impl OutOfMemory {
    fn throw(bytes: usize) -> ! {
        std::panic::resume_unwind(Box::new(Self { bytes }))
    }
}

/// A fixed number of elements on a cache-line boundary.
pub struct Buffer<T: Element> {
    pointer: NonNull<T>,
    length: usize,
    /// The mapping of a large buffer; a small one is on the heap.
    mapping: Option<memmap2::MmapMut>,
}

// SAFETY: the buffer owns its memory and elements are plain data.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: as above; shared access is read-only.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    /// All bits zero. Where there is no memory for it, [`OutOfMemory`] is thrown.
    pub fn zeros(length: usize) -> Self {
        let bytes = length.saturating_mul(size_of::<T>());
        let Some(buffer) = Self::try_zeros(length) else { OutOfMemory::throw(bytes) };
        let held = HELD.fetch_add(bytes, Ordering::Relaxed) + bytes;
        HELD_MOST.fetch_max(held, Ordering::Relaxed);
        buffer
    }

    /// None where there is no memory for it.
    fn try_zeros(length: usize) -> Option<Self> {
        let layout = Self::layout(length)?;
        if layout.size() == 0 {
            // Aligned like any other buffer, never dereferenced.
            let pointer = NonNull::without_provenance(ALIGNMENT_NOT_ZERO);
            return Some(Self { pointer, length, mapping: None });
        }
        if layout.size() >= LARGE {
            return Self::mapped(length, layout);
        }
        // SAFETY: the size is not zero.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) }.cast::<T>())?;
        Some(Self { pointer, length, mapping: None })
    }

    fn mapped(length: usize, layout: Layout) -> Option<Self> {
        let mut mapping = memmap2::MmapMut::map_anon(layout.size()).ok()?;
        // Only a wish: without huge pages the buffer is the same, slower.
        #[cfg(target_os = "linux")]
        let _ = mapping.advise(memmap2::Advice::HugePage);
        let pointer = NonNull::new(mapping.as_mut_ptr().cast::<T>())?;
        Some(Self { pointer, length, mapping: Some(mapping) })
    }

    pub fn from_slice(values: &[T]) -> Self {
        let mut buffer = Self::zeros(values.len());
        buffer.copy_from_slice(values);
        buffer
    }

    /// None where the length is beyond the address space.
    fn layout(length: usize) -> Option<Layout> {
        Layout::array::<T>(length).and_then(|layout| layout.align_to(ALIGNMENT)).ok()
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        let Some(layout) = Self::layout(self.length) else { return };
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        if layout.size() != 0 && self.mapping.is_none() {
            // SAFETY: allocated in `zeros` with the same layout.
            unsafe { dealloc(self.pointer.as_ptr().cast(), layout) }
        }
    }
}

impl<T: Element> Length for Buffer<T> {
    fn len(&self) -> usize {
        self.length
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `length` elements were allocated and initialised.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.length) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.length) }
    }
}

impl<T: Element> Clone for Buffer<T> {
    fn clone(&self) -> Self {
        Self::from_slice(self)
    }
}

impl<T: Element> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer<{}>[{}]", T::NAME, self.length)
    }
}

/// The bytes of a workspace as zero-cost slices of other element types, handed out front to back on cache lines.
pub struct Workspace<'a> {
    rest: &'a mut [u8],
}

impl<'a> Workspace<'a> {
    pub fn new(bytes: &'a mut [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Bytes that `take::<T>(length)` uses up.
    pub const fn bytes<T>(length: usize) -> usize {
        (length * size_of::<T>()).div_ceil(ALIGNMENT) * ALIGNMENT
    }

    /// The next `length` elements. Their content is whatever was there.
    pub fn take<T: Element>(&mut self, length: usize) -> &'a mut [T] {
        let bytes = Self::bytes::<T>(length);
        let rest = std::mem::take(&mut self.rest);
        assert!(bytes <= rest.len(), "workspace too small: {bytes} bytes wanted, {} left", rest.len());
        let (head, tail) = rest.split_at_mut(bytes);
        self.rest = tail;
        assert_eq!(head.as_ptr().align_offset(align_of::<T>()), 0, "workspaces start on a cache line");
        // SAFETY: in bounds, aligned (asserted), unique, and every bit pattern is a valid `T`.
        unsafe { std::slice::from_raw_parts_mut(head.as_mut_ptr().cast::<T>(), length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_zero() {
        for length in [0, 1, 17, 1000, 3 << 20] {
            let buffer = Buffer::<f32>::zeros(length);
            assert_eq!(buffer.len(), length);
            assert!(buffer.iter().all(|x| x.to_bits() == 0));
            assert_eq!(buffer.as_ptr().align_offset(64), 0);
        }
    }

    #[test]
    fn memory_that_is_not_there_is_thrown_with_its_size() {
        let held = held_bytes();
        // Beyond every address space in elements, in bytes, and in what a system maps.
        for length in [usize::MAX, usize::MAX / 4, 1 << 52] {
            let thrown = std::panic::catch_unwind(|| Buffer::<f32>::zeros(length)).expect_err("no machine has this");
            let wanted = OutOfMemory { bytes: length.saturating_mul(4) };
            assert_eq!(thrown.downcast_ref::<OutOfMemory>(), Some(&wanted));
        }
        assert!(held_bytes() < held + (1 << 30), "what was refused is not held");
    }

    #[test]
    fn workspace_hands_out_disjoint_aligned_parts() {
        let mut bytes = Buffer::<u8>::zeros(Workspace::bytes::<f32>(3) + Workspace::bytes::<u32>(20));
        let mut workspace = Workspace::new(&mut bytes);
        let a = workspace.take::<f32>(3);
        let b = workspace.take::<u32>(20);
        a.fill(1.0);
        b.fill(7);
        assert!(a.iter().all(|x| *x == 1.0) && b.iter().all(|x| *x == 7));
    }
}
