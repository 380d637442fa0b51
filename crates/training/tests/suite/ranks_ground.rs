//! A folder in which ranks train as threads of one process, with faults on request.

use isobit_kernels::{Cpu, Path as CpuPath};
use isobit_models::build;
use isobit_proof::receipt::Receipt;
use isobit_training::checkpoint::Start;
use isobit_training::config;
use isobit_training::metrics::without_timing;
use isobit_training::prepare::{Prepared, RunError, prepare};
use isobit_training::ranks::threads::{Thread, world};
use isobit_training::ranks::{
    Channel, Message, Neighbours, RankError, RankFailure, Team, World, WorldError, handshake,
};
use isobit_training::run::{Outcome, Watch, is_sharded, train_with};
use isobit_training::signal::Signal;
use isobit_training::stages::{Divided, Stage, StageDevice, Stages};
use isobit_training::trainer::Trainer;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a rank does wrong.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fault {
    /// Leaves without a word instead of sending its message of this number.
    Dies(usize),
    /// Does not send from this message on, and stays.
    Hangs(usize),
    /// Sends this message late.
    Delays(usize),
    /// Changes a bit of this message.
    Corrupts(usize),
    /// Its weights begin different.
    OtherWeights,
    /// Cannot build the model.
    NoDevice,
    /// Has other settings.
    Sets(&'static str),
    /// Has other rows.
    OtherData,
    /// Has another base model.
    OtherBase,
    /// Receives a signal once it has been asked so many times.
    Signal(usize),
}

/// Seconds until a rank counts as lost, in runs where one does.
const TIMEOUT: &str = "rank_timeout=1";

/// How ranks of one run ended.
pub(crate) type Ended = Vec<Result<Outcome, RunError>>;

pub(crate) struct Ground {
    held: tempfile::TempDir,
    base: PathBuf,
    adapter: &'static str,
    /// Whether even ranks divide the layers among two devices.
    pub(crate) lists: bool,
    /// What the last run told rank 0 of its communication.
    pub(crate) communication: Mutex<f64>,
}

impl Ground {
    /// A fixture of the models, and an [adapter] section.
    pub(crate) fn new(fixture: &str, adapter: &'static str) -> Self {
        let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures").join(fixture);
        let ground = Self {
            held: tempfile::tempdir().expect("folder"),
            base,
            adapter,
            lists: false,
            communication: Mutex::new(0.0),
        };
        ground.put_data("data.jsonl", 13, 0);
        ground
    }

    pub(crate) fn put_data(&self, name: &str, rows: usize, first: usize) {
        let row = |row: usize| {
            let tokens: Vec<usize> = (0..3 + row * 5 % 17).map(|t| 3 + (t * 7 + row * 11) % 34).collect();
            let labels: Vec<i64> =
                tokens.iter().map(|token| if token % 5 == 2 { -100 } else { *token as i64 }).collect();
            format!("{}\n", serde_json::json!({"input_ids": tokens, "labels": labels}))
        };
        let text: String = (first..first + rows).map(row).collect();
        std::fs::write(self.path(name), text).expect("written");
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.held.path().join(name)
    }

    /// The base model with one bit changed.
    fn put_other_base(&self) -> PathBuf {
        let folder = self.path("other base");
        std::fs::create_dir(&folder).expect("folder");
        for name in ["config.json", "model.safetensors"] {
            let mut bytes = std::fs::read(self.base.join(name)).expect("a file");
            if let (Some(last), true) = (bytes.last_mut(), name == "model.safetensors") {
                *last ^= 1;
            }
            std::fs::write(folder.join(name), bytes).expect("written");
        }
        folder
    }

    pub(crate) fn prepared(&self, output: &str, sets: &[&str], fault: Option<&Fault>) -> Result<Prepared, RunError> {
        let base = if fault == Some(&Fault::OtherBase) { self.put_other_base() } else { self.base.clone() };
        let data = if fault == Some(&Fault::OtherData) { "other.jsonl" } else { "data.jsonl" };
        let text = |path: PathBuf| serde_json::Value::from(path.display().to_string());
        let text = format!(
            "base_model = {}\noutput_dir = {}\n[[datasets]]\npath = {}\n[eval]\nval_set_size = 2\neval_steps = 2\n\
             [training]\nmax_seq_length = 64\nmicro_batch_size = 2\ngradient_accumulation_steps = 2\n\
             gradient_groups = 4\nmax_steps = 5\nsave_steps = 2\nlogging_steps = 1\nlearning_rate = 0.01\n\
             load_best_model_at_end = true\n[adapter]\n{}\n",
            text(base),
            text(self.path(output)),
            text(self.path(data)),
            self.adapter
        );
        let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        prepare(config::parse("run.toml", &text, &sets)?.run)
    }

    /// Trains with so many ranks, of which some have faults.
    pub(crate) fn train(&self, ranks: usize, output: &str, sets: &[&str], faults: &[(usize, Fault)]) -> Ended {
        self.start(ranks, output, sets, faults, Start::New)
    }

    pub(crate) fn start(
        &self,
        ranks: usize,
        output: &str,
        sets: &[&str],
        faults: &[(usize, Fault)],
        start: Start,
    ) -> Ended {
        let sets = if faults.is_empty() { sets.to_vec() } else { [sets, &[TIMEOUT]].concat() };
        std::thread::scope(|scope| {
            let started: Vec<_> = world(ranks)
                .into_iter()
                .enumerate()
                .map(|(rank, thread)| {
                    let fault = faults.iter().find(|(of, _)| *of == rank).map(|(_, fault)| fault);
                    let sets = &sets;
                    scope.spawn(move || self.rank(thread, output, sets, fault, start))
                })
                .collect();
            started.into_iter().map(|thread| thread.join().expect("a rank does not panic")).collect()
        })
    }

    /// One rank, as the program runs it.
    fn rank(
        &self,
        thread: Thread,
        output: &str,
        sets: &[&str],
        fault: Option<&Fault>,
        start: Start,
    ) -> Result<Outcome, RunError> {
        let mut sets = sets.to_vec();
        if let Some(Fault::Sets(set)) = fault {
            sets.push(set);
        }
        let prepared = self.prepared(output, &sets, fault);
        let timeout = prepared.as_ref().map_or(config::RANK_TIMEOUT_DEFAULT, |prepared| prepared.run.rank_timeout);
        let rank = thread.rank();
        let world = Faulty { inner: RefCell::new(Some(thread)), rank, fault: fault.cloned(), sent: Cell::new(0) };
        let asked = Cell::new(0);
        let requested = || {
            asked.set(asked.get() + 1);
            matches!(fault, Some(Fault::Signal(after)) if asked.get() > *after).then_some(Signal::Terminate)
        };
        let team = Team::new(&world, Duration::from_secs(timeout.into())).with_signals(requested);
        let trained = || -> Result<Outcome, RunError> {
            let failure = |error: &RunError| {
                let (code, what, hint) = (error.exit_code(), error.to_string(), error.hint());
                RunError::from(RankError::Failed(RankFailure { rank, code, what, hint }))
            };
            let introduction = prepared.as_ref().map_err(failure);
            let introduction = introduction.and_then(|prepared| handshake::Introduction::of(prepared, team.size()));
            handshake::compare(&team, introduction)?;
            let prepared = prepared.as_ref().expect("otherwise the ranks do not agree");
            if self.lists && rank.is_multiple_of(2) {
                return divided(prepared, start, &team);
            }
            let make = |settings: &build::Settings| {
                if fault == Some(&Fault::NoDevice) {
                    return Err(RunError::Refused { what: "no device".to_string(), hint: "" });
                }
                let mut settings = settings.clone();
                settings.seed += u64::from(fault == Some(&Fault::OtherWeights));
                // Ranks may have different numbers of threads and different instructions.
                let paths = CpuPath::available();
                let cpu = Cpu::new(1 + rank % 2, paths[rank % paths.len()]).expect("an available path");
                let built = isobit_models::build(&cpu, &prepared.model, &prepared.weights, &settings)?;
                Ok(Trainer::new(cpu, built))
            };
            let mut watch = Told(0.0);
            let trained = train_with(make, prepared, start, &team, &mut watch);
            if rank == 0 {
                *self.communication.lock().expect("no rank panics") = watch.0;
            }
            trained
        };
        trained().inspect_err(|error| team.abandon(error.exit_code()))
    }

    /// Everything a run left behind that must not depend on the ranks.
    pub(crate) fn contents(&self, output: &str) -> BTreeMap<String, Vec<u8>> {
        let mut all = BTreeMap::new();
        collect(&self.path(output), "", &mut all);
        all
    }

    #[track_caller]
    pub(crate) fn same(&self, expected: &str, other: &str) {
        let [expected, found] = [expected, other].map(|output| self.contents(output));
        assert_eq!(expected.keys().collect::<Vec<_>>(), found.keys().collect::<Vec<_>>(), "{other}");
        for (name, bytes) in expected {
            assert!(found[&name] == bytes, "{other}: {name} differs");
        }
    }
}

/// A rank whose layers are on two devices.
fn divided(prepared: &Prepared, start: Start, team: &Team<'_>) -> Result<Outcome, RunError> {
    let device = |layers: usize| {
        let open = |stage: Stage<'_>| {
            stage.run(Cpu::new(1, CpuPath::best()).expect("an available path"));
            Ok(())
        };
        StageDevice { name: "cpu".to_string(), layers, open: Box::new(open) }
    };
    let devices = vec![device(1), device(prepared.model.layers.len() - 1)];
    std::thread::scope(|scope| {
        let model = Divided { config: &prepared.model, source: &prepared.weights };
        let with_moments = !is_sharded(&prepared.run, team);
        let make = |settings: &build::Settings| Stages::new(scope, model, settings, with_moments, devices);
        train_with(make, prepared, start, team, &mut Silent)
    })
}

