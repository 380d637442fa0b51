//! A thread pool: every thread runs a job once and takes its share of the work, by number (`share`) or by asking ([`Tasks`]). No
//! result depends on how many there are or who does what.

use crate::float_state;
use std::any::Any;
use std::ops::{Range, RangeInclusive};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Borrowed from the caller of [`Pool::run`], which outlives every use; the lifetime is a convention, not a fact.
type Job = &'static (dyn Fn(usize) + Sync);

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    done: Condvar,
    /// Mirrors `State::epoch` and `State::running`, so that short waits need no lock.
    epoch: AtomicUsize,
    running: AtomicUsize,
}

struct State {
    epoch: usize,
    job: Option<Job>,
    panic: Option<Box<dyn Any + Send>>,
    stop: bool,
}

/// `threads − 1` parked workers and the caller.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    threads: usize,
    /// Only one job at a time.
    turn: Mutex<()>,
}

/// BOUND: threads of a pool. No machine has more cores, and each takes megabytes of address space.
pub const THREADS_MOST: usize = 1024;

/// The system did not start as many threads as were asked for.
#[derive(Debug, thiserror::Error)]
#[error("the system started {started} of {threads} threads: {source}")]
pub struct TooFewThreads {
    pub started: usize,
    pub threads: usize,
    source: std::io::Error,
}

/// Spins before a thread parks: jobs of one op follow each other within microseconds.
const SPIN: usize = 4_000;

