//! The run under test: a tiny model that saves, evaluates, prunes, is stopped by a signal and
//! resumed, in this process. Its folder has the same path in every state, and its clock stands
//! still, so that equal runs leave equal bytes.

use super::disk::Tree;
use super::trace::{Op, Recorder};
use crate::repository::root;
use isobit_kernels::{Cpu, Path as CpuPath};
use isobit_proof::disk::watched;
use isobit_training::checkpoint::{Start, step_of};
use isobit_training::config;
use isobit_training::prepare::{Prepared, RunError, prepare};
use isobit_training::ranks::Team;
use isobit_training::run::{Outcome, Watch, train};
use isobit_training::signal::Signal;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// A run to be tried: a fixture of the models and its `[adapter]`.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    fixture: &'static str,
    adapter: &'static str,
}

pub(crate) const SHAPES: [Shape; 2] = [
    Shape {
        name: "lora",
        fixture: "qwen2-base",
        adapter: "type = \"lora\"\nlora_r = 2\nlora_target_modules = [\"q_proj\"]",
    },
    Shape { name: "full", fixture: "qwen2-tied", adapter: "type = \"full\"" },
];

/// The step after which a signal arrives.
pub(crate) const STOP: u64 = 3;
const LOCK: &str = "LOCK";

pub(crate) struct Scene {
    /// The disk of the run: nothing else is in it.
    root: PathBuf,
    prepared: Prepared,
    /// What an undisturbed run leaves.
    expected: Tree,
}

/// How a run ended, and what it did.
pub(crate) struct Ran {
    pub(crate) ended: Result<Outcome, RunError>,
    /// The step it began after.
    pub(crate) from: Option<u64>,
}

impl Scene {
    pub(crate) fn new(folder: &Path, shape: &Shape) -> Result<Self, String> {
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", folder.display());
        let (inputs, disk) = (folder.join("inputs"), folder.join("disk"));
        for folder in [&inputs, &disk] {
            std::fs::create_dir_all(folder).map_err(|error| failed(&error))?;
        }
        let data = inputs.join("data.jsonl");
        std::fs::write(&data, rows()).map_err(|error| failed(&error))?;
        let text = |path: &Path| serde_json::Value::from(path.display().to_string());
        let text = format!(
            "base_model = {}\noutput_dir = {}\n[[datasets]]\npath = {}\n[eval]\nval_set_size = 2\neval_steps = 2\n\
             [training]\nmax_seq_length = 64\nmicro_batch_size = 2\ngradient_accumulation_steps = 1\nmax_steps = 6\n\
             save_steps = 2\nsave_total_limit = 1\nlogging_steps = 1\nlearning_rate = 0.01\n\
             load_best_model_at_end = true\n[adapter]\n{}\n",
            text(&root().join("crates/models/tests/fixtures").join(shape.fixture)),
            text(&disk.join("run")),
            text(&data),
            shape.adapter
        );
        let run = config::parse("run.toml", &text, &[]).map_err(|error| failed(&error))?.run;
        let prepared = prepare(run).map_err(|error| failed(&error))?;
        let mut scene = Self { root: disk, prepared, expected: Tree::new() };
        let undisturbed = scene.train(Start::New, None, &scene.recorder());
        undisturbed.ended.map_err(|error| format!("the undisturbed run: {error}"))?;
        scene.expected = scene.left()?;
        scene.put(&Tree::new())?;
        Ok(scene)
    }

