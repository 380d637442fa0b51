//! `strace`, which makes the N-th call of a system call fail, or sends a signal there. Calls before
//! the program opens its config belong to the loader and are left alone.

use super::program::{self, RunPlace, words};
use super::scene::SECONDS;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

const PROGRAM: &str = "strace";
const LOG: &str = "strace.log";

/// A system call, and which of its calls on the main thread are the program's own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Calls {
    pub(crate) first: usize,
    pub(crate) last: usize,
}

/// Whether it is installed and allowed to trace.
pub(crate) fn works() -> bool {
    let mut command = Command::new(PROGRAM);
    command.args(["-f", "--seccomp-bpf", "-qq", "-o", "/dev/null", "-e", "trace=openat", "true"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// The command line that runs `program` under strace with `inject` (`fsync:error=EIO:when=3`), or
/// only traced.
pub(crate) fn traced(
    program: &Path,
    arguments: &[String],
    calls: &[&str],
    inject: Option<&str>,
    place: &RunPlace,
) -> Vec<String> {
    let mut all = words(&["-f", "--seccomp-bpf", "-qq", "-s", "64", "-o"]);
    all.push(place.logs.join(LOG).display().to_string());
    all.extend(["-e".to_string(), format!("trace={}", calls.join(","))]);
    if let Some(inject) = inject {
        all.extend(["-e".to_string(), format!("inject={inject}")]);
    }
    all.push(program.display().to_string());
    all.extend_from_slice(arguments);
    all
}

pub(crate) fn program() -> &'static Path {
    Path::new(PROGRAM)
}

/// How often a run makes each of these calls, found by tracing one. `config` is the file whose
/// opening marks its start.
pub(crate) fn counted(
    program: &Path,
    arguments: &[String],
    calls: &[&str],
    config: &str,
    place: &RunPlace,
) -> Result<BTreeMap<String, Calls>, String> {
    let traced = traced(program, arguments, calls, None, place);
    let ended = program::run(self::program(), &traced, place, SECONDS)?;
    if !ended.ok() {
        return Err(format!("a traced run: {}", ended.how()));
    }
    counts(&log(place)?, calls, config).ok_or_else(|| format!("the traced run never opened {config}"))
}

/// Calls on the main thread, from the opening of `config` on; None if it was never opened.
fn counts(log: &str, calls: &[&str], config: &str) -> Option<BTreeMap<String, Calls>> {
    let main = log.split_whitespace().next()?;
    let mut counts: BTreeMap<String, Calls> = BTreeMap::new();
    let mut begun = false;
    for line in log.lines() {
        let Some((process, call)) = line.split_once(' ') else { continue };
        let Some((name, _)) = call.trim_start().split_once('(') else { continue };
        if process != main || !calls.contains(&name) {
            continue;
        }
        begun |= name == "openat" && line.contains(config);
        let count = counts.entry(name.to_string()).or_insert(Calls { first: 1, last: 0 });
        count.last += 1;
        if !begun {
            count.first = count.last + 1;
        }
    }
    counts.retain(|_, count| count.first <= count.last);
    begun.then_some(counts)
}

/// The calls hit by an injection.
pub(crate) fn injected(place: &RunPlace) -> Result<Vec<String>, String> {
    let met = |line: &&str| line.contains("(INJECTED)");
    Ok(log(place)?.lines().filter(met).map(|line| line.trim().to_string()).collect())
}

fn log(place: &RunPlace) -> Result<String, String> {
    Ok(String::from_utf8_lossy(&super::run_folder::read(&place.logs.join(LOG))?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_the_loader_are_left_out() {
        let log = "7 openat(AT_FDCWD, \"libc.so\") = 3\n7 read(3, \"x\") = 1\n7 openat(AT_FDCWD, \"run.toml\") = 3\n\
            7 openat(AT_FDCWD, \"data\") = 3\n8 write(1, \"x\") = 1\n7 write(4, <unfinished ...>\n7 <... write resumed>) = 1\n\
            7 fsync(4) = 0\n";
        let found = counts(log, &["openat", "read", "write"], "run.toml").expect("begun");
        let expected = [("openat", 2, 3), ("write", 1, 1)];
        assert_eq!(found, expected.map(|(name, first, last)| (name.to_string(), Calls { first, last })).into());
        assert_eq!(counts(log, &["openat"], "other.toml"), None);
    }
}
