//! One update of a small model, from a fixed state, with and without a fault, and what notices.

use super::flip::{Fault, Flip, Seen};
use crate::repository::root;
use isobit_autograd::Policy;
use isobit_kernels::Reference;
use isobit_kernels::observe::Observed;
use isobit_models::build::Settings;
use isobit_models::{Config, Trained, Weights, build};
use isobit_numerics::slices::Profile;
use isobit_proof::chain::{Item, Update};
use isobit_proof::safetensors::TensorFiles;
use isobit_training::audit;
use isobit_training::engine::{Engine, Stored};
use isobit_training::row::{self, Row};
use isobit_training::step::{StepError, StepSettings};
use isobit_training::trainer::Trainer;
use std::panic::{AssertUnwindSafe, catch_unwind};

type Backed = Observed<Reference, Flip>;
const KINDS: [Stored; 3] = [Stored::Value, Stored::Moment(0), Stored::Moment(1)];
const LEARNING_RATE: f64 = 1e-2;
/// The update that goes wrong.
const STEP: u64 = 2;

/// What notices a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    /// No bit of losses, weights, optimizer state or record is another.
    Nothing,
    /// The step stopped: a recomputation differs from the forward pass.
    Recomputation,
    /// The step stopped: a number is not finite.
    NotFinite,
    /// The step stopped: an index or a count is impossible.
    Impossible,
    /// Replay finds another loss, in this update.
    Loss,
    /// Replay finds another gradient, and names the tensor.
    Gradient,
    /// Replay finds other weights or optimizer state, and names the tensor.
    State,
    /// Only what was recorded is wrong, not what was computed. Replay finds it.
    Record,
    /// Bits differ, and replay does not notice, or names the wrong tensor.
    Missed,
}

/// A model in training, before its second update.
pub(crate) struct Bench {
    trainer: Trainer<Backed>,
    auditor: Trainer<Reference>,
    rows: Vec<Row>,
    settings: StepSettings,
    /// Weights and moments after the first update.
    before: Vec<Vec<f32>>,
    /// What the second update gives.
    expected: Option<Given>,
}

/// What an update gives.
#[derive(Clone, PartialEq)]
struct Given {
    line: Update,
    /// Weights and moments.
    bits: Vec<Vec<u32>>,
}

impl Bench {
    pub(crate) fn new(fixture: &str, trained: &Trained) -> Result<Self, String> {
        let failed = |error: &dyn std::fmt::Display| format!("{fixture}: {error}");
        let folder = root().join("crates/models/tests/fixtures").join(fixture);
        let config = std::fs::read_to_string(folder.join("config.json")).map_err(|error| failed(&error))?;
        let config = Config::parse(&config).map_err(|error| failed(&error))?;
        let files = TensorFiles::open(&folder).map_err(|error| failed(&error))?;
        let source = Weights::new(files, &config).map_err(|error| failed(&error))?;
        let settings = Settings { trained: trained.clone(), profile: Profile::X2, positions: 64, seed: 7 };
        let backend = Observed { inner: Reference, observer: Flip::default() };
        let built = build(&backend, &config, &source, &settings).map_err(|error| failed(&error))?;
        let other = build(&Reference, &config, &source, &settings).map_err(|error| failed(&error))?;
        let rows = rows(config.vocabulary);
        let mut bench = Self {
            trainer: Trainer::new(backend, built),
            auditor: Trainer::new(Reference, other),
            rows,
            settings: step_settings(),
            before: Vec::new(),
            expected: None,
        };
        let rows: Vec<&Row> = bench.rows.iter().collect();
        bench.trainer.step(&rows, STEP - 1, LEARNING_RATE, &bench.settings).map_err(|error| failed(&error))?;
        bench.before = bench.state().map_err(|error| failed(&error))?;
        bench.expected = Some(bench.update(None).map_err(|error| failed(&error))?);
        Ok(bench)
    }

    /// The calls of an update that goes right.
    pub(crate) fn calls(&mut self) -> Result<Vec<Seen>, String> {
        self.update(None).map_err(|error| error.to_string())?;
        Ok(self.trainer.backend.observer.seen.take())
    }

    fn state(&self) -> Result<Vec<Vec<f32>>, StepError> {
        let all = 0..self.trainer.tensors().len();
        all.flat_map(|at| KINDS.map(|kind| self.trainer.read(at, kind))).collect()
    }

