//! Copies between host memory and the device for which the host does not wait, where the runtime
//! can lock pages; elsewhere plain ones.

use super::device::Gpu;
use super::memory::GpuBuffer;
use super::runtime::{Handle, LockedCopy, PageLock};
use crate::backend::{Arriving, DeviceFailure, Length};
use crate::buffer::{Buffer, Element};
use crate::float_state;
use crate::parcel::Parcel;
use std::sync::atomic::{AtomicBool, Ordering};

/// Pages of the host that a device's runtime knows; dropped after the copies, it forgets them.
pub(super) trait Pages: Send + Sync {
    /// Waits for all copies of the device.
    fn finish_copies(&self);
}

/// The lock on pages: remembers whether there is something to wait for.
pub(super) struct LockedPages<P: Pages> {
    pages: P,
    copying: AtomicBool,
}

impl<P: Pages + 'static> LockedPages<P> {
    pub(super) fn boxed(pages: P) -> Box<dyn PageLock> {
        Box::new(Self { pages, copying: AtomicBool::new(false) })
    }
}

impl<P: Pages> PageLock for LockedPages<P> {
    fn begin(&self) {
        self.copying.store(true, Ordering::Release);
    }

    fn wait(&self) {
        if self.copying.load(Ordering::Acquire) {
            self.pages.finish_copies();
            self.copying.store(false, Ordering::Release);
        }
    }
}

impl<P: Pages> Drop for LockedPages<P> {
    fn drop(&mut self) {
        self.wait();
    }
}

impl Gpu {
    /// Begins a copy if the runtime can lock the host's pages; says whether it can.
    fn copy_locked<T: Element>(
        &self,
        host: &Buffer<T>,
        device: &GpuBuffer<T>,
        copy: impl FnOnce(*mut u8, Handle) -> LockedCopy,
    ) -> bool {
        assert_eq!(device.len(), host.len(), "as many numbers as the buffer has");
        let Some(handle) = device.handle() else { return false };
        // SAFETY: the pages are the buffer's, which drops the lock before them.
        let lock = |pages, bytes| unsafe { self.device.runtime.lock_pages(pages, bytes) };
        let Some((lock, pages)) = host.locked(lock) else { return false };
        lock.begin();
        // SAFETY: locked above, and the buffer waits for the copy before it hands out its elements;
        // only `save` writes, which has the buffer for itself.
        self.device.attempt(|runtime| unsafe { runtime.copy_locked(copy(pages, handle), device.bytes()) });
        true
    }

    /// Copies to the host.
    pub(super) fn save_to<T: Element>(&self, host: &mut Buffer<T>, device: &GpuBuffer<T>) -> Result<(), DeviceFailure> {
        if self.copy_locked(host, device, LockedCopy::ToHost) {
            self.device.check()
        } else {
            self.read_into(host, device)
        }
    }

    /// Copies to the device.
    pub(super) fn load_from<T: Element>(&self, device: &mut GpuBuffer<T>, host: &Buffer<T>) {
        if !self.copy_locked(host, device, |pages, handle| LockedCopy::ToDevice(pages.cast_const(), handle)) {
            self.write(device, host);
        }
    }

    /// Copies to new memory on the device, beside the kernels that follow.
    pub(super) fn load_ahead<T: Element>(&self, host: &Buffer<T>) -> Arriving<GpuBuffer<T>> {
        let mut device = GpuBuffer::new(self, host.len());
        if !self.copy_locked(host, &device, |pages, handle| LockedCopy::Ahead(pages.cast_const(), handle)) {
            self.write(&mut device, host);
        }
        Arriving::new(device)
    }

    /// Begins a copy between memory and a parcel, whose pages are locked once for all devices of a
    /// runtime; false if they cannot be locked. Locked by another runtime they are ordinary pages
    /// to this one, and its copy may wait.
    fn copy_parcel(
        &self,
        parcel: &mut Parcel,
        device: &GpuBuffer<f32>,
        copy: impl FnOnce(*mut u8, Handle) -> LockedCopy,
    ) -> Result<bool, DeviceFailure> {
        assert_eq!(device.len(), parcel.len(), "as many numbers as the parcel has");
        self.device.check()?;
        let Some(handle) = device.handle() else { return Ok(false) };
        // SAFETY: the pages are the parcel's, which drops the lock before them.
        let lock = |pages, bytes| unsafe { self.device.runtime.lock_pages(pages, bytes) };
        let Some((_, pages)) = parcel.memory()?.locked(lock) else { return Ok(false) };
        // SAFETY: the pages are locked and have room for as many bytes. The parcel is borrowed
        // exclusively, and waits for the mark before it hands out its numbers or is dropped.
        let begun = self.device.attempt(|runtime| unsafe { runtime.copy_locked(copy(pages, handle), device.bytes()) });
        let marked = begun.and_then(|()| self.device.attempt(|runtime| runtime.mark())).flatten();
        if let Some(mark) = marked {
            parcel.set_copying(mark, self.device.runtime.name());
        } else {
            // Without a mark the copy is over when everything is, also if it failed.
            let finished = self.device.runtime.finish();
            float_state::restore();
            self.device.attempt(|_| finished);
        }
        Ok(true)
    }

    /// Copies to a parcel.
    pub(super) fn copy_to_parcel(&self, parcel: &mut Parcel, device: &GpuBuffer<f32>) -> Result<(), DeviceFailure> {
        if self.copy_parcel(parcel, device, LockedCopy::ToHost)? {
            self.device.check()
        } else {
            self.read_into(parcel.numbers_mut()?, device)
        }
    }

    /// Copies from a parcel.
    pub(super) fn copy_from_parcel(
        &self,
        device: &mut GpuBuffer<f32>,
        parcel: &mut Parcel,
    ) -> Result<(), DeviceFailure> {
        let copy = |pages: *mut u8, handle| LockedCopy::ToDevice(pages.cast_const(), handle);
        if !self.copy_parcel(parcel, device, copy)? {
            self.write(device, parcel.numbers()?);
        }
        Ok(())
    }

    pub(super) fn wait_for<T: Element>(&self, arriving: Arriving<GpuBuffer<T>>) -> GpuBuffer<T> {
        let device = arriving.into_inner();
        self.come_after_copy(&device);
        device
    }

    /// Kernels from now on come after the copy to this memory that [`Gpu::load_ahead`] has begun.
    pub(super) fn come_after_copy<T: Element>(&self, device: &GpuBuffer<T>) {
        if let Some(handle) = device.handle() {
            self.device.attempt(|runtime| runtime.arrive(handle));
        }
    }
}
