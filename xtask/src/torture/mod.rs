//! `cargo xtask torture`: kills, I/O faults, hostile files, fuzzed inputs and user mistakes, in
//! large numbers.
//!
//! Each kind has a file. A case is a function of the seed and its number, so `--case N` repeats it
//! alone and keeps its folder. All kinds but `fuzz` run the release binary; `fuzz` calls the
//! libraries. A finding is anything but a clean end: a panic, a signal, a hang, an undocumented
//! exit code, a failure without a message, a lost checkpoint, a changed input, different bytes.

mod faults;
mod files;
mod fuzz;
mod fuzz_files;
mod fuzz_manifest;
mod fuzz_quantised;
mod fuzz_record;
mod fuzz_targets;
mod hostile;
mod kills;
mod mistakes;
mod mutate;
mod program;
pub(crate) mod random;
mod run_folder;
mod scene;
mod strace;

use crate::arguments::Arguments;
use crate::repository::{now, root};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What to do, and where.
pub(crate) struct Settings {
    /// The program under test.
    program: PathBuf,
    seed: u64,
    /// Cases run in parallel.
    jobs: usize,
    count: Option<usize>,
    /// After so many seconds no further case begins.
    seconds: Option<u64>,
    /// Run only this case.
    case: Option<usize>,
    /// Of the blows of `kills` only SIGKILL.
    only_kills: bool,
    /// Run only this target of `fuzz`.
    target: Option<String>,
    /// Everything is written below this folder.
    folder: PathBuf,
    /// Whether the folder stays.
    is_kept: bool,
}

/// What a kind did and found.
pub(crate) struct Report {
    /// What was counted: "580 kills in 97 runs".
    done: String,
    findings: Vec<Finding>,
}

pub(crate) struct Finding {
    case: usize,
    what: String,
}

type Kind = (&'static str, fn(&Settings) -> Result<Report, String>);

const KINDS: [Kind; 5] = [
    ("mistakes", mistakes::run),
    ("kills", kills::run),
    ("faults", faults::run),
    ("files", files::run),
    ("fuzz", fuzz::run),
];

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let kind = arguments.word("a kind").unwrap_or_else(|_| "all".to_string());
    if kind == fuzz::WORKER {
        return fuzz::work(arguments);
    }
    let chosen: Vec<Kind> = KINDS.into_iter().filter(|(name, _)| kind == "all" || kind == *name).collect();
    if chosen.is_empty() {
        let names: Vec<&str> = KINDS.iter().map(|(name, _)| *name).collect();
        return Err(format!("`{kind}` is not one of {}, all", names.join(", ")));
    }
    let settings = settings(arguments)?;
    tortured(&chosen, &settings)
}

/// Kills the program so many times, and does nothing else.
pub(crate) fn kill(arguments: &mut Arguments, count: usize) -> Result<(), String> {
    let settings = Settings { count: Some(count), only_kills: true, ..settings(arguments)? };
    tortured(&[("kills", kills::run)], &settings)
}

