//! Feeds inputs by the hundred thousand directly to the libraries. Workers are separate processes,
//! so that a stack overflow or a failed allocation is a finding and not the end: the parent sees at
//! which input a worker died or hung, and starts another after it.

use super::fuzz_targets::{Reached, TARGETS, Target};
use super::random::Random;
use super::{Finding, Report, Settings, locked};
use crate::arguments::Arguments;
use crate::repository::now;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) const WORKER: &str = "fuzz-worker";
const COUNT: usize = 820_000;
/// Inputs per worker.
const CHUNK: usize = 5_000;
/// Time limit of one input.
const HANG_SECONDS: u64 = 20;
/// Worker deaths in one chunk before the rest of it is given up.
const DEATHS_MAX: usize = 40;
const MEMORY_BYTES: u64 = 6 << 30;
/// Exit codes of a worker whose input exceeded a limit that the program reports with an exit code:
/// 4 or 8.
const REFUSALS: [i32; 2] = [4, 8];

struct Chunk {
    target: &'static Target,
    from: usize,
    to: usize,
}

pub(crate) fn run(settings: &Settings) -> Result<Report, String> {
    let chunks = chunks(settings)?;
    let (done, findings, coverage) = (AtomicU64::new(0), Mutex::new(Vec::new()), Mutex::new(Coverage::new()));
    let all = Settings {
        case: None,
        program: settings.program.clone(),
        folder: settings.folder.clone(),
        target: None,
        ..*settings
    };
    all.cases(
        "fuzz",
        |folder| Ok(folder.to_path_buf()),
        |case| case < chunks.len(),
        |place: &mut PathBuf, case| {
            let chunk = &chunks[case];
            let (count, found) = supervised(settings.seed, chunk, place)?;
            done.fetch_add(count as u64, Ordering::Relaxed);
            add_reached(&coverage, chunk.target.name, &place.join(REACHED))?;
            eprintln!("fuzz: {} {}..{}", chunk.target.name, chunk.from, chunk.to);
            locked(&findings).extend(found);
            Ok(Vec::new())
        },
    )?;
    print_coverage(&locked(&coverage));
    let mut findings = findings.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    findings.sort_by(|a: &Finding, b| (&a.what, a.case).cmp(&(&b.what, b.case)));
    Ok(Report { done: format!("{} inputs of {} targets", done.into_inner(), TARGETS.len()), findings })
}

fn chunks(settings: &Settings) -> Result<Vec<Chunk>, String> {
    let wanted = |target: &&Target| settings.target.as_ref().is_none_or(|name| name == target.name);
    let targets: Vec<&'static Target> = TARGETS.iter().filter(wanted).collect();
    if targets.is_empty() {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        return Err(format!("--target is one of {}", names.join(", ")));
    }
    if let Some(case) = settings.case {
        if targets.len() != 1 {
            return Err("--case of fuzz needs --target too".to_string());
        }
        return Ok(vec![Chunk { target: targets[0], from: case, to: case + 1 }]);
    }
    let (count, shares) = (settings.count(COUNT), targets.iter().map(|target| target.share).sum::<usize>());
    let mut chunks = Vec::new();
    for target in targets {
        let total = (count * target.share).div_ceil(shares);
        let starts = (0..total).step_by(CHUNK);
        chunks.extend(starts.map(|from| (from * 1_000 / total, Chunk { target, from, to: (from + CHUNK).min(total) })));
    }
    // All targets in turn, so that a run that is cut short has tried each.
    chunks.sort_by_key(|(part, _)| *part);
    Ok(chunks.into_iter().map(|(_, chunk)| chunk).collect())
}

