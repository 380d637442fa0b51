//! Numbers on their way from one device to another, through host memory.
//!
//! Where the runtime of a device can lock pages, the device copies from and to the parcel while its
//! thread goes on: the next one to use the parcel waits for that copy, and for no later command.
//! Elsewhere copies are plain ones. Bytes are moved, never changed.

use crate::backend::DeviceFailure;
use crate::buffer::Buffer;
use crate::float_state;
use crate::gpu::Mark;

/// Host memory for the numbers of one message. Used again and again: locking pages takes longer
/// than a copy.
pub struct Parcel {
    numbers: Buffer<f32>,
    /// As many of them are on their way.
    length: usize,
    /// The last copy from or to them, and the device that makes it.
    copying: Option<(Box<dyn Mark>, String)>,
}

impl Parcel {
    /// Zeros, in memory that is not touched before it is filled.
    pub fn new(length: usize) -> Self {
        Self { numbers: Buffer::paged(length), length, copying: None }
    }

    /// How many numbers have room.
    pub fn capacity(&self) -> usize {
        self.numbers.len()
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The parcel is for another message, of `length` numbers.
    pub fn resize(&mut self, length: usize) {
        assert!(length <= self.capacity(), "{length} numbers in room for {}", self.capacity());
        self.length = length;
    }

    /// Waits until no device copies from or to the parcel.
    pub(crate) fn wait(&mut self) -> Result<(), DeviceFailure> {
        let Some((mark, device)) = self.copying.take() else { return Ok(()) };
        let waited = mark.wait();
        // A driver ran on this thread.
        drop(mark);
        float_state::restore();
        waited.map_err(|what| DeviceFailure { device, what })
    }

    /// The numbers that have arrived.
    pub fn numbers(&mut self) -> Result<&[f32], DeviceFailure> {
        self.wait()?;
        Ok(&self.numbers[..self.length])
    }

    /// For numbers to be written to.
    pub fn numbers_mut(&mut self) -> Result<&mut [f32], DeviceFailure> {
        self.wait()?;
        Ok(&mut self.numbers[..self.length])
    }

    /// The memory itself, for a device that locks its pages; nothing copies from or to it.
    pub(crate) fn memory(&mut self) -> Result<&Buffer<f32>, DeviceFailure> {
        self.wait()?;
        Ok(&self.numbers)
    }

    /// `device` has begun to copy from or to it.
    pub(crate) fn set_copying(&mut self, mark: Box<dyn Mark>, device: &str) {
        self.copying = Some((mark, device.to_string()));
    }
}

impl Drop for Parcel {
    fn drop(&mut self) {
        // Before the memory goes. The device itself reports a failure.
        let _ = self.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    struct Counted(Arc<AtomicUsize>, bool);

    impl Mark for Counted {
        fn wait(&self) -> Result<(), String> {
            self.0.fetch_add(1, Ordering::Relaxed);
            if self.1 { Ok(()) } else { Err("lost".to_string()) }
        }
    }

    #[test]
    fn numbers_are_handed_out_after_their_copy_alone() {
        let waits = Arc::new(AtomicUsize::new(0));
        let counted = || waits.load(Ordering::Relaxed);
        let mut parcel = Parcel::new(4);
        parcel.set_copying(Box::new(Counted(Arc::clone(&waits), true)), "card");
        assert_eq!(counted(), 0);
        parcel.numbers_mut().expect("copied").fill(1.5);
        assert_eq!((counted(), parcel.numbers().map(<[f32]>::to_vec)), (1, Ok(vec![1.5; 4])));
        parcel.resize(3);
        assert_eq!((parcel.len(), parcel.capacity(), counted()), (3, 4, 1));
        // A failure of the device that copies is told with its name, to the next who asks.
        parcel.set_copying(Box::new(Counted(Arc::clone(&waits), false)), "card");
        let failure = parcel.numbers().map(|_| ()).expect_err("lost");
        assert_eq!((failure.device.as_str(), failure.what.as_str()), ("card", "lost"));
        parcel.set_copying(Box::new(Counted(Arc::clone(&waits), true)), "card");
        drop(parcel);
        assert_eq!(counted(), 3, "memory goes after its copies");
    }
}
