//! How a pool's threads receive a job and wait for each other: one mutex, two condition variables,
//! and atomics so that short waits need no lock.
//!
//! A worker claims its number before it calls the job. The caller claims and calls what no worker
//! has claimed when its own part is done: it waits for workers inside the job, never for one that
//! has not begun, because other programs may hold its core.
//!
//! A job is borrowed from the caller of [`Protocol::run`]; workers call it through a raw pointer.
//! That is sound because only the claimant of a number calls the job, `run` returns only after it
//! has seen `running` at zero, and a claimant counts down only after its call. `model.rs` checks
//! exactly this file with `loom`, over all interleavings.

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

/// Shared by the caller of a job and the threads that [serve](Self::serve), one per claim.
pub(super) struct Protocol {
    /// For each worker's number, the last epoch in which it was claimed.
    claims: Vec<AtomicUsize>,
    /// Held by the caller of a job: one job at a time.
    turn: Mutex<()>,
    state: Mutex<State>,
    work: Condvar,
    done: Condvar,
    /// Mirrors `State::epoch`.
    epoch: AtomicUsize,
    /// Workers' numbers for which the job of this epoch has not yet returned.
    running: AtomicUsize,
}

struct State {
    /// Counts jobs; each number is claimed once in each.
    epoch: usize,
    job: Option<Job>,
    panic: Option<Payload>,
    stop: bool,
}

impl Protocol {
    pub(super) fn new(workers: usize) -> Self {
        Self {
            claims: (0..workers).map(|_| AtomicUsize::new(0)).collect(),
            turn: Mutex::new(()),
            state: Mutex::new(State { epoch: 0, job: None, panic: None, stop: false }),
            work: Condvar::new(),
            done: Condvar::new(),
            epoch: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
        }
    }

    /// Calls `job(0)` here and `job(1..=workers)` on the workers, or here if they come too late,
    /// each once, and returns when all have returned; their writes are then visible. A panic in any
    /// of them is the error. Callers on different threads take turns; within a job this would
    /// deadlock (`Pool::run` panics first).
    pub(super) fn run<F: Fn(usize) + Sync>(&self, job: &F) -> Result<(), Payload> {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let epoch = self.start(Job::new(job));
        let call = |number: usize| {
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(number))) {
                self.keep(payload);
            }
        };
        call(0);
        for worker in 1..=self.claims.len() {
            if self.claim(worker, epoch) {
                call(worker);
                // Only this thread reads what it wrote itself.
                self.running.fetch_sub(1, Ordering::Relaxed);
            }
        }
        let panic = self.wait();
        drop(turn);
        panic.map_or(Ok(()), Err)
    }

    /// Whether the number is the caller's for this epoch. The job itself is handed over under the
    /// lock.
    fn claim(&self, worker: usize, epoch: usize) -> bool {
        self.claims[worker - 1].compare_exchange(epoch - 1, epoch, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// A worker thread's loop until [`Self::stop`]: one thread for each of `1..=workers`.
    pub(super) fn serve(&self, worker: usize) {
        debug_assert!((1..=self.claims.len()).contains(&worker), "worker {worker} of {}", self.claims.len());
        let mut seen = 0;
        while let Some(job) = self.next_job(&mut seen) {
            if !self.claim(worker, seen) {
                // Too late: the closure may be gone.
                continue;
            }
            float_state::restore();
            // SAFETY: `run`, which borrows the closure, waits until `running` is zero. This number
            // is one of those counted, its claim is this thread's, and it counts down below, after
            // the call.
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

    /// Returns the job's epoch.
    fn start(&self, job: Job) -> usize {
        let mut state = self.lock();
        state.job = Some(job);
        // Workers read it after they have seen the new epoch under the lock.
        self.running.store(self.claims.len(), Ordering::Relaxed);
        self.next_epoch(&mut state);
        state.epoch
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
        while !state.stop {
            if state.epoch != *seen {
                *seen = state.epoch;
                // A job that ended before this worker saw it is gone.
                if state.job.is_some() {
                    return state.job;
                }
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Waits until the job has returned for every number; returns the first panic.
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
