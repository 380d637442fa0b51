//! How a pool's threads receive a job and wait for each other: one mutex, two condition variables,
//! and two atomics so that short waits need no lock.
//!
//! A job is borrowed from the caller of [`Protocol::run`]; workers call it through a raw pointer.
//! That is sound because `run` returns only after it has seen `running` at zero, and a worker
//! counts down only after its call. `model.rs` checks exactly this file with `loom`, over all
//! interleavings.

use super::sync::{AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, SPINS, pause};
use crate::float_state;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;

/// The payload of a panic.
pub(super) type Payload = Box<dyn Any + Send>;

/// A borrowed closure whose type and lifetime are erased.
#[derive(Clone, Copy)]
struct Job {
    closure: *const (),
    call: unsafe fn(*const (), usize),
}

// SAFETY: made of a reference to a closure that is `Sync` (`Job::new`), so any thread may call it.
unsafe impl Send for Job {}

impl Job {
    fn new<F: Fn(usize) + Sync>(closure: &F) -> Self {
        /// # Safety
        /// `closure` is the address of an `F` that lives until the call returns.
        unsafe fn call<F: Fn(usize)>(closure: *const (), worker: usize) {
            // SAFETY: by the caller's promise; only shared references to it exist.
            let closure = unsafe { &*closure.cast::<F>() };
            closure(worker);
        }
        Self { closure: std::ptr::from_ref(closure).cast(), call: call::<F> }
    }

    /// # Safety
    /// The closure that this was made of lives until the call returns.
    unsafe fn call(self, worker: usize) {
        // SAFETY: `call` was instantiated for the type of `closure` in `new`; that the closure
        // lives is the caller's promise.
        unsafe { (self.call)(self.closure, worker) }
    }
}

/// Shared by the caller of a job and `workers` threads that [serve](Self::serve).
pub(super) struct Protocol {
    workers: usize,
    /// Held by the caller of a job: one job at a time.
    turn: Mutex<()>,
    state: Mutex<State>,
    work: Condvar,
    done: Condvar,
    /// Mirrors `State::epoch`.
    epoch: AtomicUsize,
    /// Workers that have not yet returned from the job of this epoch.
    running: AtomicUsize,
}

struct State {
    /// Counts jobs; a worker runs each once.
    epoch: usize,
    job: Option<Job>,
    panic: Option<Payload>,
    stop: bool,
}

impl Protocol {
    pub(super) fn new(workers: usize) -> Self {
        Self {
            workers,
            turn: Mutex::new(()),
            state: Mutex::new(State { epoch: 0, job: None, panic: None, stop: false }),
            work: Condvar::new(),
            done: Condvar::new(),
            epoch: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
        }
    }

    /// Calls `job(0)` here and `job(1..=workers)` on the workers, each once, and returns when all
    /// have returned; their writes are then visible. A panic in any of them is the error. Callers
    /// on different threads take turns; within a job this would deadlock (`Pool::run` panics
    /// first).
    pub(super) fn run<F: Fn(usize) + Sync>(&self, job: &F) -> Result<(), Payload> {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.start(Job::new(job));
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        let panic = self.wait();
        drop(turn);
        match own.err().or(panic) {
            Some(payload) => Err(payload),
            None => Ok(()),
        }
    }

    /// A worker thread's loop until [`Self::stop`]. Exactly one thread serves as each of
    /// `1..=workers`: jobs rely on having their number to themselves, and `running` counts each
    /// once.
    pub(super) fn serve(&self, worker: usize) {
        debug_assert!((1..=self.workers).contains(&worker), "worker {worker} of {}", self.workers);
        let mut seen = 0;
        while let Some(job) = self.next_job(&mut seen) {
            float_state::restore();
            // SAFETY: `run`, which borrows the closure, waits until `running` is zero. This worker
            // is one of those counted, and counts down below, after the call.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { job.call(worker) }));
            if let Err(payload) = result {
                self.keep(payload);
            }
            // Release: the caller must see what the job wrote. Decrements form one release
            // sequence, so its load of zero sees the writes of all workers.
            if self.running.fetch_sub(1, Ordering::Release) == 1 {
                // With the lock: the caller is either before its look at `running` or already
                // waiting.
                let _state = self.lock();
                self.done.notify_all();
            }
        }
    }

    /// Ends [`Self::serve`] on every worker. No job runs.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stop = true;
        self.next_epoch(&mut state);
    }

    fn start(&self, job: Job) {
        let mut state = self.lock();
        state.job = Some(job);
        // Workers read it after they have seen the new epoch under the lock.
        self.running.store(self.workers, Ordering::Relaxed);
        self.next_epoch(&mut state);
    }

    fn next_epoch(&self, state: &mut State) {
        state.epoch += 1;
        // Only a hint to spinning workers: they check again under the lock.
        self.epoch.store(state.epoch, Ordering::Relaxed);
        self.work.notify_all();
    }

    fn next_job(&self, seen: &mut usize) -> Option<Job> {
        for turn in 0..SPINS {
            if self.epoch.load(Ordering::Relaxed) != *seen {
                break;
            }
            pause(turn);
        }
        let mut state = self.lock();
        while state.epoch == *seen {
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        *seen = state.epoch;
        if state.stop { None } else { state.job }
    }

    /// Waits until all workers have returned from the job; returns their first panic.
    fn wait(&self) -> Option<Payload> {
        for turn in 0..SPINS {
            if self.running.load(Ordering::Acquire) == 0 {
                break;
            }
            pause(turn);
        }
        let mut state = self.lock();
        // Acquire: what all jobs wrote is visible from here on.
        while self.running.load(Ordering::Acquire) != 0 {
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.job = None;
        state.panic.take()
    }

    /// Keeps the first panic of a job.
    fn keep(&self, payload: Payload) {
        let mut state = self.lock();
        if state.panic.is_none() {
            state.panic = Some(payload);
        } else {
            // Dropping it could panic again, and this worker would never count down.
            std::mem::forget(payload);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
