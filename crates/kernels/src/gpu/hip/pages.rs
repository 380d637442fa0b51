//! Pages of the host that are locked for a card.

use super::library::{Functions, Status};
use crate::gpu::host_copies::{LockedPages, Pages};
use crate::gpu::runtime::PageLock;
use std::ffi::{c_int, c_void};

/// Pages that are registered with a device.
struct Registered {
    device: c_int,
    host: *mut c_void,
    set_device: unsafe extern "system" fn(c_int) -> Status,
    synchronize: unsafe extern "system" fn() -> Status,
    unlock: unsafe extern "system" fn(*mut c_void) -> Status,
}

// SAFETY: the address is only passed to the runtime, whose functions may be called from any thread.
unsafe impl Send for Registered {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Registered {}

/// None if the runtime refuses.
///
/// # Safety
/// The device is current. The pages stay where they are until the lock is dropped.
pub(super) unsafe fn lock(
    functions: &Functions,
    device: c_int,
    host: *mut u8,
    bytes: usize,
) -> Option<Box<dyn PageLock>> {
    /// For all devices: two cards exchange parcels.
    const PORTABLE: u32 = 1;
    let host = host.cast::<c_void>();
    let (set_device, synchronize) = (functions.set_device, functions.synchronize);
    // SAFETY: mapped memory of this process, which stays (the caller's promise).
    let status = unsafe { (functions.lock_pages)(host, bytes, PORTABLE) };
    let registered = || Registered { device, host, set_device, synchronize, unlock: functions.unlock_pages };
    (status == 0).then(|| LockedPages::boxed(registered()))
}

impl Pages for Registered {
    fn finish_copies(&self) {
        // SAFETY: the device exists; waits for its commands. A failure shows at its next call.
        unsafe {
            (self.set_device)(self.device);
            (self.synchronize)();
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered in `lock`, and unregistered here alone, after the copies.
        unsafe { (self.unlock)(self.host) };
    }
}
