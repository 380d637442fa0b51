//! Device memory as buffers of elements, and a workspace that is handed out in parts.

use super::device::Gpu;
use super::runtime::{Argument, Handle, Runtime};
use crate::backend::{DeviceFailure, Length};
use crate::buffer::{self, Element};
use crate::heap::Lifetime;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A fixed number of elements on the device. After a device failure it may have no memory; nothing
/// accesses it then.
pub struct GpuBuffer<T: Element> {
    memory: Rc<Memory>,
    length: usize,
    element: PhantomData<T>,
}

/// Device memory, freed with its last owner.
struct Memory {
    runtime: Rc<dyn Runtime>,
    handle: Option<Handle>,
    /// None of a table.
    bytes: usize,
    usage: Rc<Usage>,
}

/// Current and peak memory of all buffers of a device, and the most they may take.
#[derive(Default)]
pub(super) struct Usage {
    live: Cell<usize>,
    peak: Cell<usize>,
    limit: RefCell<Option<Arc<MemoryLimit>>>,
}

/// The most memory that buffers of a card may take. A card that is opened several times, each time
/// on a thread of its own, has one limit for all.
#[derive(Debug)]
pub struct MemoryLimit {
    bytes: usize,
    held: AtomicUsize,
}

impl MemoryLimit {
    pub fn new(bytes: u64) -> Self {
        Self { bytes: usize::try_from(bytes).unwrap_or(usize::MAX), held: AtomicUsize::new(0) }
    }

    /// Counts `bytes` more, or says how many are held if that is too much.
    fn take(&self, bytes: usize) -> Result<(), usize> {
        let more = |held: usize| held.checked_add(bytes).filter(|all| *all <= self.bytes);
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map(|_| ())
    }

    fn give_back(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The panic payload when a buffer would exceed the limit on a device's memory, as
/// [`buffer::OutOfMemory`] is for the host's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverLimit {
    pub device: String,
    /// Size of the buffer that was not allocated.
    pub bytes: usize,
    /// Bytes of the other buffers.
    pub held: usize,
    pub limit: usize,
}

impl Usage {
    /// Counts a buffer that was allocated after `take`.
    fn add(&self, bytes: usize) {
        self.live.set(self.live.get() + bytes);
        self.peak.set(self.peak.get().max(self.live.get()));
    }

    fn remove(&self, bytes: usize) {
        self.live.set(self.live.get() - bytes);
        self.give_back(bytes);
    }

    pub(super) fn peak_bytes(&self) -> usize {
        self.peak.get()
    }

    /// Buffers that are there already count.
    pub(super) fn set_limit(&self, limit: &Arc<MemoryLimit>) {
        limit.held.fetch_add(self.live.get(), Ordering::Relaxed);
        if let Some(before) = self.limit.replace(Some(Arc::clone(limit))) {
            before.give_back(self.live.get());
        }
    }

    /// Takes `bytes` off the limit. Panics with [`OverLimit`] if they are too much.
    fn take(&self, bytes: usize, device: &str) {
        if let Some(limit) = &*self.limit.borrow()
            && let Err(held) = limit.take(bytes)
        {
            let (device, limit) = (device.to_string(), limit.bytes);
            std::panic::resume_unwind(Box::new(OverLimit { device, bytes, held, limit }));
        }
    }

    fn give_back(&self, bytes: usize) {
        if let Some(limit) = &*self.limit.borrow() {
            limit.give_back(bytes);
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(handle) = self.handle {
            self.usage.remove(self.bytes);
            self.runtime.release(handle);
        }
    }
}

impl<T: Element> GpuBuffer<T> {
    /// Uninitialised.
    pub(super) fn new(gpu: &Gpu, length: usize) -> Self {
        Self::allocated(gpu, length, Lifetime::Other, true)
    }

    /// Uninitialised, for a table: it counts neither in the peak nor against a limit, as it does
    /// not in plans. [`Tables`] bounds what tables take.
    pub(super) fn table(gpu: &Gpu, length: usize) -> Self {
        Self::allocated(gpu, length, Lifetime::Other, false)
    }

    /// Uninitialised, for what stays through the micro-batches of an update.
    pub(super) fn lasting(gpu: &Gpu, length: usize) -> Self {
        Self::allocated(gpu, length, Lifetime::Update, true)
    }

