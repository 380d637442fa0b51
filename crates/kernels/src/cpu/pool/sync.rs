//! The primitives of the pool's protocol. The model (`model.rs`) compiles the same protocol with
//! those of `loom` instead.

pub(super) use std::sync::atomic::{AtomicUsize, Ordering};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};

/// Iterations of a waiting loop before a thread parks: jobs of one op follow each other within
/// microseconds.
pub(super) const SPINS: usize = 4_000;

/// One iteration of a waiting loop. Occasionally yields the core: with more threads than free
/// cores, the awaited thread may need this one.
pub(super) fn pause(turn: usize) {
    const OFFER: usize = 64;
    if turn % OFFER == OFFER - 1 { std::thread::yield_now() } else { std::hint::spin_loop() }
}
