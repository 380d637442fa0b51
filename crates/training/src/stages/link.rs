//! What travels between neighbouring devices: activations forward, their gradients backward, in
//! host memory. A stage that stops early drops its ends, and its neighbours stop too.

use isobit_autograd::BalanceSums;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// The activations of a micro-batch.
#[derive(Debug)]
pub(crate) struct Forward {
    /// Index of the micro-batch.
    pub(crate) at: usize,
    pub(crate) values: Vec<f32>,
    /// Whether anything before is trained.
    pub(crate) needs_gradient: bool,
    /// What the routers so far contribute to the load-balancing loss.
    pub(crate) balance: Option<BalanceSums>,
}

/// Their gradient.
#[derive(Debug)]
pub(crate) struct Backward {
    pub(crate) at: usize,
    pub(crate) values: Vec<f32>,
    /// The gradient of the load-balancing loss.
    pub(crate) share: Option<Vec<f32>>,
}

/// The ends of a stage: towards the stage before it and the stage after it.
#[derive(Default)]
pub(crate) struct Links {
    pub(crate) before: Option<(Receiver<Forward>, SyncSender<Backward>)>,
    pub(crate) after: Option<(SyncSender<Forward>, Receiver<Backward>)>,
}

impl Links {
    /// The links of `stages` stages in a row; `waiting` messages fit into each without blocking.
    pub(crate) fn chain(stages: usize, waiting: usize) -> Vec<Self> {
        let mut all: Vec<Self> = (0..stages).map(|_| Self::default()).collect();
        for at in 1..stages {
            let (send_forward, receive_forward) = sync_channel(waiting);
            let (send_backward, receive_backward) = sync_channel(waiting);
            all[at - 1].after = Some((send_forward, receive_backward));
            all[at].before = Some((receive_forward, send_backward));
        }
        all
    }
}
