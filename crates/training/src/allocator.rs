//! A memory limit for untrusted programs. A chat template is one, and can double a string as easily
//! as print it. Its instructions and its output are bounded elsewhere; only the allocator sees the
//! memory it uses in between.
//!
//! The program installs `Limited` as its allocator. It forwards to the system allocator and counts
//! bytes for threads under a limit. An allocator can neither return an error nor unwind, so an
//! allocation beyond the limit ends the process with a message prepared in advance. Templates run
//! before anything is written, so nothing is lost. An allocation that the system refuses also ends
//! the process: large ones are buffers, which report it themselves; after a small one nothing could
//! continue, and checkpoints are whole at every moment.

#[cfg(unix)]
use crate::decimal::{DIGITS_MAX, decimal};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The exit codes for a malformed file and for a run that does not fit.
#[cfg(unix)]
const MALFORMED: i32 = 8;
#[cfg(unix)]
const DOES_NOT_FIT: i32 = 4;
const NO_LIMIT: isize = isize::MAX;

thread_local! {
    /// Bytes that this thread may still allocate.
    static LEFT: Cell<isize> = const { Cell::new(NO_LIMIT) };
    /// The message printed when they run out.
    static LAST_WORDS: Cell<*const str> = const { Cell::new(std::ptr::from_ref("")) };
}

/// Blocks from this size on are mappings of their own, which go back to the system when they are
/// freed. Left alone, glibc raises the limit to 32 MiB as blocks are freed, and keeps up to a
/// seventh more than a plan counts. The mappings cost about a hundredth of the time of a step.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_BYTES_MIN: i32 = 128 << 10;

/// Makes the allocator return freed blocks, so that a process takes what its plan says. Under
/// `ulimit -v` it also gets a single arena: one for each thread would reserve 64 MiB of address
/// space that nobody uses.
pub fn return_freed_blocks() {
    // SAFETY: sets parameters of the allocator; called before other threads exist.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN);
        if crate::free_memory::address_space_limit().is_some() {
            libc::mallopt(libc::M_ARENA_MAX, 1);
        }
    }
}

/// Gives the pages between blocks that are still in use back to the system. A tokenizer is a
/// hundred thousand small blocks: once it is dropped, buffers, which are mappings of their own,
/// would never use its pages.
pub fn release_free_pages() {
    // SAFETY: touches nothing but the allocator's own free blocks, under its locks.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Runs `work` with at most `bytes` more than this thread holds now. If that is not enough and
/// [`Limited`] is the allocator, the process prints `last_words` to standard error and ends with
/// exit code 8.
pub fn within<T>(bytes: usize, last_words: &str, work: impl FnOnce() -> T) -> T {
    struct Restore(isize, *const str);
    impl Drop for Restore {
        fn drop(&mut self) {
            LEFT.set(self.0);
            LAST_WORDS.set(self.1);
        }
    }
    let _restore = Restore(LEFT.get(), LAST_WORDS.replace(std::ptr::from_ref(last_words)));
    LEFT.set(isize::try_from(bytes).map_or(NO_LIMIT - 1, |bytes| bytes.min(NO_LIMIT - 1)));
    work()
}

/// The system allocator, counting bytes for threads under a limit.
#[derive(Debug)]
pub struct Limited;

// SAFETY: every call goes to the system's allocator with the layout it came with; counting touches
// two plain cells of the thread and allocates nothing.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promises are passed on.
        granted(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promises are passed on.
        granted(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may exist at once.
        take(size);
        // SAFETY: the caller's promises are passed on.
        let moved = granted(unsafe { System.realloc(pointer, layout, size) }, size);
        give(layout.size());
        moved
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        give(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn take(bytes: usize) {
    let left = LEFT.get();
    if left != NO_LIMIT {
        // BOUND: a layout is at most `isize::MAX` bytes, so this does not wrap.
        let rest = left - bytes as isize;
        if rest < 0 {
            end();
        }
        LEFT.set(rest);
    }
}

fn give(bytes: usize) {
    let left = LEFT.get();
    if left != NO_LIMIT {
        LEFT.set(left.saturating_add(bytes as isize).min(NO_LIMIT - 1));
    }
}

/// The memory from the system; if there is none, the process reports the size of the request and
/// ends.
fn granted(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() {
        refused(bytes);
    }
    memory
}

#[cfg(unix)]
fn refused(bytes: usize) {
    let mut digits = [0; DIGITS_MAX];
    let parts: [&[u8]; 3] = [
        b"error: out of memory: the system refused ",
        decimal(bytes as u64, &mut digits),
        b" bytes\nhint: close other programs, raise the limit on memory, or see what a run needs with `isobit plan`\n",
    ];
    for part in parts {
        // SAFETY: pointer and length are those of the part.
        unsafe { libc::write(libc::STDERR_FILENO, part.as_ptr().cast(), part.len()) };
    }
    // SAFETY: leaving at once runs nothing that could allocate.
    unsafe { libc::_exit(DOES_NOT_FIT) }
}

/// On other systems the caller aborts the process.
#[cfg(not(unix))]
fn refused(_bytes: usize) {}

#[cfg(unix)]
fn end() {
    // SAFETY: the text is borrowed by the `within` that set the pointer, and this runs inside its
    // `work`.
    let text = unsafe { &*LAST_WORDS.get() };
    // SAFETY: pointer and length are those of the text; leaving at once runs nothing that could
    // allocate.
    unsafe {
        libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len());
        libc::_exit(MALFORMED)
    }
}

/// On other systems no way of exiting from here is known to be sound.
#[cfg(not(unix))]
fn end() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: Limited = Limited;

    #[test]
    fn what_is_given_back_can_be_taken_again() {
        assert_eq!(LEFT.get(), NO_LIMIT);
        let length = within(1 << 20, "never said", || {
            let before = LEFT.get();
            let length: usize = (0..100).map(|_| std::hint::black_box(vec![0_u8; 900_000]).len()).sum();
            let mut grown = Vec::new();
            (0..100_000_u32).for_each(|value| grown.push(value as u8));
            drop(std::hint::black_box(grown));
            assert_eq!(LEFT.get(), before);
            let inner = within(usize::MAX, "", || LEFT.get());
            assert!(inner > 1 << 40 && LEFT.get() == before);
            length
        });
        assert_eq!((length, LEFT.get()), (90_000_000, NO_LIMIT));
    }
}