fn collect(folder: &Path, prefix: &str, all: &mut BTreeMap<String, Vec<u8>>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = format!("{prefix}{}", path.file_name().expect("a name").to_string_lossy());
        if path.is_dir() {
            collect(&path, &format!("{name}/"), all);
        } else if name == "metrics.jsonl" {
            let text = std::fs::read_to_string(&path).expect("text");
            all.insert(name, text.lines().map(without_timing).collect::<String>().into_bytes());
        } else if name == "receipt.json" {
            let mut receipt = Receipt::read(folder).expect("a receipt");
            // It has the name of the folder.
            receipt.folder.as_mut().expect("a run folder").files.remove("config.resolved.toml");
            all.insert(name, receipt.to_text().into_bytes());
        } else if !["LOCK", "config.resolved.toml"].contains(&name.as_str()) {
            all.insert(name, std::fs::read(&path).expect("a file"));
        }
    }
}

pub(crate) struct Silent;

impl Watch for Silent {
    fn seconds(&mut self) -> f64 {
        0.0
    }

    fn wall_seconds(&mut self) -> f64 {
        0.0
    }
}

/// Keeps the seconds of communication.
struct Told(f64);

impl Watch for Told {
    fn seconds(&mut self) -> f64 {
        0.0
    }

    fn wall_seconds(&mut self) -> f64 {
        0.0
    }

