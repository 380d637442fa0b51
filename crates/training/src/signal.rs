//! Ctrl-C, SIGTERM, SIGHUP and SIGUSR1. During training, the first signal asks the loop to finish
//! its step and save; the second stops the process at once. An export removes what it has written.
//! In a conversation Ctrl-C ends the answer, never the program.
//!
//! A handler may only touch atomics, write to a file descriptor or exit, so the loop polls
//! `requested` between steps. Checkpoints are whole at every moment, so exiting at once loses only
//! work.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// How long a signal of a program may repeat the first one: at a job's time limit Slurm sends
/// SIGTERM twice, milliseconds apart. A second Ctrl-C is always meant.
const REPEAT_MS: u64 = 1000;

/// Exit code of a process that a second signal stopped at once.
pub const STOPPED_AT_ONCE: u8 = 9;

/// The signal that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    Interrupt,
    Terminate,
    /// The terminal or connection is gone.
    HangUp,
}

impl Signal {
    /// The program's exit code after a clean save.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::HangUp => 129,
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }

    pub(crate) fn from_exit_code(code: u8) -> Option<Self> {
        [Self::Interrupt, Self::Terminate, Self::HangUp].into_iter().find(|signal| signal.exit_code() == code)
    }

    /// The name shown to users.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "Ctrl-C",
            Self::Terminate => "SIGTERM",
            Self::HangUp => "SIGHUP",
        }
    }
}

/// What a run is doing, as far as the answer to a signal depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    BeforeUpdates,
    Updates,
    /// The evaluation of an update belongs to its line of the chain: without it the update cannot
    /// be saved.
    Evaluation,
    /// An error ends the run.
    Failure,
}

/// The present phase.
static PHASE: AtomicU8 = AtomicU8::new(Phase::BeforeUpdates as u8);
/// Exit code of the first signal; 0 until there is one.
static REQUESTED: AtomicU8 = AtomicU8::new(0);
/// When it came, in milliseconds of a clock; 0 until then.
static REQUESTED_MS: AtomicU64 = AtomicU64::new(0);
/// Step of the last whole checkpoint; 0 until there is one.
static SAVED: AtomicU64 = AtomicU64::new(0);
/// Whether standard error is a terminal.
static TERMINAL: AtomicBool = AtomicBool::new(false);
/// Whether Ctrl-C came during a conversation.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);
/// Whether a conversation is waiting for input.
static WAITING: AtomicBool = AtomicBool::new(false);

/// The first signal received, if any.
pub fn requested() -> Option<Signal> {
    Signal::from_exit_code(REQUESTED.load(Ordering::Relaxed))
}

/// What a signal is to the run.
#[cfg(unix)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    First,
    /// The first one again.
    Repeat,
    Second,
}

/// Records a signal that came at this time: the first requests a clean end.
#[cfg(unix)]
fn request(signal: Signal, now_ms: u64) -> Request {
    let code = signal.exit_code();
    let Err(first) = REQUESTED.compare_exchange(0, code, Ordering::Relaxed, Ordering::Relaxed) else {
        REQUESTED_MS.store(now_ms, Ordering::Relaxed);
        return Request::First;
    };
    // The handler of the first one may be about to store its time.
    let first_ms = match REQUESTED_MS.load(Ordering::Relaxed) {
        0 => now_ms,
        time => time,
    };
    let is_soon = now_ms.saturating_sub(first_ms) < REPEAT_MS;
    let of_a_program = ![first, code].contains(&Signal::Interrupt.exit_code());
    if is_soon && of_a_program { Request::Repeat } else { Request::Second }
}

/// Records that there is a whole checkpoint of this step; a second signal reports the last one.
pub fn saved(step: u64) {
    SAVED.store(step, Ordering::Relaxed);
}

/// From now on a signal is answered as in this phase. A failure stays one.
pub fn enter(phase: Phase) {
    if !is_in(Phase::Failure) {
        PHASE.store(phase as u8, Ordering::Relaxed);
    }
}

fn is_in(phase: Phase) -> bool {
    PHASE.load(Ordering::Relaxed) == phase as u8
}

/// What follows from a signal during an evaluation, in three parts: the middle one is the step of
/// the last checkpoint, if there is one.
const EVALUATION: &str = "an evaluation is running: the update is saved when it ends; a second signal stops now with ";
const KEPT: &str = "checkpoint-";
const NOTHING_KEPT: &str = "nothing saved";