fn settings(arguments: &mut Arguments) -> Result<Settings, String> {
    let program = arguments.option("--isobit")?.map_or_else(|| root().join("target/release/isobit"), PathBuf::from);
    let program = std::fs::canonicalize(&program)
        .map_err(|error| format!("{}: {error}; build it with `cargo build --release`", program.display()))?;
    let kept = arguments.option("--keep")?.map(PathBuf::from);
    let folder =
        kept.clone().unwrap_or_else(|| std::env::temp_dir().join(format!("isobit-torture-{}", std::process::id())));
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let folder = std::fs::canonicalize(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let settings = Settings {
        program,
        seed: arguments.parsed("--seed")?.unwrap_or(1),
        jobs: arguments.number("--jobs", 2)?.max(1),
        count: arguments.parsed("--count")?,
        seconds: arguments.parsed("--seconds")?,
        case: arguments.parsed("--case")?,
        only_kills: false,
        target: arguments.option("--target")?,
        is_kept: kept.is_some(),
        folder,
    };
    arguments.finish()?;
    Ok(settings)
}

fn tortured(chosen: &[Kind], settings: &Settings) -> Result<(), String> {
    let mut findings = 0;
    for (name, run) in chosen {
        let begun = now();
        let report = run(settings)?;
        for line in told(&report.findings) {
            println!("{name} --seed {} {line}", settings.seed);
        }
        println!(
            "{name}: {}, {} findings, seed {}, {:.0} s",
            report.done,
            report.findings.len(),
            settings.seed,
            begun.elapsed().as_secs_f64()
        );
        findings += report.findings.len();
    }
    if !settings.is_kept && settings.case.is_none() {
        // Remains of a temporary folder do no harm.
        let _ = std::fs::remove_dir_all(&settings.folder);
    } else {
        println!("files in {}", settings.folder.display());
    }
    if findings == 0 { Ok(()) } else { Err(format!("{findings} findings")) }
}

/// Findings of a kind that are reported in full.
const ALIKE_MAX: usize = 4;

/// One line per finding; of many that begin alike, the first few and their count.
fn told(findings: &[Finding]) -> Vec<String> {
    let mut alike: BTreeMap<String, usize> = BTreeMap::new();
    let mut lines = Vec::new();
    for Finding { case, what } in findings {
        let key: String = what.chars().filter(|c| !c.is_ascii_digit()).take(50).collect();
        let count = alike.entry(key).or_default();
        *count += 1;
        if *count <= ALIKE_MAX {
            lines.push(format!("--case {case}: {what}"));
        }
    }
    let more = alike.into_iter().filter(|(_, count)| *count > ALIKE_MAX);
    lines.extend(more.map(|(key, count)| format!("and {} more like: {key} …", count - ALIKE_MAX)));
    lines
}

impl Settings {
    /// The number of cases, if the kind's default is `default`.
    fn count(&self, default: usize) -> usize {
        self.count.unwrap_or(default)
    }

    /// Creates a folder for a kind.
    fn place(&self, name: &str) -> Result<PathBuf, String> {
        let place = self.folder.join(name);
        std::fs::create_dir_all(&place).map_err(|error| format!("{}: {error}", place.display()))?;
        Ok(place)
    }

    /// Runs cases 0, 1, 2 … on `jobs` threads while `more` returns true and time is left, with a
    /// folder per thread, and collects their findings in order. An error ends the kind: it is the
    /// machine's or ours, not the program's.
    fn cases<W>(
        &self,
        kind: &str,
        worker: impl Fn(&Path) -> Result<W, String> + Sync,
        more: impl Fn(usize) -> bool + Sync,
        case: impl Fn(&mut W, usize) -> Result<Vec<String>, String> + Sync,
    ) -> Result<Vec<Finding>, String> {
        let (next, found, begun) = (AtomicUsize::new(0), Mutex::new(Ok(Vec::new())), now());
        let in_time = || self.seconds.is_none_or(|seconds| begun.elapsed().as_secs() < seconds);
        let one = |job: usize| -> Result<(), String> {
            let mut state = worker(&self.place(&format!("{kind}-{job}"))?)?;
            loop {
                let number = self.case.unwrap_or_else(|| next.fetch_add(1, Ordering::Relaxed));
                if !more(number) || !in_time() || locked(&found).is_err() {
                    return Ok(());
                }
                let what = case(&mut state, number)?;
                if let Ok(all) = &mut *locked(&found) {
                    all.extend(what.into_iter().map(|what| Finding { case: number, what }));
                }
                if self.case.is_some() {
                    return Ok(());
                }
                if number % 500 == 499 {
                    eprintln!("{kind}: case {}", number + 1);
                }
            }
        };
        std::thread::scope(|scope| {
            for job in 0..if self.case.is_some() { 1 } else { self.jobs } {
                let (one, found) = (&one, &found);
                scope.spawn(move || {
                    if let Err(error) = one(job) {
                        *locked(found) = Err(error);
                    }
                });
            }
        });
        let mut found: Vec<Finding> = found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)?;
        found.sort_by_key(|finding| finding.case);
        Ok(found)
    }
}

/// A panic of another thread ends the scope anyway.
fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_that_are_alike_are_counted() {
        let finding = |case: usize, what: String| Finding { case, what };
        let mut findings: Vec<Finding> = (0..9).map(|case| finding(case, format!("hangs after {case} s"))).collect();
        findings.push(finding(9, "exit 8".to_string()));
        let lines = told(&findings);
        assert_eq!(lines.len(), ALIKE_MAX + 2);
        assert_eq!(lines[0], "--case 0: hangs after 0 s");
        assert_eq!(lines[ALIKE_MAX], "--case 9: exit 8");
        assert_eq!(lines[ALIKE_MAX + 1], "and 5 more like: hangs after  s …");
    }

    #[test]
    fn cases_run_once_each_and_an_error_ends_them() {
        let folder = std::env::temp_dir().join(format!("isobit-torture-test-{}", std::process::id()));
        let settings = Settings {
            program: PathBuf::new(),
            seed: 1,
            jobs: 3,
            count: None,
            seconds: None,
            case: None,
            only_kills: false,
            target: None,
            folder: folder.clone(),
            is_kept: true,
        };
        let odd = |(): &mut (), case: usize| Ok(if case % 2 == 1 { vec![case.to_string()] } else { vec![] });
        let found = settings.cases("test", |_| Ok(()), |case| case < 20, odd).expect("no error");
        let cases: Vec<usize> = found.iter().map(|finding| finding.case).collect();
        assert_eq!(cases, (1..20).step_by(2).collect::<Vec<_>>());
        let broken = |(): &mut (), case: usize| if case == 5 { Err("broken".to_string()) } else { Ok(vec![]) };
        let ended = settings.cases("test", |_| Ok(()), |_| true, broken);
        assert_eq!(ended.err().as_deref(), Some("broken"));
        scene::remove(&folder).expect("removed");
    }
}