impl Pool {
    pub fn new(threads: usize) -> Result<Self, TooFewThreads> {
        assert!((1..=THREADS_MOST).contains(&threads), "a pool has 1 to {THREADS_MOST} threads, the caller among them");
        let shared = Arc::new(Shared {
            state: Mutex::new(State { epoch: 0, job: None, panic: None, stop: false }),
            work: Condvar::new(),
            done: Condvar::new(),
            epoch: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
        });
        let mut pool = Self { shared, workers: Vec::with_capacity(threads - 1), threads, turn: Mutex::new(()) };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("isobit-{worker}"));
            match builder.spawn(move || shared.serve(worker)) {
                Ok(handle) => pool.workers.push(handle),
                // Those that did start end with the pool.
                Err(source) => return Err(TooFewThreads { started: worker, threads, source }),
            }
        }
        Ok(pool)
    }

    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `job(worker)` once on every thread and returns when all are done. A panic in any of them is passed on.
    pub fn run(&self, job: impl Fn(usize) + Sync) {
        float_state::restore();
        if self.threads == 1 {
            return job(0);
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let job_reference: &(dyn Fn(usize) + Sync) = &job;
        // SAFETY: only the lifetime is erased; this function does not return before every worker is done with it.
        let erased: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(job_reference) };
        {
            let mut state = self.shared.lock();
            state.epoch += 1;
            state.job = Some(erased);
            self.shared.running.store(self.threads - 1, Ordering::Release);
            self.shared.epoch.store(state.epoch, Ordering::Release);
            self.shared.work.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        let panic = self.shared.wait_for_workers();
        drop(turn);
        if let Some(payload) = own.err().or(panic) {
            resume_unwind(payload);
        }
    }

    /// Splits `0..count` into contiguous ranges, each a multiple of `grain` but the last. A thread has its own share of the whole, the same one in every op
    /// on as many rows, and finds in its caches what it wrote before; who is done first helps the others, so that a slowed core does not hold them up.
    pub fn run_ranges(&self, count: usize, grain: usize, job: impl Fn(Range<usize>) + Sync) {
        /// Pieces of a thread's share that are not worth dividing any more.
        const LEAST: usize = 8;
        if count == 0 {
            return;
        }
        if self.threads == 1 {
            return self.run(|_| job(0..count));
        }
        let grains = count.div_ceil(grain);
        let pieces = Pieces::new(grains, self.threads, grains.div_ceil(LEAST * self.threads)..=usize::MAX);
        self.run(|worker| {
            while let Some(piece) = pieces.next(worker) {
                job(piece.start * grain..(piece.end * grain).min(count));
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
            // SAFETY: ranges of different threads do not overlap.
            let part = unsafe { out.slice(range.start * width..range.end * width) };
            job(range, part);
        });
    }
}

/// The part of `0..count` that belongs to `worker`, in whole grains.
pub fn share(count: usize, grain: usize, workers: usize, worker: usize) -> Range<usize> {
    let grains = count.div_ceil(grain);
    let at = |index: usize| (grains * index / workers * grain).min(count);
    at(worker)..at(worker + 1)
}

impl Drop for Pool {
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.stop = true;
            state.epoch += 1;
            self.shared.epoch.store(state.epoch, Ordering::Release);
            self.shared.work.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker's panic was already passed on by `run`.
            drop(worker.join());
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, worker: usize) {
        let mut seen = 0;
        loop {
            let Some(job) = self.next_job(&mut seen) else { return };
            float_state::restore();
            // `Pool::run` keeps the closure alive until `running` reaches zero, below.
            let result = catch_unwind(AssertUnwindSafe(|| job(worker)));
            if let Err(payload) = result {
                self.lock().panic.get_or_insert(payload);
            }
            if self.running.fetch_sub(1, Ordering::AcqRel) == 1 {
                let _state = self.lock();
                self.done.notify_all();
            }
        }
    }

    fn next_job(&self, seen: &mut usize) -> Option<Job> {
        for turn in 0..SPIN {
            if self.epoch.load(Ordering::Acquire) != *seen {
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

    fn wait_for_workers(&self) -> Option<Box<dyn Any + Send>> {
        for turn in 0..SPIN {
            if self.running.load(Ordering::Acquire) == 0 {
                break;
            }
            pause(turn);
        }
        let mut state = self.lock();
        while self.running.load(Ordering::Acquire) != 0 {
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.job = None;
        state.panic.take()
    }
}

/// One turn of a waiting loop. Now and then the core is offered to whoever wants it: with more threads than free cores, the one that
/// is waited for may be waiting for this core.
fn pause(turn: usize) {
    const OFFER: usize = 64;
    if turn % OFFER == OFFER - 1 { std::thread::yield_now() } else { std::hint::spin_loop() }
}

/// Work handed out in order of asking, for tasks of unequal length or threads of unequal speed. Results never depend on who asks.
pub struct Tasks {
    next: AtomicUsize,
    count: usize,
}

impl Tasks {
    pub fn new(count: usize) -> Self {
        Self { next: AtomicUsize::new(0), count }
    }

    pub fn count(&self) -> usize {
        self.count
    }

    pub fn next(&self) -> Option<usize> {
        let task = self.next.fetch_add(1, Ordering::Relaxed);
        (task < self.count).then_some(task)
    }
}

/// A range of which every thread has a share. It takes pieces of it from the front, large ones first and ever smaller ones; when its own share is done it takes
/// from the end of the longest one left. So threads of unequal speed end together, and those of equal speed keep to their own.
pub struct Pieces {
    shares: Vec<Mutex<Range<usize>>>,
    sizes: RangeInclusive<usize>,
}

impl Pieces {
    /// Of `0..count`, in pieces of such sizes.
    pub fn new(count: usize, threads: usize, sizes: RangeInclusive<usize>) -> Self {
        let shares = (0..threads).map(|worker| Mutex::new(share(count, 1, threads, worker))).collect();
        Self { shares, sizes }
    }

    /// The next piece for a thread.
    pub fn next(&self, worker: usize) -> Option<Range<usize>> {
        self.next_within(worker, |_| 0..usize::MAX)
    }

    /// As [`Self::next`]; a piece keeps within `area(unit)` of its units.
    pub fn next_within(&self, worker: usize, area: impl Fn(usize) -> Range<usize>) -> Option<Range<usize>> {
        let alone = self.shares.len() == 1;
        let size = |left: usize| {
            let wanted = left.div_ceil(2).clamp(*self.sizes.start(), *self.sizes.end());
            if alone { left } else { wanted.min(left) }
        };
        {
            let mut own = self.lock(worker);
            if !own.is_empty() {
                let piece = own.start..(own.start + size(own.len())).min(area(own.start).end);
                own.start = piece.end;
                return Some(piece);
            }
        }
        loop {
            let (left, longest) = (0..self.shares.len()).map(|other| (self.lock(other).len(), other)).max()?;
            if left == 0 {
                return None;
            }
            let mut other = self.lock(longest);
            // Its owner may have been faster.
            if !other.is_empty() {
                let piece = (other.end - size(other.len())).max(area(other.end - 1).start)..other.end;
                other.end = piece.start;
                return Some(piece);
            }
        }
    }

    fn lock(&self, worker: usize) -> std::sync::MutexGuard<'_, Range<usize>> {
        self.shares[worker].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A mutable slice that several threads write disjoint parts of.
pub struct SharedMut<'a, T> {
    pointer: *mut T,
    length: usize,
    owner: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `slice`, whose callers promise disjoint ranges.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { pointer: slice.as_mut_ptr(), length: slice.len(), owner: std::marker::PhantomData }
    }

    /// The first element. Its users keep the promise of [`Self::slice`].
    pub fn pointer(&self) -> *mut T {
        self.pointer
    }

    /// Asks for the cache line of an element; nothing is read.
    #[inline(always)]
    pub fn prefetch(&self, index: usize) {
        super::path::prefetch(self.pointer.wrapping_add(index));
    }

    /// The elements of `range`.
    ///
    /// # Safety
    /// While the result is alive, no other thread may use an overlapping range.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.length, "part within the whole");
        // SAFETY: in bounds (asserted), disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_a_partition_and_keep_to_their_areas() {
        for (count, threads, sizes, area) in [
            (0, 2, 1..=4, 5),
            (1, 7, 1..=4, 1),
            (103, 2, 1..=8, 10),
            (64, 1, 4..=8, 16),
            (97, 3, 4..=100, 97),
            (97, 3, 4..=9, 7),
        ] {
            let area_of = |unit: usize| unit / area * area..(unit / area + 1) * area;
            // One thread that does everything, and threads that take turns.
            for workers in [1, threads] {
                let pieces = Pieces::new(count, threads, sizes.clone());
                let mut seen = vec![0; count];
                for turn in 0.. {
                    let Some(piece) = pieces.next_within(turn % workers, area_of) else { break };
                    assert!(!piece.is_empty() && piece.start / area == (piece.end - 1) / area, "{piece:?} of {count}");
                    piece.for_each(|unit| seen[unit] += 1);
                }
                assert!(seen.iter().all(|times| *times == 1), "{count} by {threads}: {seen:?}");
            }
        }
    }

    #[test]
    fn threads_of_equal_speed_keep_to_their_shares() {
        let pieces = Pieces::new(64, 2, 1..=usize::MAX);
        for worker in [0, 1].repeat(6) {
            let piece = pieces.next(worker).expect("six pieces each");
            assert!(share(64, 1, 2, worker).contains(&piece.start), "{piece:?} for {worker}");
        }
    }

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
    fn shares_tile_the_whole() {
        for count in [0, 1, 5, 16, 17, 1000] {
            for grain in [1, 6, 16] {
                for workers in [1, 2, 7] {
                    let mut next = 0;
                    for worker in 0..workers {
                        let range = share(count, grain, workers, worker);
                        assert_eq!(range.start, next);
                        next = range.end;
                    }
                    assert_eq!(next, count);
                }
            }
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
}
