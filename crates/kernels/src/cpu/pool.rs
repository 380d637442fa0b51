//! A thread pool: a job is called once per thread and takes its part of the work, by worker number
//! or dynamically (`pool/ranges.rs`). No result depends on the number of threads or the division of
//! work.
//!
//! What unsafe code may rely on: a job is called once for every number of `0..threads`; all calls
//! have returned, and their writes are visible, when [`Pool::run`] returns; ranges that are handed
//! out tile the whole. Calls need not run at the same time, so none may wait for another: the
//! caller makes the calls of workers whose cores are busy with something else. `pool/protocol.rs`
//! implements this, and `pool/model.rs` checks it with `loom`.

#[cfg(test)]
mod model;
mod protocol;
mod ranges;
mod shared_mut;
mod sync;

pub use ranges::{StealingRanges, Tasks, share};
pub use shared_mut::SharedMut;

use crate::float_state;
use protocol::Protocol;
use std::cell::Cell;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::JoinHandle;

/// `threads − 1` parked workers and the caller.
pub struct Pool {
    protocol: Arc<Protocol>,
    workers: Vec<JoinHandle<()>>,
    threads: usize,
}

/// BOUND: threads of a pool. No machine has more cores, and each takes megabytes of address space.
pub const THREADS_MAX: usize = 1024;

/// The system did not start the requested number of threads.
#[derive(Debug, thiserror::Error)]
#[error("the system started {started} of {threads} threads: {source}")]
pub struct TooFewThreads {
    pub started: usize,
    pub threads: usize,
    source: std::io::Error,
}

