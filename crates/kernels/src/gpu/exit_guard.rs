//! Libraries run inside this process, and some end it when they fail: a compiler of kernels whose
//! disk is full calls `exit(1)`, as MPI does without file descriptors, and 1 says that a difference
//! was found.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the program itself is ending.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// From here on, an exit that [`disarm`] does not announce has the exit code of a device.
pub fn arm() {
    // SAFETY: the handler is a function of this program and stays. If it is refused, exits are as
    // they were.
    #[cfg(unix)]
    unsafe {
        _ = libc::atexit(at_exit);
    }
}

/// The program ends by itself.
pub fn disarm() {
    IS_ENDING.store(true, Ordering::Relaxed);
}

#[cfg(unix)]
extern "C" fn at_exit() {
    if IS_ENDING.load(Ordering::Relaxed) {
        return;
    }
    let text = b"error: a library ended the program: the driver of a device, or MPI\nhint: its own words stand above, if it has any; `isobit doctor` checks the devices\n";
    // SAFETY: the text lives longer than the calls; the process ends without further handlers.
    unsafe {
        _ = libc::write(2, text.as_ptr().cast(), text.len());
        libc::_exit(6)
    }
}
