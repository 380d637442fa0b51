//! Ctrl-C and SIGTERM: the first asks the loop to finish its step and save, the second stops the process at once.
//!
//! A handler may only touch an atomic or leave: the loop asks `requested` between steps. Checkpoints are whole at every
//! moment, so leaving at once loses work and nothing else.

use std::sync::atomic::{AtomicU8, Ordering};

/// What the process was asked with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    Interrupt,
    Terminate,
}

impl Signal {
    /// The program's exit code after a clean save, which is also that of a process stopped at once.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// Exit code of the first signal; 0 before there is one.
static REQUESTED: AtomicU8 = AtomicU8::new(0);

/// The first signal that came, if one has.
pub fn requested() -> Option<Signal> {
    let code = REQUESTED.load(Ordering::Relaxed);
    [Signal::Interrupt, Signal::Terminate].into_iter().find(|signal| signal.exit_code() == code)
}

/// Asks as a signal would: the first time for a clean end, and true the second time.
fn request(signal: Signal) -> bool {
    REQUESTED.compare_exchange(0, signal.exit_code(), Ordering::Relaxed, Ordering::Relaxed).is_err()
}

/// Listens for both signals from now on. Elsewhere than on Unix nothing is listened for, and they stop the process.
pub fn install() -> std::io::Result<()> {
    #[cfg(unix)]
    unix::install()?;
    Ok(())
}

#[cfg(unix)]
mod unix {
    use super::{Signal, request};
    use std::io;

    pub(super) fn install() -> io::Result<()> {
        for number in [libc::SIGINT, libc::SIGTERM] {
            // SAFETY: all zeros is a valid sigaction; the fields that matter are set below.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            let handler: extern "C" fn(libc::c_int) = handle;
            action.sa_sigaction = handler as *const () as libc::sighandler_t;
            // Reads and writes that a signal interrupts go on.
            action.sa_flags = libc::SA_RESTART;
            // SAFETY: the mask is ours; the handler does only what a handler may; the old action is not asked for.
            let failed = unsafe {
                libc::sigemptyset(&raw mut action.sa_mask) != 0
                    || libc::sigaction(number, &raw const action, std::ptr::null_mut()) != 0
            };
            if failed {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    extern "C" fn handle(number: libc::c_int) {
        let signal = if number == libc::SIGTERM { Signal::Terminate } else { Signal::Interrupt };
        if request(signal) {
            // SAFETY: one of the few functions a handler may call; nothing is cleaned up, and nothing needs to be.
            unsafe { libc::_exit(libc::c_int::from(signal.exit_code())) };
        }
    }
}
