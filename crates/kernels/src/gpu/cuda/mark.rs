//! A point in the commands of a card that another thread waits for: the other end of a copy between
//! two devices.

use super::context::Context;
use super::{Driver, Object};
use crate::gpu::runtime::{Answer, Mark};
use std::sync::Arc;

/// An event after the commands.
pub(super) struct Recorded {
    driver: Arc<Driver>,
    context: Arc<Context>,
    event: Object,
}

// SAFETY: the event is only passed to the driver, whose functions may be called from any thread.
unsafe impl Send for Recorded {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Recorded {}

impl Recorded {
    /// # Safety
    /// The event is of this context, and nobody else destroys it.
    pub(super) unsafe fn new(driver: &Arc<Driver>, context: &Arc<Context>, event: Object) -> Self {
        Self { driver: Arc::clone(driver), context: Arc::clone(context), event }
    }
}

impl Mark for Recorded {
    fn wait(&self) -> Answer<()> {
        self.driver.check("cuCtxSetCurrent", self.context.set_current())?;
        // SAFETY: an event of this context, which is current and lives as long as `self`.
        self.driver.check("cuEventSynchronize", unsafe { (self.driver.wait_for_event)(self.event) })
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // Without its context the card is gone, along with its events.
        if self.context.set_current() == 0 {
            // SAFETY: made for `self`, and destroyed here alone.
            unsafe { (self.driver.destroy_event)(self.event) };
        }
    }
}
