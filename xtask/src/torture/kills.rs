//! Runs are killed and stopped at random moments, resumed and killed again until they end. The
//! folder must then equal that of an undisturbed run, and every resume must continue from the
//! newest checkpoint.
//!
//! A moment is a time, the writing of a checkpoint (its temporary folder has appeared), or, if
//! `strace` works, a certain system call.

use super::program::{self, Ended, RunPlace, Started, words};
use super::random::Random;
use super::scene::{SECONDS, SHAPES, Scene, Shape, copy, remove};
use super::strace::{self, Calls};
use super::{Report, Settings, run_folder};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const COUNT: usize = 600;
/// Kills of one run before it may run to its end.
const IN_A_ROW: usize = 8;
/// Calls that change the disk.
const CALLS: [&str; 9] =
    ["openat", "write", "fsync", "fdatasync", "rename", "unlinkat", "unlink", "mkdir", "ftruncate"];
const OUTPUT: &str = "out";

/// Measurements of a shape before it is killed.
struct Whole {
    shape: &'static Shape,
    folder: PathBuf,
    /// How long it takes, including startup.
    microseconds: u64,
    calls: BTreeMap<String, Calls>,
}

#[derive(Clone, Copy, PartialEq)]
enum Blow {
    Kill,
    Terminate,
    Interrupt,
    InterruptTwice,
}

enum Moment {
    Time(Duration),
    /// This long after a checkpoint begins to be written.
    Saving(Duration),
    Call(String, usize),
}

/// What a run has reported so far.
#[derive(Default)]
struct Told {
    /// The newest checkpoint in a `saved` event.
    saved: u64,
    kills: usize,
}

pub(crate) fn run(settings: &Settings) -> Result<Report, String> {
    let scene = Scene::new(settings)?;
    let traces = strace::works();
    if !traces {
        eprintln!("kills: strace is missing or may not trace; no kills at system calls (Debian: apt install strace)");
    }
    let mut wholes = Vec::new();
    for shape in &SHAPES {
        wholes.push(whole(&scene, shape, settings, traces)?);
    }
    let count = settings.count(COUNT);
    let (kills, runs) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let findings = settings.cases(
        "kills",
        |folder| prepared(&scene, folder),
        |_| kills.load(Ordering::Relaxed) < count,
        |place, case| {
            let mut random = Random::of(settings.seed, "kills", case);
            let whole = &wholes[case % wholes.len()];
            let trial = Trial { program: &settings.program, whole, place, only_kills: settings.only_kills };
            let mut told = Told::default();
            let found = trial.run(&mut random, &mut told)?;
            kills.fetch_add(told.kills, Ordering::Relaxed);
            runs.fetch_add(1, Ordering::Relaxed);
            Ok(found.into_iter().collect())
        },
    )?;
    let (kills, runs) = (kills.into_inner(), runs.into_inner());
    let blows = if settings.only_kills { "kills" } else { "kills and signals" };
    Ok(Report { done: format!("{kills} {blows} in {runs} runs"), findings })
}

fn whole(scene: &Scene, shape: &'static Shape, settings: &Settings, traces: bool) -> Result<Whole, String> {
    let (folder, microseconds) = scene.whole(shape)?;
    let mut calls = BTreeMap::new();
    if traces {
        let place = RunPlace { scene: scene.folder.clone(), logs: settings.place("kills-calls")? };
        let file = shape.file();
        let arguments = words(&["train", &file, "-q", "--set", "output_dir=traced"]);
        calls = strace::counted(&settings.program, &arguments, &CALLS, &file, &place)?;
        remove(&scene.folder.join("traced"))?;
    }
    Ok(Whole { shape, folder, microseconds, calls })
}

/// A copy of the scene for one thread.
fn prepared(scene: &Scene, folder: &Path) -> Result<RunPlace, String> {
    let place = RunPlace { scene: folder.join("scene"), logs: folder.to_path_buf() };
    remove(&place.scene)?;
    copy(&scene.folder.join("model"), &place.scene.join("model"))?;
    for file in SHAPES.iter().map(Shape::file).chain(["pirate.jsonl".to_string()]) {
        let from = scene.folder.join(&file);
        std::fs::copy(&from, place.scene.join(&file)).map_err(|error| format!("{}: {error}", from.display()))?;
    }
    Ok(place)
}

