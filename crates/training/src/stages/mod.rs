//! Layers over devices: an engine whose devices have consecutive layers of the model each
//! (`docs/scale.md`). Micro-batches overlap as a pipeline.
//!
//! The bits are those of one device. Every number is computed by the same ops from the same
//! numbers; activations and gradients travel unchanged; gradients accumulate in the order of the
//! micro-batches; norms, clipping and finite checks see all tensors in model order.

mod alone;
mod link;
mod schedule;
mod stage;

pub(crate) use alone::Alone;
pub use link::parcels;
pub use stage::Stage;

use crate::engine::{Engine, Stored};
use crate::prepare::RunError;
use crate::row::Row;
use crate::step::{Evaluated, Losses, StepError, StepSettings, Update};
use crate::trainer::Placement;
use isobit_autograd::Offload;
use isobit_kernels::DeviceFailure;
use isobit_kernels::buffer::OutOfMemory;
use isobit_kernels::gpu::OverLimit;
use isobit_models::build::{Settings, no_adapter};
use isobit_models::{Config, Part, Trained, TrainedTensor, WeightSource};
use isobit_numerics::slices::Profile;
use isobit_proof::chain::TensorDigests;
use link::{Links, Shelf};
use schedule::Stop;
use stage::{Answer, Command, Reply, SharedGroup, Slot};
use std::any::Any;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, Scope};

/// Opens a device on the thread that calls it, and runs the stage there.
pub type Open = Box<dyn FnOnce(Stage<'_>) -> Result<(), DeviceFailure> + Send>;

/// A device of the list.
pub struct StageDevice {
    /// For messages.
    pub name: String,
    /// Number of layers.
    pub layers: usize,
    pub open: Open,
}

/// The model that the devices divide.
#[derive(Clone, Copy)]
pub struct Divided<'a> {
    pub config: &'a Config,
    pub source: &'a (dyn WeightSource + Sync),
}

/// The engine. Its threads end when it is dropped, and the scope waits for them.
pub struct Stages {
    handles: Vec<Handle>,
    /// Where commands go; shared with the gradients, which free themselves.
    commands: Rc<Vec<Sender<Command>>>,
    tensors: Vec<TrainedTensor>,
    /// The stage of every tensor, and its number there.
    places: Vec<(usize, usize)>,
    /// Parcels of the links between neighbours.
    shelves: Vec<Shelf>,
    /// Whether the head of the last stage is a copy of the table of the first.
    tied: bool,
    next: Cell<Slot>,
}

struct Handle {
    device: String,
    replies: Receiver<Reply>,
}

/// Gradients on all devices.
pub struct StageGradients {
    slot: Slot,
    /// Whether the parts of a tied table are added.
    combined: bool,
    commands: Rc<Vec<Sender<Command>>>,
}

impl Drop for StageGradients {
    fn drop(&mut self) {
        for stage in self.commands.iter() {
            // A stage that has ended holds nothing.
            let _ = stage.send(Command::Free { slot: self.slot });
        }
    }
}

