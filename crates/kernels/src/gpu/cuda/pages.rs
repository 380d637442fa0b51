//! Pages of the host that are locked for a card, and the second stream, on which copies from them
//! run beside the kernels.

use super::context::Context;
use super::{Driver, Object, STREAM};
use crate::gpu::host_copies::{LockedPages, Pages};
use crate::gpu::runtime::{Answer, Handle, PageLock};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

/// Pages that are registered with a context.
struct Registered {
    driver: Arc<Driver>,
    context: Arc<Context>,
    host: *mut c_void,
}

// SAFETY: the address is only passed to the driver, whose functions may be called from any thread.
unsafe impl Send for Registered {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Registered {}

/// None if the driver refuses.
///
/// # Safety
/// The context is current. The pages stay where they are until the lock is dropped.
pub(super) unsafe fn lock(
    driver: &Arc<Driver>,
    context: &Arc<Context>,
    host: *mut u8,
    bytes: usize,
) -> Option<Box<dyn PageLock>> {
    /// For all contexts: two cards exchange parcels.
    const PORTABLE: u32 = 1;
    let host = host.cast::<c_void>();
    // SAFETY: mapped memory of this process, which stays (the caller's promise).
    let status = unsafe { (driver.lock_pages)(host, bytes, PORTABLE) };
    let registered = || Registered { driver: Arc::clone(driver), context: Arc::clone(context), host };
    (status == 0).then(|| LockedPages::boxed(registered()))
}

impl Pages for Registered {
    fn finish_copies(&self) {
        // A failure of the card shows at its next call; without it nothing is copied.
        if self.context.set_current() == 0 {
            // SAFETY: takes nothing; waits for the commands of this context.
            unsafe { (self.driver.synchronize)() };
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if self.context.set_current() == 0 {
            // SAFETY: registered in `lock`, and unregistered here alone, after the copies.
            unsafe { (self.driver.unlock_pages)(self.host) };
        }
    }
}

/// Copies to the device on a stream of their own.
#[derive(Default)]
pub(super) struct Ahead {
    /// Made with the first copy.
    stream: Option<Object>,
    /// Recorded after the copy to each memory that no command has waited for.
    arriving: BTreeMap<u64, Object>,
    events: Vec<Object>,
}

impl Ahead {
    /// Begins a copy after all commands so far.
    ///
    /// # Safety
    /// The context of the driver's objects is current. `memory` is of this context and has `bytes`
    /// bytes, and so have the locked pages at `host`, which nobody writes to until the copy is
    /// done.
    pub(super) unsafe fn copy(&mut self, driver: &Driver, host: *const u8, memory: Handle, bytes: usize) -> Answer<()> {
        let stream = self.stream(driver)?;
        let [before, after] = [self.event(driver)?, self.event(driver)?];
        // SAFETY: events and streams of this context; the memory is as the caller promises.
        unsafe {
            driver.check("cuEventRecord", (driver.record_event)(before, STREAM))?;
            driver.check("cuStreamWaitEvent", (driver.wait_in_stream)(stream, before, 0))?;
            driver.check("cuMemcpyHtoDAsync", (driver.to_device)(memory.0, host.cast(), bytes, stream))?;
            driver.check("cuEventRecord", (driver.record_event)(after, stream))?;
        }
        // The wait has taken what it needs of the event.
        self.events.push(before);
        self.arriving.insert(memory.0, after);
        Ok(())
    }

    /// Commands from now on come after the copy to this memory, if one is under way.
    ///
    /// # Safety
    /// The context of the driver's objects is current.
    pub(super) unsafe fn arrive(&mut self, driver: &Driver, memory: Handle) -> Answer<()> {
        let Some(event) = self.arriving.remove(&memory.0) else { return Ok(()) };
        self.events.push(event);
        // SAFETY: an event of this context, recorded after the copy.
        driver.check("cuStreamWaitEvent", unsafe { (driver.wait_in_stream)(STREAM, event, 0) })
    }

    fn stream(&mut self, driver: &Driver) -> Answer<Object> {
        /// It does not wait for the default stream by itself.
        const NON_BLOCKING: u32 = 1;
        if let Some(stream) = self.stream {
            return Ok(stream);
        }
        let mut stream = null_mut();
        // SAFETY: `stream` has room for the handle.
        driver.check("cuStreamCreate", unsafe { (driver.create_stream)(&raw mut stream, NON_BLOCKING) })?;
        self.stream = Some(stream);
        Ok(stream)
    }

    fn event(&mut self, driver: &Driver) -> Answer<Object> {
        match self.events.pop() {
            Some(event) => Ok(event),
            None => driver.event(),
        }
    }

    /// # Safety
    /// The context of the driver's objects is current and has no commands left.
    pub(super) unsafe fn destroy(self, driver: &Driver) {
        // SAFETY: made in this context, and destroyed here alone.
        unsafe {
            for event in self.events.into_iter().chain(self.arriving.into_values()) {
                (driver.destroy_event)(event);
            }
            if let Some(stream) = self.stream {
                (driver.destroy_stream)(stream);
            }
        }
    }
}
