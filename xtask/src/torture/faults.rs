//! Failing system calls: the N-th `write` has no space left, the N-th `fsync` returns an I/O error,
//! and so on through a run. The run must end with a message and an exit code, leave earlier
//! checkpoints unchanged, and produce the right bytes when resumed on a working disk. Needs
//! `strace`.

use super::program::{self, Ended, RunPlace, words};
use super::random::Random;
use super::scene::{SECONDS, SHAPES, Scene, Shape, copy, remove};
use super::strace::{self, Calls};
use super::{Report, Settings, run_folder};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

const COUNT: usize = 450;
const OUTPUT: &str = "out";

/// Calls, and the errors that each can return. `brk` is excluded: the kernel never returns an error
/// for it, and the C library would take one for an address.
const FAULTS: [(&str, &[&str]); 21] = [
    ("openat", &["ENOSPC", "EIO", "EDQUOT", "EMFILE"]),
    ("write", &["ENOSPC", "EIO", "EDQUOT"]),
    ("fsync", &["EIO", "ENOSPC"]),
    ("fdatasync", &["EIO", "EDQUOT"]),
    ("rename", &["ENOSPC", "EIO"]),
    ("renameat2", &["ENOSPC", "EIO"]),
    ("mkdir", &["ENOSPC", "EDQUOT"]),
    ("unlink", &["EIO"]),
    ("unlinkat", &["EIO"]),
    ("rmdir", &["EIO"]),
    ("ftruncate", &["ENOSPC", "EIO"]),
    ("read", &["EIO"]),
    ("pread64", &["EIO"]),
    ("lseek", &["EIO"]),
    ("statx", &["EIO", "EACCES"]),
    ("newfstatat", &["EIO"]),
    ("getdents64", &["EIO"]),
    ("flock", &["ENOLCK"]),
    ("mmap", &["ENOMEM"]),
    ("clone3", &["EAGAIN"]),
    ("fcntl", &["EIO"]),
];

/// Where a run starts from: nothing, or a checkpoint.
struct Start {
    shape: &'static Shape,
    /// The finished run.
    whole: PathBuf,
    /// The stopped run to resume, with its checkpoint.
    stopped: Option<(PathBuf, u64)>,
    calls: BTreeMap<String, Calls>,
}

struct Fault {
    start: usize,
    call: &'static str,
    error: &'static str,
    number: usize,
}