impl Stages {
    /// Starts a thread per device; each opens its device and builds its part of the model, with
    /// optimizer state or without it.
    pub fn new<'scope, 'env>(
        scope: &'scope Scope<'scope, 'env>,
        model: Divided<'env>,
        settings: &Settings,
        with_moments: bool,
        devices: Vec<StageDevice>,
    ) -> Result<Self, RunError> {
        let counts: Vec<usize> = devices.iter().map(|device| device.layers).collect();
        let parts = Part::divide(model.config, &counts);
        let (mut handles, mut commands) = (Vec::new(), Vec::new());
        for (at, (device, part)) in devices.into_iter().zip(parts).enumerate() {
            let ((command, orders), (answer, replies)) = (channel(), channel());
            let stage = Stage {
                config: model.config,
                source: model.source,
                settings: settings.clone(),
                placement: Placement::new(Offload::NONE, with_moments, 1),
                part,
                stages_after: counts.len() - 1 - at,
                commands: orders,
                replies: answer.clone(),
            };
            let thread = Builder::new().name(format!("isobit-stage-{at}"));
            let spawned = thread.spawn_scoped(scope, move || serve(device.open, stage, &answer));
            spawned.map_err(|error| DeviceFailure {
                device: device.name.clone(),
                what: format!("the system did not start its thread: {error}"),
            })?;
            handles.push(Handle { device: device.name, replies });
            commands.push(command);
        }
        let built = handles.iter().map(Handle::built).collect::<Result<Vec<_>, _>>()?;
        let numbered = built.iter().enumerate().flat_map(|(stage, own)| (0..own.len()).map(move |at| (stage, at)));
        let places: Vec<_> = numbered.collect();
        let tensors: Vec<TrainedTensor> = built.into_iter().flatten().collect();
        if tensors.is_empty() && matches!(settings.trained, Trained::Lora(_)) {
            return Err(no_adapter().into());
        }
        let tied = model.config.tied && settings.trained == Trained::Full && handles.len() > 1;
        let shelves = (1..handles.len()).map(|_| Shelf::default()).collect();
        let commands = Rc::new(commands);
        Ok(Self { handles, commands, tensors, places, shelves, tied, next: Cell::new(0) })
    }

    fn new_gradients(&self) -> StageGradients {
        let slot = self.next.replace(self.next.get() + 1);
        StageGradients { slot, combined: false, commands: Rc::clone(&self.commands) }
    }

    fn last(&self) -> usize {
        self.handles.len() - 1
    }

    fn tell(&self, stage: usize, command: Command) {
        // A stage that has ended says why in its reply.
        let _ = self.commands[stage].send(command);
    }

    fn ask(&self, stage: usize, command: Command) -> Result<Answer, StepError> {
        self.tell(stage, command);
        let handle = &self.handles[stage];
        handle.answer().map_err(|stop| stop.on(&handle.device))
    }

    /// Asks all stages at once. A stage's own failure is reported before that of a neighbour which
    /// stopped because of it.
    fn ask_all(&self, mut command: impl FnMut(usize) -> Command) -> Result<Vec<Answer>, StepError> {
        (0..self.handles.len()).for_each(|stage| self.tell(stage, command(stage)));
        let (mut answers, mut failed, mut stopped) = (Vec::new(), None, None);
        for stage in &self.handles {
            match stage.answer() {
                Ok(answer) => answers.push(answer),
                Err(Stop::Failed(error)) => failed = failed.or(Some(error)),
                Err(stop @ Stop::Neighbour) => stopped = Some(stop.on(&stage.device)),
            }
        }
        match failed.or(stopped) {
            Some(error) => Err(error),
            None => Ok(answers),
        }
    }

    fn numbers(answers: Vec<Answer>) -> Vec<f32> {
        let numbers = |answer| match answer {
            Answer::Numbers(numbers) => numbers,
            _ => unreachable!("a question for numbers is answered with numbers"),
        };
        answers.into_iter().flat_map(numbers).collect()
    }

    /// Copies the table to the head of the last stage.
    fn copy_table(&self, values: Vec<f32>) -> Result<(), StepError> {
        self.ask(self.last(), Command::WriteTable { values }).map(|_| ())
    }
}

/// The thread of a stage: a failure or a panic becomes a reply.
fn serve(open: Open, stage: Stage<'_>, replies: &Sender<Reply>) {
    let reply = match catch_unwind(AssertUnwindSafe(|| open(stage))) {
        Ok(Ok(())) => return,
        Ok(Err(failure)) => Reply::Built(Err(failure.into())),
        Err(panic) => Reply::Panicked(panic),
    };
    // If nobody listens any more, the engine already has a failure to report.
    let _ = replies.send(reply);
}