/// Runs workers over a chunk until it is done. Returns the number of inputs tried, and the
/// findings.
fn supervised(seed: u64, chunk: &Chunk, place: &Path) -> Result<(usize, Vec<Finding>), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", place.display());
    let program = std::env::current_exe().map_err(failed)?;
    let (progress, found) = (place.join("progress"), place.join("findings"));
    std::fs::write(&found, "").map_err(failed)?;
    super::scene::remove(&place.join(REACHED))?;
    let (mut from, mut findings) = (chunk.from, Vec::new());
    let mut deaths = 0;
    while from < chunk.to {
        std::fs::write(&progress, (from as u64).to_le_bytes()).map_err(failed)?;
        let mut command = Command::new(&program);
        command.args(["torture", WORKER, "--target", chunk.target.name, "--place"]).arg(place);
        command.args(["--from", &from.to_string(), "--to", &chunk.to.to_string(), "--seed", &seed.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(File::create(place.join("stderr")).map_err(failed)?);
        let mut child = command.spawn().map_err(failed)?;
        let (mut at, mut since) = (from, now());
        let status: Option<ExitStatus> = loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                break Some(status);
            }
            let seen = read_progress(&progress)?;
            if seen != at {
                (at, since) = (seen, now());
            }
            if since.elapsed().as_secs() >= HANG_SECONDS {
                child.kill().and_then(|()| child.wait().map(drop)).map_err(failed)?;
                break None;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let at = read_progress(&progress)?;
        let text = String::from_utf8_lossy(&std::fs::read(place.join("stderr")).map_err(failed)?).trim().to_string();
        let told: String = text.replace('\n', " ").chars().take(200).collect();
        let how = match status.map(|status| (status.code(), status.signal())) {
            Some((Some(0), _)) => break,
            Some((Some(1), _)) => return Err(format!("a worker of {}: {told}", chunk.target.name)),
            Some((Some(code), _)) if REFUSALS.contains(&code) => {
                writeln!(appended(&place.join(REACHED))?, "exit code {code}").map_err(failed)?;
                None
            }
            Some((code, signal)) => Some(format!("the process died ({code:?}, signal {signal:?}): {told}")),
            None => Some(format!("no end within {HANG_SECONDS} s")),
        };
        if let Some(how) = how {
            findings.push(Finding { case: at, what: format!("--target {}: {how}", chunk.target.name) });
            deaths += 1;
        }
        from = at + 1;
        if deaths >= DEATHS_MAX {
            let what = format!("--target {}: given up after {deaths} deaths", chunk.target.name);
            findings.push(Finding { case: from, what });
            return Ok((from - chunk.from, with_told(findings, chunk, &found)?));
        }
    }
    Ok((chunk.to - chunk.from, with_told(findings, chunk, &found)?))
}

fn read_progress(path: &Path) -> Result<usize, String> {
    let bytes = super::run_folder::read(path)?;
    Ok(bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)) as usize)
}

/// Adds the findings that the workers recorded themselves.
fn with_told(mut findings: Vec<Finding>, chunk: &Chunk, file: &Path) -> Result<Vec<Finding>, String> {
    let text = String::from_utf8_lossy(&super::run_folder::read(file)?).into_owned();
    for line in text.lines() {
        let (case, what) = line.split_once('\t').unwrap_or(("0", line));
        let case = case.parse().unwrap_or(0);
        findings.push(Finding { case, what: format!("--target {}: {what}", chunk.target.name) });
    }
    Ok(findings)
}