    fn communicated(&mut self, seconds: f64) {
        self.0 = seconds;
    }
}

/// A rank whose messages go wrong.
struct Faulty {
    /// None once the rank has left.
    inner: RefCell<Option<Thread>>,
    rank: usize,
    fault: Option<Fault>,
    sent: Cell<usize>,
}

impl Faulty {
    fn inner<T>(&self, act: impl FnOnce(&Thread) -> Result<T, WorldError>) -> Result<T, WorldError> {
        let gone = || WorldError::Gone { rank: self.rank, why: "it died".to_string() };
        act(self.inner.borrow().as_ref().ok_or_else(gone)?)
    }
}

impl World for Faulty {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.inner.borrow().as_ref().map_or(usize::MAX, World::size)
    }

    fn neighbours(&self) -> Neighbours {
        Neighbours { count: self.size(), index: self.rank, sharing: self.size() }
    }

    fn send(&self, to: usize, channel: Channel, message: Message) -> Result<(), WorldError> {
        let number = self.sent.get();
        self.sent.set(number + usize::from(channel == Channel::Data));
        match self.fault {
            Some(Fault::Dies(at)) if number >= at => drop(self.inner.borrow_mut().take()),
            Some(Fault::Hangs(at)) if number >= at => {
                // Until the others have given up.
                loop {
                    self.inner(|inner| inner.poll(self.rank, Channel::Control))?;
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            Some(Fault::Delays(at)) if number == at => std::thread::sleep(Duration::from_millis(300)),
            Some(Fault::Corrupts(at)) if number == at => {
                let mut bytes = message.to_vec();
                let middle = bytes.len() / 2;
                bytes[middle] ^= 4;
                return self.inner(|inner| inner.send(to, channel, Arc::new(bytes)));
            }
            _ => (),
        }
        self.inner(|inner| inner.send(to, channel, message))
    }

    fn poll(&self, from: usize, channel: Channel) -> Result<Option<Message>, WorldError> {
        self.inner(|inner| inner.poll(from, channel))
    }

    fn abort(&self, code: u8) {
        if let Some(inner) = &*self.inner.borrow() {
            inner.abort(code);
        }
    }
}