impl Handle {
    fn built(&self) -> Result<Vec<TrainedTensor>, RunError> {
        match self.replies.recv() {
            Ok(Reply::Built(built)) => built,
            Ok(Reply::Panicked(panic)) => Err(self.panicked(panic).into()),
            _ => Err(self.ended().into()),
        }
    }

    fn answer(&self) -> Result<Answer, Stop> {
        match self.replies.recv() {
            Ok(Reply::Answered(answer)) => answer,
            Ok(Reply::Panicked(panic)) => Err(self.panicked(panic).into()),
            _ => Err(self.ended().into()),
        }
    }

    /// Missing memory is thrown on, as on one device; anything else becomes an error.
    fn panicked(&self, panic: Box<dyn Any + Send>) -> StepError {
        if panic.is::<OutOfMemory>() || panic.is::<OverLimit>() {
            resume_unwind(panic);
        }
        let text = panic.downcast_ref::<&str>().map(ToString::to_string).or(panic.downcast_ref::<String>().cloned());
        let what = format!("its thread panicked: {}", text.unwrap_or("without a message".to_string()));
        StepError::Stage { device: self.device.clone(), what }
    }

    fn ended(&self) -> StepError {
        StepError::Stage { device: self.device.clone(), what: "its thread has ended".to_string() }
    }
}

impl Engine for Stages {
    type Gradients = StageGradients;

    fn tensors(&self) -> &[TrainedTensor] {
        &self.tensors
    }

    fn group_gradients(
        &self,
        update: &Update<'_>,
        group: Range<usize>,
        settings: &StepSettings,
    ) -> Result<(StageGradients, Losses), StepError> {
        let gradients = self.new_gradients();
        let group = SharedGroup {
            first_row: group.start,
            rows: Arc::new(update.rows[group].iter().map(|row| (*row).clone()).collect()),
            step: update.step,
            targets: update.targets,
            settings: settings.clone(),
        };
        // A stage with a backward pass is at most so many micro-batches ahead; one in front of
        // everything that is trained waits for a place in its link.
        let mut links = Links::chain(&self.shelves).into_iter();
        let mut answers = self.ask_all(|_| Command::Group {
            slot: gradients.slot,
            group: group.clone(),
            links: links.next().unwrap_or_default(),
        })?;
        let Some(Answer::Losses(losses)) = answers.pop() else { unreachable!("a group is answered with its losses") };
        Ok((gradients, losses))
    }

    fn add(&self, left: StageGradients, right: StageGradients) -> Result<StageGradients, StepError> {
        self.ask_all(|_| Command::Add { left: left.slot, right: right.slot })?;
        Ok(left)
    }

    fn combine(&self, gradients: &mut StageGradients) -> Result<(), StepError> {
        if self.tied && !gradients.combined {
            let table = self.ask(self.last(), Command::DownloadTable { slot: gradients.slot })?;
            let head = Self::numbers(vec![table]);
            self.ask(0, Command::CombineTable { slot: gradients.slot, head })?;
        }
        gradients.combined = true;
        Ok(())
    }

    /// In the order of one device: a tied table's first part is the head's, and the embedding's
    /// comes last.
    fn download(&self, gradients: &StageGradients) -> Result<Vec<Vec<f32>>, StepError> {
        let mut all = Vec::new();
        for answer in self.ask_all(|_| Command::Download { slot: gradients.slot })? {
            let Answer::Parts(parts) = answer else { unreachable!("a download is answered with parts") };
            all.extend(parts);
        }
        if self.tied {
            // The last part is the copy's gradient.
            let head = all.pop().unwrap_or_default();
            if !gradients.combined {
                let embedding = std::mem::replace(&mut all[0], head);
                all.push(embedding);
            }
        }
        Ok(all)
    }