thread_local! {
    /// Whether this thread is inside a job. A worker runs nothing else.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as inside a job until dropped.
struct Inside;

impl Inside {
    fn enter() -> Self {
        let nested = INSIDE.replace(true);
        assert!(!nested, "a job of a thread pool started another job: it would wait for itself");
        Self
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

impl Pool {
    pub fn new(threads: usize) -> Result<Self, TooFewThreads> {
        assert!((1..=THREADS_MAX).contains(&threads), "a pool has 1 to {THREADS_MAX} threads, the caller among them");
        let protocol = Arc::new(Protocol::new(threads - 1));
        let mut pool = Self { protocol, workers: Vec::with_capacity(threads - 1), threads };
        for worker in 1..threads {
            match pool.start(worker) {
                Ok(handle) => pool.workers.push(handle),
                // The started threads end with the pool, which runs no job.
                Err(source) => return Err(TooFewThreads { started: worker, threads, source }),
            }
        }
        Ok(pool)
    }

    /// Starts one worker and waits until it runs. A new thread maps its signal stack by itself, and
    /// the standard library aborts the process where that is refused; so the address space for a
    /// stack and what goes with it must be there before, and no other thread takes it meanwhile.
    fn start(&self, worker: usize) -> std::io::Result<JoinHandle<()>> {
        const STACK_BYTES: usize = 2 << 20;
        const BESIDE_STACK_BYTES: usize = 1 << 20;
        drop(memmap2::MmapMut::map_anon(STACK_BYTES + BESIDE_STACK_BYTES)?);
        let protocol = Arc::clone(&self.protocol);
        let (runs, running) = std::sync::mpsc::sync_channel(1);
        let serve = move || {
            INSIDE.set(true);
            // Nobody waits only if the pool is gone; the protocol says so next.
            let _ = runs.send(());
            protocol.serve(worker);
        };
        let thread = std::thread::Builder::new().name(format!("isobit-{worker}")).stack_size(STACK_BYTES);
        let handle = thread.spawn(serve)?;
        // An error means that the thread ended, which joining it reports.
        let _ = running.recv();
        Ok(handle)
    }

    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `job(worker)` once for every `worker` of `0..threads`, 0 on this thread, the others on
    /// their own or, if those come too late, on this one, and returns when all have returned. Their
    /// writes are then visible. A panic in any of them is propagated after all have returned.
    ///
    /// # Panics
    /// If called from a job of this or another pool: the job would deadlock. It is not run inline
    /// instead, because a job may hold thread state (tile registers), and because it would be
    /// silently slow.
    pub fn run(&self, job: impl Fn(usize) + Sync) {
        float_state::restore();
        let _inside = Inside::enter();
        if self.threads == 1 {
            return job(0);
        }
        if let Err(payload) = self.protocol.run(&job) {
            resume_unwind(payload);
        }
    }

    /// Splits `0..count` into contiguous ranges, each a multiple of `grain` except the last, and
    /// hands out every index once. Each thread has its own share, the same in every op with the
    /// same number of rows, so it finds in its caches what it wrote before; idle workers steal, so
    /// a slow core does not hold up the others.
    pub fn run_ranges(&self, count: usize, grain: usize, job: impl Fn(Range<usize>) + Sync) {
        /// The smallest range is a thread's share divided by this.
        const RANGES_MIN: usize = 8;
        if count == 0 {
            return;
        }
        if self.threads == 1 {
            return self.run(|_| job(0..count));
        }
        let grains = count.div_ceil(grain);
        let sizes = grains.div_ceil(RANGES_MIN * self.threads)..=usize::MAX;
        let ranges = StealingRanges::new(grains, self.threads, sizes);
        self.run(|worker| {
            while let Some(range) = ranges.next(worker) {
                job(range.start * grain..(range.end * grain).min(count));
            }
        });
    }

    /// Splits a matrix by rows: each thread gets its rows' range and their elements.
    pub fn run_rows<T: Send>(&self, out: &mut [T], width: usize, job: impl Fn(Range<usize>, &mut [T]) + Sync) {
        if width == 0 || out.is_empty() {
            return;
        }
        assert_eq!(out.len() % width, 0, "whole rows");
        let rows = out.len() / width;
        let out = SharedMut::new(out);
        self.run_ranges(rows, 1, |range| {
            // SAFETY: `run_ranges` hands out every row once, so these elements are this call's
            // alone.
            let part = unsafe { out.slice(range.start * width..range.end * width) };
            job(range, part);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.protocol.stop();
        for worker in self.workers.drain(..) {
            // `run` has already propagated a worker's panic.
            drop(worker.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_worker_runs_once_per_job() {
        for threads in [1, 2, 7] {
            let pool = Pool::new(threads).expect("threads start");
            let calls: Vec<_> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..1000 {
                pool.run(|worker| {
                    calls[worker].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(calls.iter().all(|count| count.load(Ordering::Relaxed) == 1000));
        }
    }

    #[test]
    fn a_panic_is_passed_on_and_the_pool_survives() {
        let pool = Pool::new(3).expect("threads start");
        let caught = catch_unwind(AssertUnwindSafe(|| pool.run(|worker| assert!(worker != 2, "worker two fails"))));
        assert!(caught.is_err());
        let count = AtomicUsize::new(0);
        pool.run(|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn a_job_within_a_job_panics_instead_of_waiting_for_itself() {
        for threads in [1, 3] {
            let (pool, other) = (Pool::new(threads).expect("threads start"), Pool::new(1).expect("no thread"));
            // From the caller's thread, from a worker's, and into another pool.
            for (nests, inner) in [(0, &pool), (threads - 1, &pool), (threads - 1, &other)] {
                let nested = || {
                    pool.run(|worker| {
                        if worker == nests {
                            inner.run(|_| ());
                        }
                    });
                };
                let payload = catch_unwind(AssertUnwindSafe(nested)).expect_err("a nested job");
                let text = payload.downcast_ref::<&str>().copied().unwrap_or_default();
                assert!(text.contains("started another job"), "{text}");
            }
            let count = AtomicUsize::new(0);
            pool.run(|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.load(Ordering::Relaxed), threads, "the pool still works");
        }
    }
}