    fn update(&mut self, fault: Option<Fault>) -> Result<Given, StepError> {
        for (at, values) in self.before.iter().enumerate() {
            self.trainer.write(at / KINDS.len(), KINDS[at % KINDS.len()], values.clone())?;
        }
        self.begin(fault);
        let rows: Vec<&Row> = self.rows.iter().collect();
        let report = self.trainer.step(&rows, STEP, LEARNING_RATE, &self.settings);
        self.trainer.backend.observer.fault.set(None);
        let report = report?;
        let mut line = Update::new(STEP, row::digest(rows.iter().copied()), report.tokens as u64);
        (line.loss, line.learning_rate) = (report.loss.to_bits(), LEARNING_RATE.to_bits());
        line.norm = report.grad_norm.to_bits();
        line.set_digests(&report.digests);
        let bits = self.state()?.into_iter().map(|values| values.into_iter().map(f32::to_bits).collect());
        Ok(Given { line, bits: bits.collect() })
    }

    fn begin(&self, fault: Option<Fault>) {
        self.trainer.backend.observer.seen.borrow_mut().clear();
        self.trainer.backend.observer.fault.set(fault);
    }

    /// The update with a fault, compared as a replay on a sound machine compares it.
    pub(crate) fn verdict(&mut self, fault: Fault) -> Verdict {
        let found = catch_unwind(AssertUnwindSafe(|| self.update(Some(fault))));
        let Ok(found) = found else { return Verdict::Impossible };
        let found = match found {
            Ok(found) => found,
            Err(error) => return stopped(&error),
        };
        let expected = self.expected.as_ref().expect("the bench is complete");
        compared(expected, &found)
    }

    /// Whether an audit of the update notices the fault.
    pub(crate) fn is_audited(&mut self, fault: Fault) -> bool {
        for (at, values) in self.before.iter().enumerate() {
            let written = self.trainer.write(at / KINDS.len(), KINDS[at % KINDS.len()], values.clone());
            written.expect("host memory");
        }
        self.begin(Some(fault));
        let rows: Vec<&Row> = self.rows.iter().collect();
        let Self { trainer, auditor, settings, .. } = self;
        let checked = || audit::check(trainer, auditor, &rows, (STEP, 1), settings);
        let noticed = !matches!(catch_unwind(AssertUnwindSafe(checked)), Ok(Ok(_)));
        self.trainer.backend.observer.fault.set(None);
        noticed
    }
}

fn stopped(error: &StepError) -> Verdict {
    match error {
        StepError::Tape(_) => Verdict::Recomputation,
        _ => Verdict::NotFinite,
    }
}

fn compared(expected: &Given, found: &Given) -> Verdict {
    let differs = |tensor: usize, kind: usize| {
        let at = tensor * KINDS.len() + kind;
        expected.bits[at] != found.bits[at]
    };
    let moments = |tensor: usize| differs(tensor, 1) || differs(tensor, 2);
    let untouched = |tensor: usize| (0..KINDS.len()).all(|kind| !differs(tensor, kind));
    let changed = expected.bits != found.bits || expected.line.loss != found.line.loss;
    match found.line.first_difference(&expected.line) {
        None if changed => Verdict::Missed,
        None => Verdict::Nothing,
        Some(Item::Loss) => Verdict::Loss,
        Some(_) if !changed => Verdict::Record,
        Some(Item::Gradient(None)) => Verdict::Gradient,
        // The named tensor is the first whose gradient differs. A low bit of a gradient may be
        // rounded away in its moments, but no tensor before it can have other ones.
        Some(Item::Gradient(Some(part))) if (0..part).all(untouched) => Verdict::Gradient,
        Some(Item::Weights(Some(part))) if differs(part, 0) => Verdict::State,
        Some(Item::State(Some(part))) if moments(part) => Verdict::State,
        Some(_) => Verdict::Missed,
    }
}

fn step_settings() -> StepSettings {
    StepSettings {
        profile: Profile::X2,
        policy: Policy::Full,
        micro_batch_size: 1,
        gradient_groups: 1,
        seed: 7,
        max_grad_norm: Some(0.1),
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        digests: true,
    }
}

/// Two short rows, one of them packed: two micro-batches.
fn rows(vocabulary: usize) -> Vec<Row> {
    let row = |length: usize, starts: &[usize]| {
        let tokens = (0..length).map(|t| ((t * 31 + length * 7) % vocabulary) as u32).collect();
        let targets = (0..length).map(|t| t % 5 != 3).collect();
        Row::new(tokens, targets, starts.iter().copied().chain([length]).collect())
    };
    vec![row(7, &[0]), row(9, &[0, 4])]
}
