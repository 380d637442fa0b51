//! Ranks: processes that train together, each on its own groups of rows (`docs/numerics.md`,
//! "Ranks").
//!
//! A [`World`] only moves bytes and never waits; `team.rs` adds waiting with a deadline, checksums
//! and agreement, `handshake.rs` compares the ranks before the first step, and `update.rs` takes
//! the gradients of the groups through their tree. `memory.rs` counts what that takes.

mod error;
pub mod handshake;
pub mod launch;
pub mod memory;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod sharded;
pub mod shards;
mod team;
pub mod threads;
pub mod update;
mod wire;

pub use error::{RankError, RankFailure};
pub use team::Team;

use std::sync::Arc;

/// A whole message. Shared, so that it can be passed on to several ranks without a copy.
pub type Message = Arc<Vec<u8>>;

/// Messages of one channel arrive in order; channels do not wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Channel {
    /// What the run is about.
    Data,
    /// Who waits for whom, asked when a deadline has passed.
    Control,
}

/// Why a rank cannot be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorldError {
    /// The rank has left, or the connection to it is broken.
    Gone { rank: usize, why: String },
}

/// The ranks of one machine, as one of them sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbours {
    /// Ranks on this machine.
    pub count: usize,
    /// Those of them before this one.
    pub index: usize,
    /// Ranks that run on the same cores as this one, itself included.
    pub sharing: usize,
}

/// The processes of a run, as one of them sees them. Moves bytes and decides nothing.
pub trait World {
    fn rank(&self) -> usize;

    fn size(&self) -> usize;

    /// Where this rank stands on this machine.
    fn neighbours(&self) -> Neighbours;

    /// Begins to send and returns at once.
    fn send(&self, to: usize, channel: Channel, message: Message) -> Result<(), WorldError>;

    /// The next message of `from` if it has arrived.
    fn poll(&self, from: usize, channel: Channel) -> Result<Option<Message>, WorldError>;

    /// Ends the run on all ranks at once. Under MPI this does not return.
    fn abort(&self, code: u8);
}

/// The world of a run with one process.
#[derive(Clone, Copy, Debug)]
pub struct Alone;

impl World for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn neighbours(&self) -> Neighbours {
        Neighbours { count: 1, index: 0, sharing: 1 }
    }

    fn send(&self, to: usize, _: Channel, _: Message) -> Result<(), WorldError> {
        unreachable!("rank {to} of 1")
    }

    fn poll(&self, from: usize, _: Channel) -> Result<Option<Message>, WorldError> {
        unreachable!("rank {from} of 1")
    }

    fn abort(&self, _: u8) {}
}
