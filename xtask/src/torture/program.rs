//! The program under test as a child process: its limits, how it ends, and what is wrong with an
//! end.

use crate::repository::now;
use std::fs::File;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Address space of a run: far more than the small models here need.
const MEMORY_BYTES: u64 = 6 << 30;
/// Bytes of a run's output that are examined.
const TEXT_BYTES: u64 = 8 << 20;
/// Exit codes documented in the README, except those of signals.
const CODES: [i32; 9] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
/// Texts printed only by our own bugs.
const BUG_TEXTS: [&str; 4] = ["panicked at", "overflowed its stack", "memory allocation of", "RUST_BACKTRACE"];

/// Where a run starts and where its output goes.
pub(crate) struct RunPlace {
    /// The working folder.
    pub(crate) scene: PathBuf,
    /// Files for standard output and error, outside the working folder.
    pub(crate) logs: PathBuf,
}

/// A running process.
pub(crate) struct Started {
    pub(crate) child: Child,
    out: PathBuf,
    err: PathBuf,
}

/// How a run ended.
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) late: bool,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// Starts `program` with these words. Its output goes to files, so nothing has to read it while it
/// runs.
pub(crate) fn start(program: &Path, words: &[String], place: &RunPlace) -> Result<Started, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", program.display());
    let (out, err) = (place.logs.join("stdout"), place.logs.join("stderr"));
    let file = |path: &Path| File::create(path).map_err(|error| format!("{}: {error}", path.display()));
    let mut command = Command::new(program);
    command.args(words).current_dir(&place.scene).stdin(Stdio::null());
    command.stdout(file(&out)?).stderr(file(&err)?);
    // SAFETY: setrlimit may be called between fork and exec, and touches nothing of ours.
    unsafe { command.pre_exec(limited) };
    Ok(Started { child: command.spawn().map_err(failed)?, out, err })
}

fn limited() -> std::io::Result<()> {
    let memory = libc::rlimit { rlim_cur: MEMORY_BYTES, rlim_max: MEMORY_BYTES };
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both structures live until the calls return.
    let failed = unsafe {
        libc::setrlimit(libc::RLIMIT_AS, &raw const memory) != 0
            || libc::setrlimit(libc::RLIMIT_CORE, &raw const none) != 0
    };
    if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Starts it and waits.
pub(crate) fn run(program: &Path, words: &[String], place: &RunPlace, seconds: u64) -> Result<Ended, String> {
    start(program, words, place)?.end(seconds)
}

impl Started {
    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: the child was not waited for, so its number is still its own.
        unsafe { libc::kill(self.child.id() as libc::pid_t, signal) };
    }

    pub(crate) fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for the end, and forces it after `seconds`.
    pub(crate) fn end(mut self, seconds: u64) -> Result<Ended, String> {
        let begun = now();
        let mut nap = Duration::from_micros(200);
        let (status, late) = loop {
            if let Some(status) = self.child.try_wait().map_err(|error| error.to_string())? {
                break (status, false);
            }
            if begun.elapsed().as_secs() >= seconds {
                self.signal(libc::SIGKILL);
                break (self.child.wait().map_err(|error| error.to_string())?, true);
            }
            std::thread::sleep(nap);
            nap = (nap * 5 / 4).min(Duration::from_millis(10));
        };
        let text = |path: &Path| -> Result<String, String> {
            let failed = |error| format!("{}: {error}", path.display());
            let mut bytes = Vec::new();
            File::open(path).map_err(failed)?.take(TEXT_BYTES).read_to_end(&mut bytes).map_err(failed)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let (out, err) = (text(&self.out)?, text(&self.err)?);
        Ok(Ended { code: status.code(), signal: status.signal(), late, out, err })
    }
}

impl Ended {
    /// A description with the first lines of the message.
    pub(crate) fn how(&self) -> String {
        let end = match (self.late, self.code, self.signal) {
            (true, ..) => "no end in time".to_string(),
            (_, Some(code), _) => format!("exit {code}"),
            (_, _, Some(signal)) => format!("signal {signal}"),
            _ => "no status".to_string(),
        };
        let lines: Vec<&str> = self.err.lines().filter(|line| !line.is_empty()).collect();
        let shown = lines[lines.len().saturating_sub(3)..].join(" | ");
        let shown: String = shown.chars().take(300).collect();
        format!("{end}: {shown}")
    }

    /// What is wrong with an end, whatever the input.
    pub(crate) fn complaint(&self) -> Option<String> {
        let what = if self.late {
            "it hangs"
        } else if BUG_TEXTS.iter().any(|text| self.err.contains(text) || self.out.contains(text)) {
            "the text of a crash"
        } else if self.signal.is_some() {
            "ended by a signal"
        } else if !self.code.is_some_and(|code| CODES.contains(&code)) {
            "an exit code that is not documented here"
        } else if self.code.is_some_and(|code| code > 1) && !self.err.contains("error:") {
            "a failure without `error:`"
        } else {
            return None;
        };
        Some(format!("{what}: {}", self.how()))
    }

    pub(crate) fn ok(&self) -> bool {
        self.code == Some(0) && self.complaint().is_none()
    }

    /// Events of `train --json`.
    pub(crate) fn events(&self) -> impl Iterator<Item = serde_json::Value> + '_ {
        self.out.lines().filter_map(|line| serde_json::from_str(line).ok())
    }
}

/// Words of a command line.
pub(crate) fn words(text: &[&str]) -> Vec<String> {
    text.iter().map(|word| (*word).to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_that_are_wrong() {
        let end =
            |code, signal, err: &str| Ended { code, signal, late: false, out: String::new(), err: err.to_string() };
        assert_eq!(end(Some(0), None, "").complaint(), None);
        assert_eq!(end(Some(1), None, "").complaint(), None);
        assert_eq!(end(Some(8), None, "error: a file\nhint: another").complaint(), None);
        for (ended, what) in [
            (end(Some(8), None, ""), "a failure without `error:`"),
            (end(Some(101), None, "error: thread 'main' panicked at x"), "the text of a crash"),
            (end(Some(101), None, "error: "), "an exit code"),
            (end(None, Some(6), "error: "), "ended by a signal"),
            (Ended { late: true, ..end(None, Some(9), "") }, "it hangs"),
        ] {
            assert!(ended.complaint().is_some_and(|found| found.starts_with(what)), "{what}");
        }
    }

    #[test]
    fn a_child_that_does_not_end_is_ended() {
        let logs = std::env::temp_dir().join(format!("isobit-torture-child-{}", std::process::id()));
        std::fs::create_dir_all(&logs).expect("made");
        let place = RunPlace { scene: logs.clone(), logs: logs.clone() };
        let ended = run(Path::new("sleep"), &words(&["60"]), &place, 0).expect("started");
        assert!(ended.late && ended.complaint().is_some());
        let ended =
            run(Path::new("sh"), &words(&["-c", "echo out; echo error: x >&2; exit 3"]), &place, 20).expect("ran");
        assert_eq!((ended.code, ended.out.as_str(), ended.err.as_str()), (Some(3), "out\n", "error: x\n"));
        std::fs::remove_dir_all(&logs).expect("removed");
    }
}
