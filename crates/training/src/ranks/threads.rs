//! Ranks as threads of one process: what the protocols are tested with, and the laws that `cargo
//! xtask laws` compares.

use super::{Channel, Message, Neighbours, World, WorldError};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Messages that have not been received, by sender, receiver and channel.
type Queues = BTreeMap<(usize, usize, Channel), VecDeque<Message>>;

#[derive(Default)]
struct State {
    queues: Queues,
    left: Vec<bool>,
    /// The rank that ended the run, and its exit code.
    aborted: Option<(usize, u8)>,
}

/// One of the threads.
pub struct Thread {
    rank: usize,
    size: usize,
    state: Arc<Mutex<State>>,
}

/// A world of so many threads; each takes one of them.
pub fn world(size: usize) -> Vec<Thread> {
    let state = Arc::new(Mutex::new(State { left: vec![false; size], ..State::default() }));
    (0..size).map(|rank| Thread { rank, size, state: Arc::clone(&state) }).collect()
}

impl Thread {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails if the run was ended.
    fn running(&self) -> Result<MutexGuard<'_, State>, WorldError> {
        let state = self.state();
        match state.aborted {
            Some((rank, code)) => {
                Err(WorldError::Gone { rank, why: format!("it ended the run with exit code {code}") })
            }
            None => Ok(state),
        }
    }
}

impl World for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn neighbours(&self) -> Neighbours {
        Neighbours { count: self.size, index: self.rank, sharing: self.size }
    }

    fn send(&self, to: usize, channel: Channel, message: Message) -> Result<(), WorldError> {
        self.running()?.queues.entry((self.rank, to, channel)).or_default().push_back(message);
        Ok(())
    }

    fn poll(&self, from: usize, channel: Channel) -> Result<Option<Message>, WorldError> {
        let mut state = self.running()?;
        let message = state.queues.get_mut(&(from, self.rank, channel)).and_then(VecDeque::pop_front);
        if message.is_none() && state.left[from] && channel == Channel::Data {
            return Err(WorldError::Gone { rank: from, why: "its thread has ended".to_string() });
        }
        Ok(message)
    }

    fn abort(&self, code: u8) {
        self.state().aborted.get_or_insert((self.rank, code));
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.state().left[self.rank] = true;
    }
}
