//! A CUDA context, and which one is current on a thread. The driver keeps one per thread; querying
//! it at every call would cost as much as a launch, so each thread caches the last one it set.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

type Status = c_int;
type SetCurrent = unsafe extern "system" fn(*mut c_void) -> Status;
type Release = unsafe extern "system" fn(c_int) -> Status;

thread_local! {
    /// The context that this thread last made current and has not released; null if none.
    static CURRENT: Cell<*mut c_void> = const { Cell::new(null_mut()) };
}

/// The primary context of a device, retained until it is dropped.
pub(super) struct Context {
    handle: *mut c_void,
    device: c_int,
    set_current: SetCurrent,
    release: Release,
}

// SAFETY: the handle is only passed to the driver, whose functions may be called from any thread; a
// context may be current on several.
unsafe impl Send for Context {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Context {}

impl Context {
    /// # Safety
    /// `handle` is the primary context of `device`, retained once for the result. The functions are
    /// `cuCtxSetCurrent` and `cuDevicePrimaryCtxRelease` of the driver that retained it, and stay
    /// loaded.
    pub(super) unsafe fn new(handle: *mut c_void, device: c_int, set_current: SetCurrent, release: Release) -> Self {
        // A device that was released and retained again may have the handle that this thread has
        // cached.
        CURRENT.set(null_mut());
        Self { handle, device, set_current, release }
    }

    /// Makes it current on this thread, if it is not already; returns the driver's status.
    pub(super) fn make_current(&self) -> Status {
        if CURRENT.get() == self.handle {
            return 0;
        }
        self.set_current()
    }

    /// Makes it current on this thread, whatever the thread remembers; returns the driver's status.
    pub(super) fn set_current(&self) -> Status {
        // SAFETY: a context that is retained until `self` is dropped.
        let status = unsafe { (self.set_current)(self.handle) };
        CURRENT.set(if status == 0 { self.handle } else { null_mut() });
        status
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Another context of the same device may live on, with the same handle: it must set it
        // again.
        CURRENT.set(null_mut());
        // SAFETY: retained once for `self`, and released here alone.
        unsafe { (self.release)(self.device) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    thread_local! {
        static CALLS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    fn note(call: String) -> Status {
        CALLS.with_borrow_mut(|calls| calls.push(call));
        0
    }

    unsafe extern "system" fn set_current(context: *mut c_void) -> Status {
        note(format!("set {}", context.addr()))
    }

    unsafe extern "system" fn refuse(_: *mut c_void) -> Status {
        note("refused".to_string());
        201
    }

    unsafe extern "system" fn release(device: c_int) -> Status {
        note(format!("release {device}"))
    }

    fn context(device: c_int, set_current: SetCurrent) -> Context {
        // SAFETY: the functions take any handle.
        unsafe {
            Context::new(std::ptr::without_provenance_mut(8 * (device as usize + 1)), device, set_current, release)
        }
    }

    fn calls() -> Vec<String> {
        CALLS.take()
    }

    #[test]
    fn two_open_cards_make_their_own_context_current() {
        let (first, second) = (context(0, set_current), context(1, set_current));
        for card in [&first, &first, &second, &second, &first] {
            assert_eq!(card.make_current(), 0);
        }
        assert_eq!(calls(), ["set 8", "set 16", "set 8"]);
    }

    #[test]
    fn a_released_context_is_set_anew() {
        let (first, again) = (context(0, set_current), context(0, set_current));
        assert_eq!([first.make_current(), again.make_current()], [0, 0]);
        drop(first);
        assert_eq!(again.make_current(), 0);
        drop(again);
        assert_eq!(calls(), ["set 8", "release 0", "set 8", "release 0"]);
    }

    #[test]
    fn a_refusal_is_reported_every_time() {
        let card = context(0, refuse);
        assert_eq!([card.make_current(), card.make_current()], [201, 201]);
        assert_eq!(calls(), ["refused", "refused"]);
    }
}