/// The same as text, for a signal that came before the evaluation.
pub fn during_evaluation() -> String {
    match SAVED.load(Ordering::Relaxed) {
        0 => format!("{EVALUATION}{NOTHING_KEPT}"),
        step => format!("{EVALUATION}{KEPT}{step} kept"),
    }
}

/// Handles the signals from now on. A hang-up that is already ignored (`nohup`) stays ignored. Only
/// Unix has handlers; elsewhere the signals stop the process.
///
/// SIGUSR1 is handled as SIGTERM: batch systems send it as a warning, and `mpirun` passes it on to
/// its ranks, but stops them for good soon after any of the others.
pub fn install() -> std::io::Result<()> {
    #[cfg(unix)]
    {
        unix::install(libc::SIGINT, unix::stop)?;
        unix::install(libc::SIGTERM, unix::stop)?;
        unix::install(libc::SIGUSR1, unix::stop)?;
        if !unix::is_ignored(libc::SIGHUP)? {
            unix::install(libc::SIGHUP, unix::stop)?;
        }
    }
    Ok(())
}

/// The same for an export, which then removes what it has written.
pub fn install_for_export() -> std::io::Result<()> {
    #[cfg(unix)]
    {
        unix::install(libc::SIGINT, unix::cancel)?;
        unix::install(libc::SIGTERM, unix::cancel)?;
        if !unix::is_ignored(libc::SIGHUP)? {
            unix::install(libc::SIGHUP, unix::cancel)?;
        }
    }
    Ok(())
}

/// From now on the handlers speak as those of one of several ranks.
pub fn speak_as_rank() {
    #[cfg(unix)]
    unix::IS_RANK.store(true, Ordering::Relaxed);
}

/// From now on SIGUSR1 ends this process as SIGTERM does: it has nothing to save yet.
pub fn end_on_usr1() -> std::io::Result<()> {
    #[cfg(unix)]
    unix::install(libc::SIGUSR1, unix::end)?;
    Ok(())
}