    fn allocated(gpu: &Gpu, length: usize, lifetime: Lifetime, is_counted: bool) -> Self {
        let bytes = length.checked_mul(size_of::<T>());
        let counted = bytes.filter(|_| is_counted).map_or(0, allocated_bytes);
        gpu.device.usage.take(counted, gpu.device.runtime.name());
        let handle = match bytes {
            Some(bytes) => gpu.device.attempt(|runtime| {
                let allocated = runtime.allocate(allocated_bytes(bytes), lifetime);
                allocated.map_err(|what| format!("{}: {what}", DeviceFailure::NO_MEMORY))
            }),
            None => gpu
                .device
                .attempt(|_| Err(format!("{}: {length} elements are more than any memory", DeviceFailure::NO_MEMORY))),
        };
        if handle.is_some() {
            gpu.device.usage.add(counted);
        } else {
            gpu.device.usage.give_back(counted);
        }
        let usage = Rc::clone(&gpu.device.usage);
        let memory = Memory { runtime: Rc::clone(&gpu.device.runtime), handle, bytes: counted, usage };
        Self { memory: Rc::new(memory), length, element: PhantomData }
    }

    /// The same memory again, read-only.
    fn shared(&self) -> Self {
        Self { memory: Rc::clone(&self.memory), length: self.length, element: PhantomData }
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    pub(super) fn bytes(&self) -> usize {
        self.length * size_of::<T>()
    }

    pub(super) fn handle(&self) -> Option<Handle> {
        self.memory.handle
    }
}

impl<T: Element> Length for GpuBuffer<T> {
    fn len(&self) -> usize {
        self.length
    }
}

/// Small tables that ops read, cached by content: every layer of a step needs the same ones, and an
/// upload waits for the device.
#[derive(Default)]
pub(super) struct Tables {
    known: BTreeMap<Vec<u32>, GpuBuffer<u32>>,
    bytes: usize,
}

impl Tables {
    /// BOUND: when this is exceeded, the cache is cleared; tables in use live on with their users.
    const BYTES_MAX: usize = 16 << 20;

    pub(super) fn find(&self, content: &[u32]) -> Option<GpuBuffer<u32>> {
        self.known.get(content).map(GpuBuffer::shared)
    }

    pub(super) fn keep(&mut self, content: Vec<u32>, table: &GpuBuffer<u32>) {
        if self.bytes + table.bytes() > Self::BYTES_MAX {
            *self = Self::default();
        }
        self.bytes += table.bytes();
        self.known.insert(content, table.shared());
    }
}

/// A read that a runtime has begun; dropping it releases it.
pub(crate) struct PendingRead {
    runtime: Rc<dyn Runtime>,
    number: usize,
}

impl PendingRead {
    pub(super) fn new(runtime: &Rc<dyn Runtime>, number: usize) -> Self {
        Self { runtime: Rc::clone(runtime), number }
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }
}

impl Drop for PendingRead {
    fn drop(&mut self) {
        self.runtime.release_read(self.number);
    }
}

impl<T: Element> std::fmt::Debug for GpuBuffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuBuffer<{}>[{}]", T::NAME, self.length)
    }
}

/// Bytes to allocate for a buffer of `bytes`: drivers do not allow empty allocations.
pub(super) fn allocated_bytes(bytes: usize) -> usize {
    bytes.max(1)
}

/// An address in device memory: a whole buffer or a part of a workspace.
#[derive(Clone, Copy, Debug)]
pub(super) struct DevicePointer {
    /// None after a device failure: nothing is launched any more.
    handle: Option<Handle>,
    offset: usize,
}

impl From<DevicePointer> for Argument {
    fn from(pointer: DevicePointer) -> Self {
        Self::Memory(pointer.handle.unwrap_or(Handle(0)), pointer.offset)
    }
}

impl DevicePointer {
    /// The address of element `start` on. For devices that accept any address; OpenCL's parts are
    /// aligned.
    pub(super) fn at<T: Element>(&self, start: usize) -> Argument {
        Self { offset: self.offset + start * size_of::<T>(), ..*self }.into()
    }

    pub(super) fn handle(&self) -> Option<Handle> {
        self.handle
    }