    pub(crate) fn recorder(&self) -> Rc<Recorder> {
        Rc::new(Recorder::new(&self.root, None))
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Trains on what the disk holds; `stop` is the step after which a signal arrives.
    pub(crate) fn train(&self, start: Start, stop: Option<u64>, recorder: &Rc<Recorder>) -> Ran {
        let mut watch = Observed { recorder: Rc::clone(recorder), stop, step: 0, from: None };
        let run = || {
            let cpu = Cpu::new(1, CpuPath::best()).expect("one thread");
            train(cpu, &self.prepared, start, &Team::alone(), &mut watch)
        };
        let ended = watched(recorder.clone(), run);
        Ran { ended, from: watch.from }
    }

    /// The whole story, from an empty disk: begin, be stopped, resume, finish. Returns how far it
    /// came if something fails.
    pub(crate) fn story(&self, recorder: &Rc<Recorder>) -> Result<(), RunError> {
        self.train(Start::New, Some(STOP), recorder).ended?;
        self.train(Start::Resume, None, recorder).ended.map(drop)
    }

    /// Resumes from a state of the disk and compares the result with the undisturbed one. `saved`
    /// is the newest checkpoint that the run had said was saved.
    pub(crate) fn check(&self, state: &Tree, saved: u64) -> Result<Option<String>, String> {
        self.put(state)?;
        self.check_as_it_is(saved, &self.recorder())
    }

    pub(crate) fn check_as_it_is(&self, saved: u64, recorder: &Rc<Recorder>) -> Result<Option<String>, String> {
        let Ok(ran) = catch_unwind(AssertUnwindSafe(|| self.train(Start::Resume, None, recorder))) else {
            return Ok(Some("a panic".to_string()));
        };
        Ok(match ran.ended {
            Err(error) => Some(format!("it cannot be resumed: {error}")),
            Ok(Outcome::Stopped { .. }) => Some("it stopped".to_string()),
            Ok(_) if ran.from.unwrap_or(0) < saved => {
                Some(format!("checkpoint-{saved} was saved, and it went on from {:?}", ran.from))
            }
            Ok(_) => difference(&self.expected, &self.left()?),
        })
    }

    /// Whether a state already is the finished run, but for what is hidden.
    pub(crate) fn is_finished(&self, state: &Tree) -> Option<String> {
        let hidden = |path: &Path| path.components().any(|part| part.as_os_str().to_string_lossy().starts_with('.'));
        let shown = state.iter().filter(|(path, _)| !hidden(path)).map(|(path, bytes)| (path.clone(), bytes.clone()));
        difference(&self.expected, &shown.collect())
    }

    /// What is on the disk now.
    pub(crate) fn left(&self) -> Result<Tree, String> {
        let mut tree = Tree::new();
        read_into(&mut tree, &self.root, Path::new("")).map_err(|error| error.to_string())?;
        Ok(tree)
    }

    /// Replaces what is on the disk.
    pub(crate) fn put(&self, state: &Tree) -> Result<(), String> {
        let put = || -> std::io::Result<()> {
            for entry in std::fs::read_dir(&self.root)? {
                std::fs::remove_dir_all(entry?.path())?;
            }
            for (path, bytes) in state {
                match bytes {
                    Some(bytes) => std::fs::write(self.root.join(path), bytes)?,
                    None => std::fs::create_dir(self.root.join(path))?,
                }
            }
            Ok(())
        };
        put().map_err(|error| format!("{}: {error}", self.root.display()))
    }
}

/// The newest checkpoint that a run has said is saved.
pub(crate) fn saved(ops: &[Op]) -> u64 {
    let steps = ops.iter().filter_map(|op| if let Op::Saved(step) = op { Some(*step) } else { None });
    steps.max().unwrap_or(0)
}

fn rows() -> String {
    let row = |row: usize| {
        let tokens: Vec<usize> = (0..3 + row * 5 % 9).map(|t| 3 + (t * 7 + row * 11) % 34).collect();
        format!("{}\n", serde_json::json!({"input_ids": tokens, "labels": tokens}))
    };
    (0..8).map(row).collect()
}

fn read_into(tree: &mut Tree, root: &Path, at: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(root.join(at))? {
        let entry = entry?;
        let path = at.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            tree.insert(path.clone(), None);
            read_into(tree, root, &path)?;
        } else {
            tree.insert(path, Some(std::fs::read(entry.path())?));
        }
    }
    Ok(())
}

/// The first path that differs; what a lock file holds does not matter.
pub(crate) fn difference(expected: &Tree, found: &Tree) -> Option<String> {
    let paths: BTreeSet<&PathBuf> = expected.keys().chain(found.keys()).collect();
    let paths = paths.into_iter().filter(|path| path.file_name().is_none_or(|name| name != LOCK));
    let mut differences = paths.filter_map(|path| match (expected.get(path), found.get(path)) {
        (expected, found) if expected == found => None,
        (None, _) => Some(format!("{} should not be there", path.display())),
        (_, None) => Some(format!("{} is missing", path.display())),
        _ => Some(format!("{} has other bytes", path.display())),
    });
    differences.next()
}

struct Observed {
    recorder: Rc<Recorder>,
    stop: Option<u64>,
    step: u64,
    from: Option<u64>,
}

impl Watch for Observed {
    fn started(&mut self, _: &Prepared, _: usize, from_step: u64) {
        self.from = Some(from_step);
    }

    fn seconds(&mut self) -> f64 {
        0.0
    }

    fn wall_seconds(&mut self) -> f64 {
        0.0
    }

    fn step(&mut self, step: u64, _: &isobit_training::step::StepReport, _: f64) {
        self.step = step;
    }

    fn saved(&mut self, folder: &Path) {
        let step = folder.file_name().and_then(|name| name.to_str()).and_then(step_of);
        self.recorder.saved(step.unwrap_or(0));
    }

    fn stop(&mut self) -> Option<Signal> {
        (self.stop == Some(self.step)).then_some(Signal::Terminate)
    }
}
