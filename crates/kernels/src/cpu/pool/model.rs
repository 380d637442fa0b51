//! The pool's protocol under `loom`: interleavings of a few threads, all with up to two or three
//! preemptions, and every value that a weakly ordered machine may read in them.
//!
//! `protocol.rs` is compiled a second time here, with loom's primitives. Jobs write cells that loom
//! tracks: an access not ordered after another one to the same cell fails the test, and so does a
//! thread that waits forever.

/// In place of `pool/sync.rs`.
mod sync {
    pub(super) use loom::sync::atomic::{AtomicUsize, Ordering};
    pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};

    /// Enough for both exits of a waiting loop: the event arrives, or the thread parks.
    pub(super) const SPINS: usize = 1;

    pub(super) fn pause(_turn: usize) {
        loom::thread::yield_now();
    }
}

#[allow(clippy::duplicate_mod, reason = "the same protocol with other primitives is the point")]
#[path = "protocol.rs"]
mod protocol;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread::JoinHandle;
use protocol::Protocol;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One number per worker, and one that only the caller writes, between jobs: what the closure
/// borrows.
struct Cells {
    own: Vec<UnsafeCell<usize>>,
    borrowed: UnsafeCell<usize>,
}

// SAFETY: every access goes through loom's cell, which fails the test where two are not ordered.
unsafe impl Sync for Cells {}

impl Cells {
    fn new(threads: usize) -> Self {
        Self { own: (0..threads).map(|_| UnsafeCell::new(0)).collect(), borrowed: UnsafeCell::new(0) }
    }

    /// A job: reads what it borrows, writes its own cell.
    fn work(&self, worker: usize) {
        // SAFETY: loom checks that nobody writes it meanwhile.
        let borrowed = self.borrowed.with(|borrowed| unsafe { *borrowed });
        // SAFETY: loom checks that nobody else has it meanwhile.
        self.own[worker].with_mut(|own| unsafe { *own += borrowed });
    }

    /// The caller's access before and after a job.
    fn set(&self, value: usize) {
        // SAFETY: loom checks that no worker reads it any more.
        self.borrowed.with_mut(|borrowed| unsafe { *borrowed = value });
    }

    fn own(&self) -> Vec<usize> {
        // SAFETY: loom checks that every worker's write is ordered before this.
        self.own.iter().map(|own| own.with(|own| unsafe { *own })).collect()
    }
}

fn start(workers: usize) -> (Arc<Protocol>, Vec<JoinHandle<()>>) {
    let protocol = Arc::new(Protocol::new(workers));
    let serve = |worker: usize| {
        let protocol = Arc::clone(&protocol);
        loom::thread::spawn(move || protocol.serve(worker))
    };
    let handles = (1..=workers).map(serve).collect();
    (protocol, handles)
}

fn stop(protocol: &Protocol, workers: Vec<JoinHandle<()>>) {
    protocol.stop();
    for worker in workers {
        worker.join().expect("a worker ends");
    }
}

/// Runs jobs in sequence on `workers` workers.
fn run_jobs(workers: usize, jobs: &[usize]) {
    let (protocol, handles) = start(workers);
    let cells = Cells::new(workers + 1);
    for job in jobs {
        cells.set(*job);
        protocol.run(&|worker| cells.work(worker)).expect("no panic");
        // The closure is gone and its borrows have ended: no worker may still be in the job.
        cells.set(0);
    }
    assert_eq!(cells.own(), vec![jobs.iter().sum::<usize>(); workers + 1]);
    stop(&protocol, handles);
}

/// Explores a scenario with at most `preemptions` switches away from a runnable thread
/// (`LOOM_MAX_PREEMPTIONS` overrides it); panics unless there were at least `executions_min`
/// executions.
fn explore(preemptions: usize, executions_min: usize, scenario: impl Fn() + Sync + Send + 'static) {
    let executions = std::sync::Arc::new(AtomicUsize::new(0));
    let count = std::sync::Arc::clone(&executions);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        scenario();
    });
    let executions = executions.load(Ordering::Relaxed);
    assert!(executions >= executions_min, "{executions} executions are no exploration");
}

#[test]
fn a_worker_and_its_caller() {
    explore(4, 5_000, || run_jobs(1, &[1, 10]));
}

#[test]
fn two_workers_and_their_caller() {
    explore(2, 1_000, || run_jobs(2, &[1]));
}

#[test]
fn two_callers_take_turns() {
    explore(2, 1_000, || {
        let (protocol, handles) = start(1);
        let cells = Arc::new(Cells::new(2));
        cells.set(1);
        let other = {
            let (protocol, cells) = (Arc::clone(&protocol), Arc::clone(&cells));
            loom::thread::spawn(move || protocol.run(&|worker| cells.work(worker)).expect("no panic"))
        };
        protocol.run(&|worker| cells.work(worker)).expect("no panic");
        other.join().expect("the other caller ends");
        assert_eq!(cells.own(), [2, 2]);
        stop(&protocol, handles);
    });
}
