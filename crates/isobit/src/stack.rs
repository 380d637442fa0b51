//! The stack of this program: a limit on it (`ulimit -s`) may leave less than command lines, plans
//! and drivers need.

use std::process::ExitCode;

/// What systems usually give a main thread.
const BYTES: usize = 8 << 20;

/// Runs `main` with a stack that is large enough, on a thread of its own if need be: signal
/// handlers are those of the process, and this thread only waits.
pub(crate) fn with_enough(main: fn() -> ExitCode) -> ExitCode {
    if raise_limit() {
        return main();
    }
    let thread = std::thread::Builder::new().name("main".to_string()).stack_size(BYTES).spawn(main);
    match thread.map(std::thread::JoinHandle::join) {
        Ok(Ok(code)) => code,
        Ok(Err(panic)) => std::panic::resume_unwind(panic),
        // No memory for it: most commands need less.
        Err(_) => main(),
    }
}

/// Raises the limit as far as the system lets this process, and the size of stacks that drivers
/// give their threads: the C library reads it from the limit when a process starts. Returns whether
/// the main thread has enough now.
#[cfg(target_os = "linux")]
fn raise_limit() -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is written to a value of its type.
    if unsafe { libc::getrlimit(libc::RLIMIT_STACK, &raw mut limit) } != 0 || limit.rlim_cur >= BYTES as libc::rlim_t {
        return true;
    }
    set_default_of_threads();
    limit.rlim_cur = limit.rlim_max.min(BYTES as libc::rlim_t);
    // SAFETY: the limit is valid, and not above the hard one.
    let raised = unsafe { libc::setrlimit(libc::RLIMIT_STACK, &raw const limit) } == 0;
    raised && limit.rlim_cur >= BYTES as libc::rlim_t
}

#[cfg(target_os = "linux")]
fn set_default_of_threads() {
    unsafe extern "C" {
        fn pthread_setattr_default_np(attributes: *const libc::pthread_attr_t) -> libc::c_int;
    }
    // SAFETY: all zeros is a value of the type, and is initialised before it is used. A refusal
    // leaves the default as it was.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        if libc::pthread_attr_init(&raw mut attributes) == 0 {
            _ = libc::pthread_attr_setstacksize(&raw mut attributes, BYTES);
            _ = pthread_setattr_default_np(&raw const attributes);
            libc::pthread_attr_destroy(&raw mut attributes);
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn raise_limit() -> bool {
    true
}
