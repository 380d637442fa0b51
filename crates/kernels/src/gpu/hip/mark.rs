//! A point in the commands of a card that another thread waits for: the other end of a copy between
//! two devices.

use super::STREAM;
use super::library::{Functions, Object, Status};
use crate::gpu::runtime::{Answer, Mark};
use std::ffi::c_int;
use std::ptr::null_mut;

/// An event after the commands.
pub(super) struct Recorded {
    device: c_int,
    event: Object,
    set_device: unsafe extern "system" fn(c_int) -> Status,
    wait: unsafe extern "system" fn(Object) -> Status,
    destroy: unsafe extern "system" fn(Object) -> Status,
}

// SAFETY: the event is only passed to the runtime, whose functions may be called from any thread.
unsafe impl Send for Recorded {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Recorded {}

impl Recorded {
    /// # Safety
    /// The device is current.
    pub(super) unsafe fn new(functions: &Functions, device: c_int) -> Answer<Self> {
        const NO_TIMING: u32 = 2;
        let mut event = null_mut();
        // SAFETY: `event` has room for the handle.
        let status = unsafe { (functions.create_event)(&raw mut event, NO_TIMING) };
        functions.check("hipEventCreateWithFlags", status)?;
        let (set_device, wait, destroy) = (functions.set_device, functions.wait_for_event, functions.destroy_event);
        let recorded = Self { device, event, set_device, wait, destroy };
        // SAFETY: an event of this device, made just now.
        functions.check("hipEventRecord", unsafe { (functions.record_event)(event, STREAM) })?;
        Ok(recorded)
    }
}

impl Mark for Recorded {
    fn wait(&self) -> Answer<()> {
        // SAFETY: the device exists, and the event lives as long as `self`.
        let status = unsafe {
            match (self.set_device)(self.device) {
                0 => (self.wait)(self.event),
                failed => failed,
            }
        };
        if status == 0 { Ok(()) } else { Err(format!("hipEventSynchronize failed ({status})")) }
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: made for `self`, and destroyed here alone.
        unsafe { (self.destroy)(self.event) };
    }
}
