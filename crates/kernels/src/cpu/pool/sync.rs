//! What the pool's protocol is built on. The model (`model.rs`) compiles the same protocol with the
//! primitives of `loom` in place of these.

pub(super) use std::sync::atomic::{AtomicUsize, Ordering};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};

/// Turns of a waiting loop before a thread parks: jobs of one op follow each other within
/// microseconds.
pub(super) const SPINS: usize = 4_000;

/// One turn of a waiting loop. Now and then the core is offered to another thread: with more
/// threads than free cores, the one that is waited for may be waiting for this core.
pub(super) fn pause(turn: usize) {
    const OFFER: usize = 64;
    if turn % OFFER == OFFER - 1 { std::thread::yield_now() } else { std::hint::spin_loop() }
}