pub(crate) fn run(settings: &Settings) -> Result<Report, String> {
    if !strace::works() {
        return Err("faults need strace, which is missing or may not trace (Debian: apt install strace)".to_string());
    }
    let scene = Scene::new(settings)?;
    let place = RunPlace { scene: scene.folder.clone(), logs: settings.place("faults-calls")? };
    let mut starts = Vec::new();
    for shape in SHAPES.iter().filter(|shape| ["best", "full"].contains(&shape.name)) {
        let (whole, _) = scene.whole(shape)?;
        let stopped = scene.stopped(shape)?;
        for stopped in [None, Some(stopped)] {
            let calls = counted(settings, &place, shape, stopped.as_ref())?;
            starts.push(Start { shape, whole: whole.clone(), stopped, calls });
        }
    }
    let faults = planned(&starts, settings.count(COUNT), settings.seed);
    let (met, unharmed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let findings = settings.cases(
        "faults",
        |folder| {
            let place = RunPlace { scene: folder.join("scene"), logs: folder.to_path_buf() };
            copy(&scene.folder.join("model"), &place.scene.join("model"))?;
            for file in SHAPES.iter().map(Shape::file).chain(["pirate.jsonl".to_string()]) {
                copy_file(&scene.folder.join(&file), &place.scene.join(&file))?;
            }
            Ok(place)
        },
        |case| case < faults.len(),
        |place, case| {
            let fault = &faults[case];
            let found = suffered(&settings.program, fault, &starts[fault.start], place)?;
            met.fetch_add(usize::from(found.met), Ordering::Relaxed);
            unharmed.fetch_add(usize::from(found.met && found.finished), Ordering::Relaxed);
            Ok(found.wrong.into_iter().collect())
        },
    )?;
    let (met, unharmed) = (met.into_inner(), unharmed.into_inner());
    Ok(Report { done: format!("{met} injected faults ({unharmed} runs finished in spite of them)"), findings })
}

fn copy_file(from: &Path, to: &Path) -> Result<(), String> {
    std::fs::copy(from, to).map(drop).map_err(|error| format!("{}: {error}", from.display()))
}

fn arguments(shape: &Shape, output: &str) -> Vec<String> {
    words(&["train", &shape.file(), "--resume", "-q", "--set", &format!("output_dir={output}")])
}

fn counted(
    settings: &Settings,
    place: &RunPlace,
    shape: &Shape,
    stopped: Option<&(PathBuf, u64)>,
) -> Result<BTreeMap<String, Calls>, String> {
    let output = place.scene.join("traced");
    remove(&output)?;
    if let Some((folder, _)) = stopped {
        copy(folder, &output)?;
    }
    let names: Vec<&str> = FAULTS.iter().map(|(name, _)| *name).collect();
    let calls = strace::counted(&settings.program, &arguments(shape, "traced"), &names, &shape.file(), place)?;
    remove(&output)?;
    Ok(calls)
}

/// Faults cycling through call, error and start, each at a different place, until there are `count`
/// or no more.
fn planned(starts: &[Start], count: usize, seed: u64) -> Vec<Fault> {
    let mut queues: Vec<Vec<Fault>> = Vec::new();
    for (call, errors) in FAULTS {
        let mut queue = Vec::new();
        for (start, found) in starts.iter().enumerate() {
            let Some(Calls { first, last }) = found.calls.get(call).copied() else { continue };
            for number in first..=last {
                queue.extend(errors.iter().map(|error| Fault { start, call, error, number }));
            }
        }
        let mut random = Random::of(seed, call, 0);
        for index in (1..queue.len()).rev() {
            queue.swap(index, random.below(index + 1));
        }
        queues.push(queue);
    }
    let mut faults = Vec::new();
    while faults.len() < count && queues.iter().any(|queue| !queue.is_empty()) {
        faults.extend(queues.iter_mut().filter_map(Vec::pop));
    }
    faults.truncate(count);
    faults
}

struct Suffered {
    /// The call that was to fail was made.
    met: bool,
    finished: bool,
    wrong: Option<String>,
}

fn suffered(program: &Path, fault: &Fault, start: &Start, place: &RunPlace) -> Result<Suffered, String> {
    let output = place.scene.join(OUTPUT);
    remove(&output)?;
    if let Some((folder, _)) = &start.stopped {
        copy(folder, &output)?;
    }
    let arguments = arguments(start.shape, OUTPUT);
    let inject = format!("{}:error={}:when={}", fault.call, fault.error, fault.number);
    let traced = strace::traced(program, &arguments, &[fault.call], Some(&inject), place);
    let ended = program::run(strace::program(), &traced, place, SECONDS)?;
    let met = strace::injected(place)?;
    let finished = ended.code == Some(0);
    let story = format!(
        "{}, {}, {inject} [{}]",
        start.shape.name,
        if start.stopped.is_some() { "resumed" } else { "from the start" },
        met.first().map_or("", String::as_str)
    );
    let what = wrong(&ended, fault, &met).or(lost(start, &output)?).or(afterwards(program, start, place)?);
    Ok(Suffered { met: !met.is_empty(), finished, wrong: what.map(|what| format!("{story}: {what}")) })
}

/// Why an end is wrong, if it is.
fn wrong(ended: &Ended, fault: &Fault, met: &[String]) -> Option<String> {
    // If the message itself could not be written, there is none.
    let mute = fault.call == "write" && met.iter().any(|line| line.contains("write(1,") || line.contains("write(2,"));
    let fitting: &[i32] = match fault.call {
        "write" | "fsync" | "fdatasync" | "rename" | "renameat2" | "mkdir" | "ftruncate" => &[0, 7],
        // A file that cannot be read may be a missing disk, path or device.
        _ => &[0, 2, 4, 6, 7, 8],
    };
    match ended.complaint() {
        Some(what) if !(mute && what.starts_with("a failure without")) => Some(what),
        _ if !ended.code.is_some_and(|code| fitting.contains(&code)) => {
            Some(format!("exit {fitting:?} expected: {}", ended.how()))
        }
        _ => None,
    }
}

/// Checks that the earlier checkpoint still exists.
fn lost(start: &Start, output: &Path) -> Result<Option<String>, String> {
    let Some((folder, step)) = &start.stopped else { return Ok(None) };
    let name = format!("checkpoint-{step}");
    let now = match run_folder::latest(output) {
        Err(error) => return Ok(Some(error)),
        Ok(now) => now,
    };
    if now.is_none_or(|now| now < *step) {
        return Ok(Some(format!("{name} was there, and latest.json names {now:?}")));
    }
    // A newer one may have replaced it.
    if now == Some(*step) { run_folder::difference(&folder.join(&name), &output.join(&name)) } else { Ok(None) }
}

/// Checks that the run ends correctly when resumed without a fault.
fn afterwards(program: &Path, start: &Start, place: &RunPlace) -> Result<Option<String>, String> {
    let ended = program::run(program, &arguments(start.shape, OUTPUT), place, SECONDS)?;
    if !ended.ok() {
        return Ok(Some(format!("resumed afterwards: {}", ended.how())));
    }
    run_folder::difference(&start.whole, &place.scene.join(OUTPUT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_go_round_the_calls_and_none_comes_twice() {
        let calls = |pairs: &[(&str, usize, usize)]| {
            pairs.iter().map(|(name, first, last)| (name.to_string(), Calls { first: *first, last: *last })).collect()
        };
        let start = |calls| Start { shape: &SHAPES[0], whole: PathBuf::new(), stopped: None, calls };
        let starts = [start(calls(&[("write", 3, 40), ("fsync", 1, 2)])), start(calls(&[("write", 1, 1)]))];
        let faults = planned(&starts, 20, 1);
        assert_eq!(faults.len(), 20);
        assert_eq!(faults.iter().filter(|fault| fault.call == "fsync").count(), 4);
        let all = planned(&starts, 1000, 1);
        assert_eq!(all.len(), 38 * 3 + 2 * 2 + 3);
        let mut names: Vec<_> = all.iter().map(|f| (f.start, f.call, f.error, f.number)).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all.len());
        assert!(all.iter().all(|fault| fault.start == 1 || fault.call != "write" || fault.number >= 3));
    }
}