struct Trial<'a> {
    program: &'a Path,
    whole: &'a Whole,
    place: &'a RunPlace,
    only_kills: bool,
}

impl Trial<'_> {
    /// One run, killed until it ends; returns what is wrong, if anything.
    fn run(&self, random: &mut Random, told: &mut Told) -> Result<Option<String>, String> {
        let output = self.place.scene.join(OUTPUT);
        remove(&output)?;
        let name = self.whole.shape.name;
        let mut story = vec![name.to_string()];
        loop {
            let before = run_folder::latest(&output).map_err(|error| format!("before a resume: {error}"))?;
            let newest = run_folder::newest(&output)?;
            let (ended, blow) = if told.kills < IN_A_ROW {
                let (blow, moment) = chosen(random, self.whole, self.only_kills);
                story.push(told_of(blow, &moment));
                (self.struck(random, blow, &moment)?, Some(blow))
            } else {
                story.push("let through".to_string());
                (program::run(self.program, &self.arguments(), self.place, SECONDS)?, None)
            };
            let wrong = |what: String| Ok(Some(format!("{}: {what}", story.join(", "))));
            if let Some(what) = resumed_elsewhere(&ended, before, newest, told.saved) {
                return wrong(what);
            }
            for event in ended.events().filter(|event| event["event"] == "saved") {
                let step = event["checkpoint"].as_str().and_then(|name| name.strip_prefix("checkpoint-")?.parse().ok());
                told.saved = told.saved.max(step.unwrap_or(0));
            }
            if ended.code == Some(0) {
                let found = run_folder::difference(&self.whole.folder, &output)?;
                return Ok(found.map(|what| format!("{}: {what}", story.join(", "))));
            }
            if let Some(what) = ended_badly(&ended, blow) {
                return wrong(what);
            }
            match run_folder::latest(&output) {
                Err(error) => return wrong(error),
                Ok(latest) => {
                    if latest.unwrap_or(0) < told.saved {
                        return wrong(format!("checkpoint-{} was saved; latest.json names {latest:?}", told.saved));
                    }
                    if let Some(what) = saved_badly(&ended, blow, latest) {
                        return wrong(what);
                    }
                }
            }
            told.kills += 1;
        }
    }

    fn arguments(&self) -> Vec<String> {
        let set = format!("output_dir={OUTPUT}");
        words(&["train", &self.whole.shape.file(), "--resume", "--json", "--set", &set])
    }

    /// Starts or resumes the run, strikes, and waits for its end.
    fn struck(&self, random: &mut Random, blow: Blow, moment: &Moment) -> Result<Ended, String> {
        if let Moment::Call(call, number) = moment {
            let inject = format!("{call}:signal={}:when={number}", if blow == Blow::Kill { "KILL" } else { "TERM" });
            let traced = strace::traced(self.program, &self.arguments(), &CALLS, Some(&inject), self.place);
            return program::run(strace::program(), &traced, self.place, SECONDS);
        }
        let mut started = program::start(self.program, &self.arguments(), self.place)?;
        match moment {
            Moment::Time(time) => std::thread::sleep(*time),
            Moment::Saving(more) => {
                self.wait_for_save(&mut started);
                std::thread::sleep(*more);
            }
            Moment::Call(..) => {}
        }
        match blow {
            Blow::Kill => started.signal(libc::SIGKILL),
            Blow::Terminate => started.signal(libc::SIGTERM),
            Blow::Interrupt => started.signal(libc::SIGINT),
            Blow::InterruptTwice => {
                started.signal(libc::SIGINT);
                std::thread::sleep(Duration::from_micros(random.below(4_000) as u64));
                if started.is_running() {
                    started.signal(libc::SIGINT);
                }
            }
        }
        started.end(SECONDS)
    }

    /// Waits until a temporary checkpoint folder appears, or the run is over.
    fn wait_for_save(&self, started: &mut Started) {
        let output = self.place.scene.join(OUTPUT);
        while started.is_running() {
            let names = run_folder::names(&output).unwrap_or_default();
            if names.iter().any(|name| name.starts_with(".checkpoint-") || name.starts_with(".final")) {
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

fn chosen(random: &mut Random, whole: &Whole, only_kills: bool) -> (Blow, Moment) {
    let (blow, moment) = chosen_among_all(random, whole);
    (if only_kills { Blow::Kill } else { blow }, moment)
}

fn chosen_among_all(random: &mut Random, whole: &Whole) -> (Blow, Moment) {
    let later = Duration::from_micros(random.below(3_000) as u64);
    let at_call = !whole.calls.is_empty() && random.once_in(3);
    if at_call {
        let names: Vec<&String> = whole.calls.keys().collect();
        let name = *random.pick(&names);
        let Calls { first, last } = whole.calls[name];
        // A resumed run makes fewer of them.
        let number = first + random.below((last + 1 - first).div_ceil(3));
        let blow = if random.once_in(4) { Blow::Terminate } else { Blow::Kill };
        return (blow, Moment::Call(name.clone(), number));
    }
    let blow =
        *random.pick(&[Blow::Kill, Blow::Kill, Blow::Kill, Blow::Terminate, Blow::Interrupt, Blow::InterruptTwice]);
    if random.once_in(2) {
        return (blow, Moment::Saving(later));
    }
    (blow, Moment::Time(Duration::from_micros(random.below(whole.microseconds as usize * 2 / 3) as u64)))
}

fn told_of(blow: Blow, moment: &Moment) -> String {
    let blow = match blow {
        Blow::Kill => "SIGKILL",
        Blow::Terminate => "SIGTERM",
        Blow::Interrupt => "SIGINT",
        Blow::InterruptTwice => "SIGINT twice",
    };
    match moment {
        Moment::Time(time) => format!("{blow} after {} µs", time.as_micros()),
        Moment::Saving(more) => format!("{blow} {} µs into a save", more.as_micros()),
        Moment::Call(call, number) => format!("{blow} at {call} {number}"),
    }
}

/// Checks that a run resumed from the newest checkpoint, if it got far enough to report it.
fn resumed_elsewhere(ended: &Ended, latest: Option<u64>, newest: Option<u64>, saved: u64) -> Option<String> {
    let started = ended.events().find(|event| event["event"] == "started")?;
    let from = started["from_step"].as_u64()?;
    let (latest, newest) = (latest.unwrap_or(0), newest.unwrap_or(0));
    let right = (from == latest || from == newest) && from >= saved;
    (!right).then(|| {
        format!("it went on from {from}; latest.json says {latest}, the newest folder {newest}, it had told of {saved}")
    })
}

/// Checks that a run ended by a blow ended accordingly.
fn ended_badly(ended: &Ended, blow: Option<Blow>) -> Option<String> {
    let begun = ended.events().any(|event| event["event"] == "started");
    let fits = match blow {
        None => false,
        Some(Blow::Kill) => ended.signal == Some(libc::SIGKILL),
        // Before the handler is installed, a signal stops it as it does any other program.
        Some(Blow::Terminate) => ended.code == Some(143) || (!begun && ended.signal == Some(libc::SIGTERM)),
        Some(Blow::Interrupt) => ended.code == Some(130) || (!begun && ended.signal == Some(libc::SIGINT)),
        Some(Blow::InterruptTwice) => {
            ended.code == Some(9) || ended.code == Some(130) || (!begun && ended.signal == Some(libc::SIGINT))
        }
    };
    let crash = ended.err.contains("panicked at") || ended.late;
    (!fits || crash).then(|| ended.how())
}

/// Checks that a clean stop saved the step it had reached.
fn saved_badly(ended: &Ended, blow: Option<Blow>, latest: Option<u64>) -> Option<String> {
    let once = matches!(blow, Some(Blow::Terminate | Blow::Interrupt));
    if !once || !matches!(ended.code, Some(130 | 143)) {
        return None;
    }
    let last = ended.events().filter(|event| event["event"] == "step").filter_map(|event| event["step"].as_u64()).max();
    let lost = last.is_some_and(|last| latest != Some(last));
    lost.then(|| format!("stopped cleanly after step {last:?}, and latest.json names {latest:?}"))
}
