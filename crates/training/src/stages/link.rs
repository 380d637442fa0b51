//! What travels between neighbouring devices: activations forward, their gradients backward, in
//! parcels of host memory. A stage that stops early drops its ends, and its neighbours stop too.

use super::schedule::Stop;
use isobit_autograd::BalanceSums;
use isobit_kernels::Parcel;
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The activations of a micro-batch.
pub(crate) struct Forward {
    /// Index of the micro-batch.
    pub(crate) at: usize,
    pub(crate) values: Parcel,
    /// Whether anything before is trained.
    pub(crate) needs_gradient: bool,
    /// What the routers so far contribute to the load-balancing loss.
    pub(crate) balance: Option<BalanceSums>,
}

/// Their gradient.
pub(crate) struct Backward {
    pub(crate) at: usize,
    pub(crate) values: Parcel,
    /// The gradient of the load-balancing loss.
    pub(crate) share: Option<Vec<f32>>,
}

/// The parcels of a link that carry nothing, those that were used last at the end. They stay over
/// all updates: locking pages takes longer than a copy.
#[derive(Clone, Default)]
pub(crate) struct Shelf(Arc<Mutex<VecDeque<Parcel>>>);

impl Shelf {
    /// A parcel for `length` numbers.
    ///
    /// BOUND: a link has as many parcels as were on their way at once, since one that is too small
    /// is replaced; `parcels` says how many there are.
    pub(crate) fn take(&self, length: usize) -> Parcel {
        let mut free = self.free();
        let fits = free.iter().position(|parcel| parcel.capacity() >= length);
        let Some(mut parcel) = free.remove(fits.unwrap_or(0)).filter(|_| fits.is_some()) else {
            return Parcel::new(length);
        };
        parcel.resize(length);
        parcel
    }

    pub(crate) fn put_back(&self, parcel: Parcel) {
        self.free().push_back(parcel);
    }

    fn free(&self) -> MutexGuard<'_, VecDeque<Parcel>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.free().len()
    }
}

/// Parcels on their way at once, at most, behind a stage with `stages_after` more: one for each
/// micro-batch between its forward and its backward pass. Where nothing in front is trained, and in
/// evaluations, `stages_after` wait, one more is ready to, and one is being received.
pub fn parcels(stages_after: usize) -> usize {
    stages_after + 2
}

/// The end of a link towards one neighbour.
pub(crate) struct End<Received, Sent> {
    pub(crate) receive: Receiver<Received>,
    pub(crate) send: SyncSender<Sent>,
    pub(crate) shelf: Shelf,
}

impl<Received, Sent> End<Received, Sent> {
    pub(crate) fn send(&self, message: Sent) -> Result<(), Stop> {
        self.send.send(message).map_err(|_| Stop::Neighbour)
    }

    pub(crate) fn receive(&self) -> Result<Received, Stop> {
        self.receive.recv().map_err(|_| Stop::Neighbour)
    }
}

/// The ends of a stage: towards the stage before it and the stage after it.
#[derive(Default)]
pub(crate) struct Links {
    pub(crate) before: Option<End<Forward, Backward>>,
    pub(crate) after: Option<End<Backward, Forward>>,
}

impl Links {
    /// The links of stages in a row, one more than there are shelves. As many messages as stages
    /// are behind it wait in each without blocking the sender.
    pub(crate) fn chain(shelves: &[Shelf]) -> Vec<Self> {
        let mut all: Vec<Self> = (0..=shelves.len()).map(|_| Self::default()).collect();
        for (at, shelf) in shelves.iter().enumerate() {
            let stages_after = shelves.len() - at;
            let (send_forward, receive_forward) = sync_channel(stages_after);
            let (send_backward, receive_backward) = sync_channel(stages_after);
            all[at].after = Some(End { receive: receive_backward, send: send_forward, shelf: shelf.clone() });
            all[at + 1].before = Some(End { receive: receive_forward, send: send_backward, shelf: shelf.clone() });
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parcels_that_are_too_small_are_replaced() {
        let shelf = Shelf::default();
        for (length, capacity) in [(3, 3), (2, 3), (5, 5), (1, 5)] {
            let parcel = shelf.take(length);
            assert_eq!((parcel.len(), parcel.capacity(), shelf.count()), (length, capacity, 0));
            shelf.put_back(parcel);
        }
        let [first, second] = [shelf.take(4), shelf.take(4)];
        shelf.put_back(first);
        shelf.put_back(second);
        // The one that has been there longest and is large enough.
        assert_eq!((shelf.take(5).capacity(), shelf.count()), (5, 1));
    }
}
