//! The program on a pseudo-terminal: what a person sees, and keys as a person presses them.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(crate) struct Terminal {
    child: Child,
    keys: File,
    shown: Arc<Mutex<Vec<u8>>>,
    /// Bytes of it that `until` has passed.
    passed: usize,
}

impl Terminal {
    /// Starts the program with these arguments in a folder; the terminal is its controlling one.
    pub(crate) fn start(folder: &Path, arguments: &[&str]) -> Self {
        let (mut ours, mut theirs) = (-1, -1);
        let [name, settings, size] = [std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut()];
        // SAFETY: both descriptors are ours; name, settings and size may be left out.
        let opened = unsafe { libc::openpty(&raw mut ours, &raw mut theirs, name, settings.cast(), size.cast()) };
        assert_eq!(opened, 0, "a pseudo-terminal");
        // Programs that other tests start meanwhile must not keep it open.
        for end in [ours, theirs] {
            // SAFETY: a descriptor that was opened just now.
            unsafe { libc::fcntl(end, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
        // SAFETY: they were opened just now and belong to nobody else.
        let (ours, theirs) = unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
        let mut command = Command::new(env!("CARGO_BIN_EXE_isobit"));
        command.current_dir(folder).args(arguments).env("TERM", "xterm");
        command.stdin(Stdio::from(theirs.try_clone().expect("cloned")));
        command.stdout(Stdio::from(theirs.try_clone().expect("cloned"))).stderr(Stdio::from(theirs));
        // SAFETY: a forked child may call both.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                libc::ioctl(0, libc::TIOCSCTTY, 0);
                Ok(())
            });
        }
        let child = command.spawn().expect("the program starts");
        // Its copies of the other end must go: the last one to close it ends the reading.
        drop(command);
        let (shown, keys) = (Arc::new(Mutex::new(Vec::new())), File::from(ours));
        let (screen, mut reader) = (Arc::clone(&shown), keys.try_clone().expect("cloned"));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                screen.lock().expect("no panic").extend_from_slice(&buffer[..count]);
            }
        });
        Self { child, keys, shown, passed: 0 }
    }

    pub(crate) fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("written");
    }

    /// Waits until this is shown after what was passed before, and gives what stands in front of
    /// it, with plain line ends.
    #[track_caller]
    pub(crate) fn until(&mut self, part: &str) -> String {
        let mut text = String::new();
        for _ in 0..30_000 {
            text = String::from_utf8_lossy(&self.shown.lock().expect("no panic")[self.passed..]).into_owned();
            if let Some(at) = text.find(part) {
                self.passed += at + part.len();
                return text[..at].replace("\r\n", "\n");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("`{part}` is not shown: {text}");
    }

    /// The exit code, once it has ended.
    pub(crate) fn code(&mut self) -> i32 {
        self.child.wait().expect("waited").code().unwrap_or(-1)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A test that failed leaves nobody behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
