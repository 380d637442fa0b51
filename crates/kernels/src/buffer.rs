//! Host memory for tensors: zeroed, aligned to a cache line, never grown. Each large buffer is a
//! separate mapping, in huge pages where the system has them: a product walks rows that are many
//! pages apart.

use crate::backend::Length;
use half::{bf16, f16};
use isobit_numerics::cast;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A type of tensor element.
///
/// # Safety
/// Elements are viewed as bytes to be digested and sent to devices, and bytes of a workspace or of
/// a device are viewed as elements. So the type has no padding, every bit pattern is a valid value,
/// and its alignment is at most that of a cache line (64 bytes).
pub unsafe trait Element: Copy + Default + Send + Sync + PartialEq + std::fmt::Debug + 'static {
    const NAME: &'static str;
    /// The value's bits, in the low bits of the result, for comparison and printing.
    fn bits(self) -> u64;
    /// The value as float32, exactly; integers are not converted and give zero.
    fn to_f32(self) -> f32 {
        0.0
    }
}

macro_rules! element {
    ($type:ty, $name:literal, $self:ident => $bits:expr $(, $to_f32:expr)?) => {
        // SAFETY: a number of one, two or four bytes: no padding, no invalid patterns, aligned to
        // its size (`half`'s types are transparent wrappers of `u16`).
        unsafe impl Element for $type {
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

/// The elements that little-endian bytes, such as those of a file, hold, without copying them. None
/// if they are not aligned, are no whole number of elements, or the machine is big-endian.
pub fn elements_of<T: Element>(bytes: &[u8]) -> Option<&[T]> {
    if cfg!(target_endian = "big") {
        return None;
    }
    // SAFETY: any bytes are valid elements (`Element`).
    let (before, elements, after) = unsafe { bytes.align_to::<T>() };
    (before.is_empty() && after.is_empty()).then_some(elements)
}

/// Elements as they lie in memory.
pub fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: elements are plain bytes without padding (`Element`); length and lifetime are those
    // of the slice.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast::<u8>(), size_of_val(elements)) }
}

/// An empty vector with room for `length` elements. A large one is in huge pages where the system
/// has them: filling fresh memory otherwise costs several times as much as copying it.
pub fn room<T: Element>(length: usize) -> Vec<T> {
    let room = Vec::with_capacity(length);
    prefer_huge_pages(&room);
    room
}

/// [`room`], or None if there is no memory for it.
pub fn try_room<T: Element>(length: usize) -> Option<Vec<T>> {
    let mut room = Vec::new();
    room.try_reserve_exact(length).ok()?;
    prefer_huge_pages(&room);
    Some(room)
}

/// A copy in a vector of its own.
pub fn copied<T: Element>(elements: &[T]) -> Vec<T> {
    let mut copy = room(elements.len());
    copy.extend_from_slice(elements);
    copy
}

/// Only advice: without huge pages the memory works the same, but slower.
fn prefer_huge_pages<T: Element>(room: &Vec<T>) {
    #[cfg(target_os = "linux")]
    if room.capacity() * size_of::<T>() >= LARGE {
        const PAGE: usize = 4096;
        let start = room.as_ptr().addr().next_multiple_of(PAGE);
        let end = (room.as_ptr().addr() + room.capacity() * size_of::<T>()) / PAGE * PAGE;
        // SAFETY: whole pages inside memory of this process; the advice changes no content.
        unsafe { libc::madvise(std::ptr::without_provenance_mut(start), end - start, libc::MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = room;
}

const ALIGNMENT: usize = 64;
const ALIGNMENT_NOT_ZERO: std::num::NonZero<usize> = std::num::NonZero::new(ALIGNMENT).expect("not zero");

/// Buffers of at least this many bytes get their own mapping.
const LARGE: usize = 4 << 20;

/// Bytes of all buffers of the process, current and peak. No decision depends on them; tests
/// compare plans with them.
static HELD: AtomicUsize = AtomicUsize::new(0);
static HELD_MAX: AtomicUsize = AtomicUsize::new(0);

/// Bytes currently held by buffers of this process.
pub fn held_bytes() -> usize {
    HELD.load(Ordering::Relaxed)
}

/// Peak bytes held since [`forget_held_bytes_peak`].
pub fn held_bytes_peak() -> usize {
    HELD_MAX.load(Ordering::Relaxed)
}

/// Resets the peak to the bytes held now.
pub fn forget_held_bytes_peak() {
    HELD_MAX.store(held_bytes(), Ordering::Relaxed);
}

/// The panic payload when the system has no memory for a buffer: ops and tapes return buffers, not
/// results, and the caller that started the work decides how to handle it. It unwinds without a
/// message; catch it with `std::panic::catch_unwind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Size of the buffer that could not be allocated.
    pub bytes: usize,
}

impl OutOfMemory {
    fn throw(bytes: usize) -> ! {
        std::panic::resume_unwind(Box::new(Self { bytes }))
    }
}

/// Pages that are locked in memory for a device: it copies from and to them while the host goes on.
/// Dropping it waits for the copies and unlocks the pages.
pub trait PageLock: Send + Sync {
    /// A copy has begun.
    fn begin(&self);
    /// Waits for the copies that have begun.
    fn wait(&self);
}

/// A fixed number of elements on a cache-line boundary.
pub struct Buffer<T: Element> {
    pointer: NonNull<T>,
    length: usize,
    /// None inside if no device can lock the pages.
    lock: OnceLock<Option<Box<dyn PageLock>>>,
    /// The mapping of a large buffer, or of one whose pages a device may lock; others are on the
    /// heap.
    mapping: Option<memmap2::MmapMut>,
}

// SAFETY: the buffer owns its memory, and elements are `Send`; the heap and mappings belong to no
// thread.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: a shared reference gives shared references to elements only, which are `Sync`.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    /// All bits zero. Panics with [`OutOfMemory`] if there is no memory for it.
    pub fn zeros(length: usize) -> Self {
        Self::counted(length, Self::try_zeros(length, LARGE))
    }

    /// As [`Buffer::zeros`], in pages of its own, which a device may lock.
    pub(crate) fn paged(length: usize) -> Self {
        Self::counted(length, Self::try_zeros(length, 0))
    }

    fn counted(length: usize, buffer: Option<Self>) -> Self {
        let bytes = length.saturating_mul(size_of::<T>());
        let Some(buffer) = buffer else { OutOfMemory::throw(bytes) };
        let held = HELD.fetch_add(bytes, Ordering::Relaxed) + bytes;
        HELD_MAX.fetch_max(held, Ordering::Relaxed);
        buffer
    }

    /// In a mapping from `large` bytes on. None if there is no memory for it.
    fn try_zeros(length: usize, large: usize) -> Option<Self> {
        let layout = Self::layout(length)?;
        if layout.size() == 0 {
            // Aligned like any other buffer, never dereferenced.
            let pointer = NonNull::without_provenance(ALIGNMENT_NOT_ZERO);
            return Some(Self { pointer, length, lock: OnceLock::new(), mapping: None });
        }
        if layout.size() >= large {
            return Self::mapped(length, layout);
        }
        // SAFETY: the size of the layout is not zero, as was just checked.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) }.cast::<T>())?;
        Some(Self { pointer, length, lock: OnceLock::new(), mapping: None })
    }

    /// The pages, locked by `lock` (address and bytes) if nobody has tried before. The caller tells
    /// the lock of every copy before it begins, and begins none that writes without owning `self`.
    /// None if they cannot be locked.
    pub(crate) fn locked(
        &self,
        lock: impl FnOnce(*mut u8, usize) -> Option<Box<dyn PageLock>>,
    ) -> Option<(&dyn PageLock, *mut u8)> {
        let mapping = self.mapping.as_ref()?;
        let pointer = self.pointer.as_ptr().cast::<u8>();
        let lock = self.lock.get_or_init(|| lock(pointer, mapping.len())).as_ref()?;
        Some((&**lock, pointer))
    }

    /// Waits until no device copies from or to the buffer.
    fn wait(&self) {
        if let Some(Some(lock)) = self.lock.get() {
            lock.wait();
        }
    }

    fn mapped(length: usize, layout: Layout) -> Option<Self> {
        let mut mapping = memmap2::MmapMut::map_anon(layout.size()).ok()?;
        // Only advice: without huge pages the buffer works the same, but slower.
        #[cfg(target_os = "linux")]
        let _ = mapping.advise(memmap2::Advice::HugePage);
        let pointer = NonNull::new(mapping.as_mut_ptr().cast::<T>())?;
        Some(Self { pointer, length, lock: OnceLock::new(), mapping: Some(mapping) })
    }

    pub fn from_slice(values: &[T]) -> Self {
        let mut buffer = Self::zeros(values.len());
        buffer.copy_from_slice(values);
        buffer
    }

    /// None if the length exceeds the address space.
    fn layout(length: usize) -> Option<Layout> {
        Layout::array::<T>(length).and_then(|layout| layout.align_to(ALIGNMENT)).ok()
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        let Some(layout) = Self::layout(self.length) else { return };
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // Before the memory goes.
        drop(self.lock.take());
        if layout.size() != 0 && self.mapping.is_none() {
            // SAFETY: a small buffer that is not empty was allocated in `try_zeros`, with the
            // layout of the same length, and is given back here alone.
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
        self.wait();
        // SAFETY: `length` elements lie at the pointer, aligned and set to zero when they were made
        // (a valid value), and live as long as `self`; an empty buffer has an aligned pointer that
        // is not null. The mapping of a large one does not move when its handle does.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.length) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.wait();
        // SAFETY: `length` valid elements lie at the pointer for as long as `self` lives, aligned,
        // and the borrow of `self`, which owns them, is exclusive.
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

/// `buffer` with the numbers that `make` produces.
pub(crate) fn made<T: Element, H: AsRef<[T]>, E>(
    mut buffer: Buffer<T>,
    make: impl FnOnce() -> Result<H, E>,
) -> Result<Buffer<T>, E> {
    let numbers = make()?;
    assert_eq!(numbers.as_ref().len(), buffer.len(), "as many numbers as were announced");
    buffer.copy_from_slice(numbers.as_ref());
    Ok(buffer)
}

/// A workspace's bytes, handed out front to back as cache-line-aligned slices of any element type,
/// without copying.
pub struct Workspace<'a> {
    rest: &'a mut [u8],
}

impl<'a> Workspace<'a> {
    pub fn new(bytes: &'a mut [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Bytes that `take::<T>(length)` uses. Panics with [`OutOfMemory`] if they exceed the address
    /// space.
    pub fn bytes<T>(length: usize) -> usize {
        part_bytes::<T>(length, ALIGNMENT)
    }

    /// The next `length` elements. Their contents are arbitrary.
    pub fn take<T: Element>(&mut self, length: usize) -> &'a mut [T] {
        let bytes = Self::bytes::<T>(length);
        let rest = std::mem::take(&mut self.rest);
        assert!(bytes <= rest.len(), "workspace too small: {bytes} bytes wanted, {} left", rest.len());
        let (head, tail) = rest.split_at_mut(bytes);
        self.rest = tail;
        assert_eq!(head.as_ptr().align_offset(align_of::<T>()), 0, "workspaces start on a cache line");
        // SAFETY: `bytes`, which did not wrap, is at least the size of `length` elements, and as
        // many bytes were split off, borrowed exclusively for `'a`; they are aligned (asserted).
        // Any bytes are valid elements, and elements leave no byte undefined (`Element`).
        unsafe { std::slice::from_raw_parts_mut(head.as_mut_ptr().cast::<T>(), length) }
    }
}

/// Bytes of `length` elements, rounded up to `alignment`. Panics with [`OutOfMemory`] if they
/// exceed the address space, so a size never wraps.
pub(crate) fn part_bytes<T>(length: usize, alignment: usize) -> usize {
    let bytes = length.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_next_multiple_of(alignment));
    match bytes {
        Some(bytes) if isize::try_from(bytes).is_ok() => bytes,
        _ => OutOfMemory::throw(usize::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_bytes_are_elements() {
        let bytes = Buffer::<u8>::from_slice(&[0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0, 1]);
        assert_eq!(elements_of::<f32>(&bytes[..8]), Some([1.0, -2.0].as_slice()));
        assert_eq!(elements_of::<u32>(&bytes[..0]), Some([].as_slice()));
        assert_eq!(elements_of::<f32>(&bytes[1..9]), None, "not aligned");
        assert_eq!(elements_of::<f32>(&bytes[..7]), None, "not whole");
    }

    #[test]
    fn a_workspace_size_that_would_wrap_is_thrown() {
        assert_eq!(Workspace::bytes::<f32>(17), 128);
        // At four bytes each these wrap to 0, wrap to 64, and exceed the maximum size of a slice.
        for length in [1 << 62, (1 << 62) + 16, usize::MAX, 1 << 61] {
            let thrown = std::panic::catch_unwind(|| Workspace::bytes::<f32>(length)).expect_err("beyond memory");
            assert_eq!(thrown.downcast_ref::<OutOfMemory>(), Some(&OutOfMemory { bytes: usize::MAX }));
            let mut bytes = Buffer::<u8>::zeros(64);
            let taken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                Workspace::new(&mut bytes).take::<f32>(length).len()
            }));
            assert!(taken.is_err(), "{length} elements out of 64 bytes");
        }
    }

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
        // Too large in elements, in bytes, and for any system's mappings.
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