/// From now on a write beyond the limit on file sizes (`ulimit -f`) is an error, not the end of the
/// process.
pub fn ignore_file_size_limit() {
    #[cfg(unix)]
    // SAFETY: ignoring a signal runs no code of ours.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// From now on Ctrl-C only makes `interrupted` true.
pub fn install_for_conversation() -> std::io::Result<()> {
    #[cfg(unix)]
    unix::install(libc::SIGINT, unix::interrupt)?;
    Ok(())
}

/// Whether Ctrl-C was pressed since the last call.
pub fn interrupted() -> bool {
    INTERRUPTED.swap(false, Ordering::Relaxed)
}

/// Sets whether a conversation is waiting for input: Ctrl-C then explains how to leave.
pub fn waiting(waits: bool) {
    WAITING.store(waits, Ordering::Relaxed);
}

#[cfg(unix)]
mod unix {
    use super::{
        AtomicBool, EVALUATION, INTERRUPTED, KEPT, NOTHING_KEPT, Ordering, Phase, Request, SAVED, STOPPED_AT_ONCE,
        Signal, TERMINAL, WAITING, is_in, request,
    };
    use crate::decimal::{DIGITS_MAX, decimal};
    use std::io::{self, IsTerminal};

    type Handler = extern "C" fn(libc::c_int);

    pub(super) fn install(number: libc::c_int, handler: Handler) -> io::Result<()> {
        TERMINAL.store(io::stderr().is_terminal(), Ordering::Relaxed);
        // SAFETY: all zeros is a valid sigaction; the fields that matter are set below.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as *const () as libc::sighandler_t;
        // Reads and writes interrupted by a signal are restarted.
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: the mask is ours; the handlers do only what a handler may; the old action is not
        // asked for.
        let failed = unsafe {
            libc::sigemptyset(&raw mut action.sa_mask) != 0
                || libc::sigaction(number, &raw const action, std::ptr::null_mut()) != 0
        };
        if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    pub(super) fn is_ignored(number: libc::c_int) -> io::Result<bool> {
        // SAFETY: all zeros is a valid sigaction, and is overwritten.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: no new action is given; the old one is written to a value of its type.
        if unsafe { libc::sigaction(number, std::ptr::null(), &raw mut action) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(action.sa_sigaction == libc::SIG_IGN)
    }

    fn signal_of(number: libc::c_int) -> Signal {
        match number {
            libc::SIGTERM | libc::SIGUSR1 => Signal::Terminate,
            libc::SIGHUP => Signal::HangUp,
            _ => Signal::Interrupt,
        }
    }

    /// Milliseconds of a clock that only goes forward; never 0.
    fn now_ms() -> u64 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: one of the few functions a handler may call; it writes to the place it is given.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
        (time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000).max(1)
    }

    /// Whether this process is one of several ranks.
    pub(super) static IS_RANK: AtomicBool = AtomicBool::new(false);

    pub(super) extern "C" fn cancel(number: libc::c_int) {
        if request(signal_of(number), now_ms()) == Request::Second {
            // SAFETY: one of the few functions a handler may call.
            unsafe { libc::_exit(libc::c_int::from(STOPPED_AT_ONCE)) };
        }
    }

    pub(super) extern "C" fn end(number: libc::c_int) {
        // SAFETY: one of the few functions a handler may call.
        unsafe { libc::_exit(libc::c_int::from(signal_of(number).exit_code())) };
    }

    pub(super) extern "C" fn stop(number: libc::c_int) {
        let signal = signal_of(number);
        match request(signal, now_ms()) {
            Request::First => say_what_follows(signal),
            Request::Repeat => (),
            Request::Second => {
                say_lost();
                // SAFETY: one of the few functions a handler may call; nothing is cleaned up, and
                // nothing needs to be.
                unsafe { libc::_exit(libc::c_int::from(STOPPED_AT_ONCE)) };
            }
        }
    }

    /// A launcher sends signals to ranks when one of them has ended with an error: then this one
    /// has nothing to say, and before the first update it cannot tell whether that is so.
    fn say_what_follows(signal: Signal) {
        let is_rank = IS_RANK.load(Ordering::Relaxed);
        if is_in(Phase::Failure) || (is_rank && is_in(Phase::BeforeUpdates)) {
            return;
        }
        if is_in(Phase::Evaluation) {
            return say_during_evaluation();
        }
        // Ranks save only if all of them are still there.
        say_on_a_new_line(match signal {
            _ if is_rank => b"asking all ranks to finish this step and save; a second signal stops now\n",
            Signal::Interrupt => b"finishing this step and saving; Ctrl-C again to stop now\n",
            Signal::Terminate | Signal::HangUp => b"finishing this step and saving; a second signal stops now\n",
        });
    }

    fn say_during_evaluation() {
        say_on_a_new_line(EVALUATION.as_bytes());
        match SAVED.load(Ordering::Relaxed) {
            0 => say(NOTHING_KEPT.as_bytes()),
            step => {
                say(KEPT.as_bytes());
                say(decimal(step, &mut [0; DIGITS_MAX]));
                say(b" kept");
            }
        }
        say(b"\n");
    }

    pub(super) extern "C" fn interrupt(_: libc::c_int) {
        INTERRUPTED.store(true, Ordering::Relaxed);
        if WAITING.load(Ordering::Relaxed) {
            say_on_a_new_line(b"/quit or Ctrl-D ends the conversation\n> ");
        }
    }

    fn say_lost() {
        match SAVED.load(Ordering::Relaxed) {
            0 => say_on_a_new_line(b"stopped now: nothing of this run was saved\n"),
            step => {
                let mut digits = [0; DIGITS_MAX];
                say_on_a_new_line(b"stopped now: nothing since checkpoint ");
                say(decimal(step, &mut digits));
                say(b" was saved\n");
            }
        }
    }

    /// The terminal may have shown ^C or a progress bar.
    fn say_on_a_new_line(text: &[u8]) {
        if TERMINAL.load(Ordering::Relaxed) {
            say(b"\n");
        }
        say(text);
    }

    /// Writes to standard error, as far as possible. The interrupted code may be about to read
    /// `errno`, so it is preserved.
    fn say(text: &[u8]) {
        #[cfg(target_os = "linux")]
        // SAFETY: the address of this thread's errno is valid for as long as the thread runs.
        let before = unsafe { *libc::__errno_location() };
        // SAFETY: a handler may write; the buffer is valid for its length.
        unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
        #[cfg(target_os = "linux")]
        // SAFETY: the address of this thread's errno is valid for as long as the thread runs, and
        // no reference to it exists.
        unsafe {
            *libc::__errno_location() = before;
        }
    }
}
