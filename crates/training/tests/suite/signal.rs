//! Signals: one asks, two end. Handlers and what they note are of the whole process, so the test
//! runs in one of its own and forks a child for every case.

use isobit_conformance::in_own_process;
use isobit_training::signal::{Signal, install, requested};

/// No signal: a little more than a second without one.
const PAUSE: libc::c_int = 0;

/// What a child that gets these signals and then leaves with `last` ends with.
fn ends_with(signals: &[libc::c_int], last: libc::c_int) -> libc::c_int {
    // SAFETY: between fork and _exit the child only calls functions that a forked child may.
    match unsafe { libc::fork() } {
        0 => {
            for &signal in signals {
                // SAFETY: waits, or sends a signal to this process.
                unsafe { if signal == PAUSE { libc::usleep(1_100_000) } else { libc::raise(signal) } };
            }
            let code = requested().map_or(last, |signal| last + libc::c_int::from(signal.exit_code()));
            // SAFETY: leaves without running anything of the test harness.
            unsafe { libc::_exit(code) }
        }
        child => {
            assert!(child > 0, "fork");
            let mut status = 0;
            // SAFETY: waits for our own child; the status is ours.
            let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!(waited, child);
            assert!(libc::WIFEXITED(status), "the child left by itself");
            libc::WEXITSTATUS(status)
        }
    }
}

#[test]
fn one_signal_asks_and_two_end() {
    in_own_process(concat!(module_path!(), "::one_signal_asks_and_two_end"), |_| (), signals_in_this_process);
}

fn signals_in_this_process() {
    install().expect("installed");
    assert_eq!(requested(), None);
    assert_eq!(ends_with(&[], 1), 1);
    assert_eq!(ends_with(&[libc::SIGINT], 1), 131);
    assert_eq!(ends_with(&[libc::SIGTERM], 1), 144);
    assert_eq!(ends_with(&[libc::SIGUSR1], 1), 144, "a batch system's warning");
    for two in [[libc::SIGINT, libc::SIGINT], [libc::SIGTERM, libc::SIGINT], [libc::SIGINT, libc::SIGTERM]] {
        assert_eq!(ends_with(&two, 1), 9, "a code of its own");
    }
    // Batch systems repeat what they send, at once; later it is meant.
    for two in [[libc::SIGTERM, libc::SIGTERM], [libc::SIGUSR1, libc::SIGTERM]] {
        assert_eq!(ends_with(&two, 1), 144, "one request");
        assert_eq!(ends_with(&[two[0], PAUSE, two[1]], 1), 9, "two requests");
    }
    assert_eq!(requested(), None, "children are others");
    // SAFETY: sends a signal to this process, whose handler is installed.
    unsafe { libc::raise(libc::SIGTERM) };
    assert_eq!(requested(), Some(Signal::Terminate));
}
