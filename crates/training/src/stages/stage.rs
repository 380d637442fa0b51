//! The thread of a stage: it opens its device, builds its part of the model, and does what it is
//! told until nobody is left to tell it anything. Backends stay on the thread that opened them.

use super::link::Links;
use super::schedule::{self, Group, Stop};
use crate::engine::{Engine, Stored};
use crate::prepare::RunError;
use crate::row::Row;
use crate::step::{Evaluated, Losses, StepError, StepSettings, Update};
use crate::trainer::{Placement, Trainer};
use isobit_autograd::{Gradients, Offload};
use isobit_kernels::{Backend, float_state};
use isobit_models::build::Settings;
use isobit_models::{Config, Part, TrainedTensor, WeightSource, build_placed};
use isobit_numerics::slices::Profile;
use isobit_proof::chain::TensorDigests;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

/// Gradients that every stage holds its part of, by number.
pub(crate) type Slot = u64;

/// What a stage is told. All but `Free` are answered.
pub(crate) enum Command {
    /// Compute the gradients of a group of rows.
    Group {
        slot: Slot,
        group: SharedGroup,
        links: Links,
    },
    Evaluate {
        rows: Arc<Vec<Row>>,
        first_row: usize,
        profile: Profile,
        micro_batch_size: usize,
        links: Links,
    },
    /// Add the gradients `right` to `left`.
    Add {
        left: Slot,
        right: Slot,
    },
    /// Combine the head's part of a tied table with the embedding's, in the first stage.
    CombineTable {
        slot: Slot,
        head: Vec<f32>,
    },
    Download {
        slot: Slot,
    },
    /// Copy the gradient of the copy of a tied table to the host, in the last stage.
    DownloadTable {
        slot: Slot,
    },
    Upload {
        slot: Slot,
        parts: Vec<Vec<f32>>,
    },
    SumsOfSquares {
        slot: Slot,
    },
    Scale {
        slot: Slot,
        factor: f32,
    },
    Apply {
        slot: Slot,
        step: u64,
        learning_rate: f64,
        settings: StepSettings,
    },
    /// Digests of gradients that were applied, and of what came of them.
    Digests {
        slot: Slot,
    },
    Read {
        tensor: usize,
        which: Stored,
    },
    Write {
        tensor: usize,
        which: Stored,
        values: Vec<f32>,
    },
    /// Overwrite the copy of a tied table, in the last stage.
    WriteTable {
        values: Vec<f32>,
    },
    /// The peak of the memory of its device.
    Peak,
    Free {
        slot: Slot,
    },
}

/// The rows of a group, shared by all stages.
#[derive(Clone)]
pub(crate) struct SharedGroup {
    pub(crate) rows: Arc<Vec<Row>>,
    pub(crate) first_row: usize,
    pub(crate) step: u64,
    pub(crate) targets: usize,
    pub(crate) settings: StepSettings,
}

/// What a stage answers.
pub(crate) enum Answer {
    Done,
    Losses(Losses),
    Evaluated(Evaluated),
    Numbers(Vec<f32>),
    Digests(Vec<TensorDigests>),
    /// The gradients of its tensors, the copy of a tied table last.
    Parts(Vec<Vec<f32>>),
    /// None if its device has no memory of its own.
    Peak(Option<u64>),
}

pub(crate) enum Reply {
    /// The model is built; with the tensors that this stage trains.
    Built(Result<Vec<TrainedTensor>, RunError>),
    Answered(Result<Answer, Stop>),
    /// The thread ended with this panic.
    Panicked(Box<dyn std::any::Any + Send>),
}

/// Everything a stage needs but its device. [`Stage::run`] is called on the stage's own thread,
/// with the device that was opened there.
pub struct Stage<'a> {
    pub(crate) config: &'a Config,
    pub(crate) source: &'a (dyn WeightSource + Sync),
    pub(crate) settings: Settings,
    pub(crate) placement: Placement,
    pub(crate) part: Part,
    /// Stages behind this one.
    pub(crate) stages_after: usize,
    pub(crate) commands: Receiver<Command>,
    pub(crate) replies: Sender<Reply>,
}