    /// The address itself, on devices with one address space.
    pub(super) fn address(self) -> u64 {
        self.handle.map_or(0, |handle| handle.0 + self.offset as u64)
    }

    pub(super) fn offset(&self) -> usize {
        self.offset
    }
}

impl<T: Element> From<&GpuBuffer<T>> for DevicePointer {
    fn from(buffer: &GpuBuffer<T>) -> Self {
        Self { handle: buffer.memory.handle, offset: 0 }
    }
}

impl<T: Element> From<&GpuBuffer<T>> for Argument {
    fn from(buffer: &GpuBuffer<T>) -> Self {
        DevicePointer::from(buffer).into()
    }
}

impl<T: Element> From<&mut GpuBuffer<T>> for Argument {
    fn from(buffer: &mut GpuBuffer<T>) -> Self {
        DevicePointer::from(&*buffer).into()
    }
}

impl From<u32> for Argument {
    fn from(x: u32) -> Self {
        Self::U32(x)
    }
}

/// Lengths and offsets are 64-bit in kernels.
impl From<usize> for Argument {
    fn from(x: usize) -> Self {
        Self::U64(x as u64)
    }
}

impl From<f32> for Argument {
    fn from(x: f32) -> Self {
        Self::F32(x)
    }
}

/// Hands out a workspace front to back, each part aligned as the device requires.
pub(super) struct Parts {
    handle: Option<Handle>,
    alignment: usize,
    next: usize,
    end: usize,
}

impl Parts {
    pub(super) fn new(gpu: &Gpu, workspace: &mut GpuBuffer<u8>) -> Self {
        Self { handle: workspace.memory.handle, alignment: gpu.alignment(), next: 0, end: workspace.length }
    }

    /// The next `length` elements, with unspecified contents.
    pub(super) fn take<T: Element>(&mut self, length: usize) -> DevicePointer {
        let place = DevicePointer { handle: self.handle, offset: self.next };
        // Neither number is above `isize::MAX`: the sum does not wrap.
        self.next += part_bytes::<T>(length, self.alignment);
        assert!(self.next <= self.end, "workspace too small: {} bytes wanted, {} there", self.next, self.end);
        place
    }
}

/// Bytes that `take::<T>(length)` uses: at least one alignment unit, so that no two parts share an
/// offset.
pub(super) fn part_bytes<T>(length: usize, alignment: usize) -> usize {
    buffer::part_bytes::<T>(length, alignment).max(alignment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Device;
    use crate::gpu::{Api, Selector};

    /// Two openings of one card share its limit, and what one frees the other may take.
    #[test]
    fn a_limit_is_one_for_all_who_share_it() {
        let limit = Arc::new(MemoryLimit::new(100));
        let [first, second] = [Usage::default(), Usage::default()];
        first.add(10);
        first.set_limit(&limit);
        second.set_limit(&limit);
        let take = |usage: &Usage, bytes: usize| {
            let taken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| usage.take(bytes, "card")));
            let taken = taken.map(|()| usage.add(bytes));
            taken.map_err(|thrown| thrown.downcast_ref::<OverLimit>().map(|over| (over.held, over.limit)))
        };
        assert_eq!(take(&first, 40), Ok(()));
        assert_eq!(take(&second, 51), Err(Some((50, 100))));
        assert_eq!(take(&second, 50), Ok(()));
        assert_eq!(take(&first, 1), Err(Some((100, 100))));
        second.remove(50);
        assert_eq!(take(&first, 50), Ok(()));
        assert_eq!(take(&second, usize::MAX), Err(Some((100, 100))));
        assert_eq!([&first, &second].map(Usage::peak_bytes), [100, 50]);
    }

    /// An absent device refuses every allocation.
    #[test]
    fn memory_that_a_device_does_not_have_is_told_as_such() {
        for length in [4, usize::MAX] {
            let gpu = Gpu::absent(Selector { api: Api::OpenCl, index: 0 }, None);
            drop(gpu.unwritten::<f32>(length));
            let failure = gpu.finish().expect_err("nothing is there");
            assert!(failure.is_out_of_memory(), "{failure}");
        }
        let other = DeviceFailure { device: String::new(), what: "lost".to_string() };
        assert!(!other.is_out_of_memory());
    }
}