/// The worker: runs the inputs of one target in order. A single one is also written to `input`.
pub(crate) fn work(arguments: &mut Arguments) -> Result<(), String> {
    let wants = |name: &str| format!("{name} is missing");
    let name = arguments.option("--target")?.ok_or_else(|| wants("--target"))?;
    let place = arguments.option("--place")?.map(PathBuf::from).ok_or_else(|| wants("--place"))?;
    let (from, to) = (arguments.number("--from", 0)?, arguments.number("--to", 0)?);
    let seed: u64 = arguments.parsed("--seed")?.unwrap_or(1);
    arguments.finish()?;
    let target = TARGETS.iter().find(|target| target.name == name).ok_or_else(|| wants("the target"))?;
    limit_memory()?;
    let failed = |error: std::io::Error| format!("{}: {error}", place.display());
    let progress = File::options().write(true).open(place.join("progress")).map_err(failed)?;
    let mut found = File::options().append(true).open(place.join("findings")).map_err(failed)?;
    let corpus = (target.corpus)()?;
    let mut check = (target.prepare)(&place)?;
    // A panic that is caught on the way is not a finding; one that reaches this point is reported
    // below.
    let last = std::sync::Arc::new(Mutex::new(String::new()));
    let seen = std::sync::Arc::clone(&last);
    std::panic::set_hook(Box::new(move |panic| *locked(&seen) = panic.to_string().replace('\n', " ")));
    let mut reached = appended(&place.join(REACHED))?;
    for case in from..to {
        progress.write_all_at(&(case as u64).to_le_bytes(), 0).map_err(failed)?;
        let input = (target.make)(&mut Random::of(seed, target.name, case), &corpus);
        if to - from == 1 {
            std::fs::write(place.join("input"), &input).map_err(failed)?;
        }
        let what = match catch_unwind(AssertUnwindSafe(|| check(&input))) {
            Ok(Ok(how_far)) => {
                writeln!(reached, "{}", kind_of(&how_far)).map_err(failed)?;
                continue;
            }
            Ok(Err(what)) => what,
            Err(_) => format!("a panic: {}", locked(&last)),
        };
        let what: String = what.replace('\n', " ").chars().take(300).collect();
        writeln!(found, "{case}\t{what}").map_err(failed)?;
    }
    Ok(())
}

fn appended(path: &Path) -> Result<File, String> {
    let file = File::options().append(true).create(true).open(path);
    file.map_err(|error| format!("{}: {error}", path.display()))
}

/// Where workers write how far each input got.
const REACHED: &str = "reached";
const ACCEPTED: &str = "accepted";

/// An outcome without what depends on the input: messages of one line of code are one kind.
fn kind_of(reached: &Reached) -> String {
    let Reached::Refused(text) = reached else { return ACCEPTED.to_string() };
    let mut kind = String::new();
    let mut quote = None;
    for letter in text.chars() {
        match quote {
            Some(end) if letter == end => quote = None,
            Some(_) => {}
            None if matches!(letter, '"' | '`') => quote = Some(letter),
            None if letter.is_ascii_digit() || letter.is_control() => {}
            None => kind.push(letter),
        }
        if kind.len() > 160 {
            break;
        }
    }
    kind
}

/// How far the inputs of each target got, with counts.
type Coverage = BTreeMap<&'static str, BTreeMap<String, u64>>;

fn add_reached(coverage: &Mutex<Coverage>, target: &'static str, file: &Path) -> Result<(), String> {
    let text = if file.exists() { super::run_folder::read(file)? } else { Vec::new() };
    let mut coverage = locked(coverage);
    let of_target = coverage.entry(target).or_default();
    for line in String::from_utf8_lossy(&text).lines() {
        *of_target.entry(line.to_string()).or_default() += 1;
    }
    Ok(())
}

/// A table of targets: inputs, how many were accepted, and how many different refusals were seen.
fn print_coverage(coverage: &Coverage) {
    println!("| target | inputs | accepted | different refusals |\n|---|---|---|---|");
    for (target, kinds) in coverage {
        let (all, accepted) = (kinds.values().sum::<u64>(), kinds.get(ACCEPTED).copied().unwrap_or(0));
        println!("| {target} | {all} | {accepted} | {} |", kinds.keys().filter(|kind| *kind != ACCEPTED).count());
    }
}

fn limit_memory() -> Result<(), String> {
    let memory = libc::rlimit { rlim_cur: MEMORY_BYTES, rlim_max: MEMORY_BYTES };
    // SAFETY: the structure lives until the call returns.
    let failed = unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const memory) } != 0;
    if failed { Err(std::io::Error::last_os_error().to_string()) } else { Ok(()) }
}