impl Stage<'_> {
    /// Keeps in host memory what `offload` says; `threads` compute there.
    #[must_use]
    pub fn with_offload(mut self, offload: Offload, threads: usize) -> Self {
        self.placement = Placement { offload, threads, ..self.placement };
        self
    }

    /// Serves until the engine is dropped.
    pub fn run<B: Backend>(self, backend: B) {
        let offload = self.placement.offload;
        let built = build_placed(&backend, self.config, self.source, &self.settings, &self.part, offload);
        let trainer = built.map_err(RunError::from).and_then(|built| {
            let placed = Trainer::placed(backend, built, self.placement);
            placed.map_err(RunError::from)
        });
        let mut worker = match trainer {
            Ok(trainer) => Worker { trainer, stages_after: self.stages_after, gradients: BTreeMap::new() },
            Err(error) => {
                // Nobody waits for it any more if another stage failed first.
                let _ = self.replies.send(Reply::Built(Err(error)));
                return;
            }
        };
        if self.replies.send(Reply::Built(Ok(worker.trainer.tensors().to_vec()))).is_err() {
            return;
        }
        for command in self.commands {
            float_state::restore();
            let is_answered = !matches!(command, Command::Free { .. });
            let answer = worker.answer(command);
            if is_answered && self.replies.send(Reply::Answered(answer)).is_err() {
                return;
            }
        }
    }
}

struct Worker<B: Backend> {
    trainer: Trainer<B>,
    stages_after: usize,
    gradients: BTreeMap<Slot, Gradients<B>>,
}

impl<B: Backend> Worker<B> {
    fn answer(&mut self, command: Command) -> Result<Answer, Stop> {
        let trainer = &mut self.trainer;
        match command {
            Command::Group { slot, group, links } => return self.group(slot, &group, &links),
            Command::Evaluate { rows, first_row, profile, micro_batch_size, links } => {
                let rows: Vec<&Row> = rows.iter().collect();
                let how = (profile, micro_batch_size);
                return schedule::evaluate(trainer, &rows, first_row, how, &links).map(Answer::Evaluated);
            }
            Command::Add { left, right } => {
                let [a, b] = [left, right].map(|slot| self.gradients.remove(&slot).expect(HELD));
                self.gradients.insert(left, trainer.add(a, b)?);
            }
            Command::CombineTable { slot, head } => {
                let (id, _) = trainer.parameters.iter().next().expect("the table is the first tensor");
                self.gradients.get_mut(&slot).expect(HELD).combine_with(&trainer.backend, id, &head);
            }
            Command::Download { slot } => return Ok(Answer::Parts(self.trainer.download(self.held(slot))?)),
            Command::DownloadTable { slot } => {
                let id = trainer.model.table_copy.expect("the last stage has a copy of a tied table");
                let gradients = self.gradients.get(&slot).expect(HELD);
                return Ok(Answer::Numbers(gradients.to_numbers(&trainer.backend, id).map_err(StepError::from)?));
            }
            Command::Upload { slot, parts } => {
                let gradients = trainer.upload(parts)?;
                self.gradients.insert(slot, gradients);
            }
            Command::SumsOfSquares { slot } => {
                return Ok(Answer::Numbers(self.trainer.sums_of_squares(self.held(slot))?));
            }
            Command::Scale { slot, factor } => {
                trainer.scale(self.gradients.get_mut(&slot).expect(HELD), factor)?;
            }
            Command::Apply { slot, step, learning_rate, settings } => {
                let gradients = self.gradients.get(&slot).expect(HELD);
                return Ok(Answer::Numbers(trainer.apply(gradients, step, learning_rate, &settings)?));
            }
            Command::Digests { slot } => {
                return Ok(Answer::Digests(self.trainer.update_digests(self.held(slot))?));
            }
            Command::Read { tensor, which } => return Ok(Answer::Numbers(trainer.read(tensor, which)?)),
            Command::Write { tensor, which, values } => trainer.write(tensor, which, values)?,
            Command::WriteTable { values } => trainer.write_table(&values),
            Command::Peak => return Ok(Answer::Peak(trainer.backend.device_peak_bytes())),
            Command::Free { slot } => drop(self.gradients.remove(&slot)),
        }
        Ok(Answer::Done)
    }

    fn held(&self, slot: Slot) -> &Gradients<B> {
        self.gradients.get(&slot).expect(HELD)
    }

    fn group(&mut self, slot: Slot, shared: &SharedGroup, links: &Links) -> Result<Answer, Stop> {
        let rows: Vec<&Row> = shared.rows.iter().collect();
        let update = Update { rows: &rows, step: shared.step, targets: shared.targets };
        let group = Group { update, first_row: shared.first_row, settings: &shared.settings };
        let (gradients, losses) = schedule::group_gradients(&self.trainer, &group, links, self.stages_after)?;
        self.gradients.insert(slot, gradients);
        Ok(Answer::Losses(losses))
    }
}

/// Why gradients are there.
const HELD: &str = "the engine names gradients that it has made and not freed";

impl Stop {
    /// The same for the engine, which must see every failure as that of a device.
    pub(crate) fn on(self, device: &str) -> StepError {
        match self {
            Self::Failed(error) => error,
            Self::Neighbour => StepError::Stage {
                device: device.to_string(),
                what: "it stopped because the thread of a device beside it in the list had ended".to_string(),
            },
        }
    }
}