    fn upload(&self, mut parts: Vec<Vec<f32>>) -> Result<StageGradients, StepError> {
        let mut gradients = self.new_gradients();
        gradients.combined = parts.len() == self.tensors.len();
        if self.tied {
            let copy = if gradients.combined {
                // Nothing reads it any more.
                vec![0.0; self.tensors[0].length()]
            } else {
                let embedding = parts.pop().unwrap_or_default();
                std::mem::replace(&mut parts[0], embedding)
            };
            parts.push(copy);
        }
        let mut parts = parts.into_iter();
        let counts = |stage: usize| {
            let own = self.places.iter().filter(|(of, _)| *of == stage).count();
            own + usize::from(self.tied && stage == self.last())
        };
        self.ask_all(|stage| Command::Upload {
            slot: gradients.slot,
            parts: parts.by_ref().take(counts(stage)).collect(),
        })?;
        Ok(gradients)
    }

    fn sums_of_squares(&self, gradients: &StageGradients) -> Result<Vec<f32>, StepError> {
        Ok(Self::numbers(self.ask_all(|_| Command::SumsOfSquares { slot: gradients.slot })?))
    }

    fn scale(&self, gradients: &mut StageGradients, factor: f32) -> Result<(), StepError> {
        self.ask_all(|_| Command::Scale { slot: gradients.slot, factor }).map(|_| ())
    }

    fn apply(
        &mut self,
        gradients: &StageGradients,
        step: u64,
        learning_rate: f64,
        settings: &StepSettings,
    ) -> Result<Vec<f32>, StepError> {
        let slot = gradients.slot;
        let answers = self.ask_all(|_| Command::Apply { slot, step, learning_rate, settings: settings.clone() })?;
        if self.tied {
            self.copy_table(self.read(0, Stored::Value)?)?;
        }
        Ok(Self::numbers(answers))
    }

    fn update_digests(&self, gradients: &StageGradients) -> Result<Vec<TensorDigests>, StepError> {
        let digests = |answer| match answer {
            Answer::Digests(digests) => digests,
            _ => unreachable!("a question for digests is answered with them"),
        };
        let answers = self.ask_all(|_| Command::Digests { slot: gradients.slot })?;
        Ok(answers.into_iter().flat_map(digests).collect())
    }

    fn evaluate_rows(
        &self,
        rows: &[&Row],
        range: Range<usize>,
        profile: Profile,
        micro_batch_size: usize,
    ) -> Result<Evaluated, StepError> {
        let first_row = range.start;
        let rows: Arc<Vec<Row>> = Arc::new(rows[range].iter().map(|row| (*row).clone()).collect());
        let mut links = Links::chain(&self.shelves).into_iter();
        let mut answers = self.ask_all(|_| Command::Evaluate {
            rows: Arc::clone(&rows),
            first_row,
            profile,
            micro_batch_size,
            links: links.next().unwrap_or_default(),
        })?;
        let Some(Answer::Evaluated(evaluated)) = answers.pop() else {
            unreachable!("an evaluation is answered with its results")
        };
        Ok(evaluated)
    }

    fn device_peaks(&self) -> Result<Vec<Option<u64>>, StepError> {
        let peak = |answer| match answer {
            Answer::Peak(bytes) => bytes,
            _ => unreachable!("a question for a peak is answered with one"),
        };
        Ok(self.ask_all(|_| Command::Peak)?.into_iter().map(peak).collect())
    }

    fn read(&self, tensor: usize, which: Stored) -> Result<Vec<f32>, StepError> {
        let (stage, tensor) = self.places[tensor];
        Ok(Self::numbers(vec![self.ask(stage, Command::Read { tensor, which })?]))
    }

    fn write(&mut self, tensor: usize, which: Stored, values: Vec<f32>) -> Result<(), StepError> {
        let (stage, at) = self.places[tensor];
        if self.tied && tensor == 0 && which == Stored::Value {
            self.copy_table(values.clone())?;
        }
        self.ask(stage, Command::Write { tensor: at, which, values }).map(|_| ())
    }
}
