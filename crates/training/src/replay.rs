//! Replay: updates of a finished or unfinished run are executed again, from the nearest checkpoint
//! or the base, and every line is compared with the chain. At a checkpoint on the way the tensors
//! themselves are compared, so a difference is named down to the element.
//!
//! Nothing is written. What runs here is the step of `run.rs`, on any device and with any split.

use crate::checkpoint::{self, Opened, Progress};
use crate::config::{Adapter, Run};
use crate::data::EpochOrder;
use crate::engine::{Engine, Stored};
use crate::final_folder::{self, Final};
use crate::prepare::{Prepared, RunError, build_settings, step_settings};
use crate::ranks::{Team, update};
use crate::record;
use crate::row::{self, Row};
use crate::run::rows_of;
use crate::schedule::Schedule;
use crate::starting_adapter;
use crate::state::{Restored, State};
use isobit_kernels::float_state;
use isobit_models::build::Settings;
use isobit_numerics::cast::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use isobit_proof::chain::{Chain, Item, Update, combined};
use isobit_proof::layout::Holds;
use isobit_proof::name::{harmless, quoted};
use isobit_proof::receipt::{DIGESTS_OF_INPUTS, Receipt};
use isobit_proof::safetensors::Dtype;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;

/// What happens during a replay.
#[derive(Clone, Debug)]
pub enum Event {
    /// A checkpoint cannot be started from; why.
    Skipped(String),
    /// Begins after this update; 0 is the base.
    Started(u64),
    /// An update agrees with the chain.
    Agrees(u64),
    /// The tensors of a checkpoint are those of the replay.
    CheckpointAgrees(u64),
}

/// The result of a replay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Replayed {
    /// The updates it began after.
    pub from: u64,
    /// Updates that agree with the chain.
    pub agreeing: u64,
    /// Checkpoints whose tensors were compared and agree.
    pub checkpoints: Vec<u64>,
    /// Checkpoints on the way that could not be read, and why.
    pub unread: Vec<(u64, String)>,
    /// Checkpoints on the way, and the final folder, that hold other numbers, though the chain
    /// agrees.
    pub altered: Vec<Difference>,
    /// From the chain, which ends the replay.
    pub difference: Option<Difference>,
}

impl Replayed {
    /// Whether everything on the way was compared, and agrees.
    pub fn agrees(&self) -> bool {
        self.first_difference().is_none() && self.unread.is_empty()
    }

    pub fn first_difference(&self) -> Option<&Difference> {
        self.altered.first().or(self.difference.as_ref())
    }
}

/// Where a replay and a record part.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    pub step: u64,
    pub found_in: FoundIn,
    /// Trained tensors of the item, if it has any.
    pub tensors: Vec<String>,
    /// Recorded and replayed, if the item is a number.
    pub numbers: Option<[Number; 2]>,
    /// In the checkpoint that follows.
    pub element: Option<Element>,
}

impl Difference {
    /// The update, if its ops can tell more: not if its inputs are others, or only a folder.
    pub fn computed(&self) -> Option<u64> {
        let FoundIn::Chain(item) = self.found_in else { return None };
        let is_computed = !matches!(item, Item::Rows | Item::LearningRate | Item::Parts);
        Some(self.step).filter(|step| *step > 0 && is_computed)
    }
}

/// A number as wide as it is recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    F32(f32),
    F64(f64),
}

impl Number {
    /// Hexadecimal digits.
    pub fn bits(self) -> String {
        match self {
            Self::F32(value) => format!("{:08x}", value.to_bits()),
            Self::F64(value) => format!("{:016x}", value.to_bits()),
        }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32(value) => write!(f, "{value:?} (0x{})", self.bits()),
            Self::F64(value) => write!(f, "{value:?} (0x{})", self.bits()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundIn {
    Chain(Item),
    /// The checkpoint that the replay begins with does not hold what the chain has.
    Start(Item),
    /// The chain agrees; the checkpoint of this step, or the final folder, does not.
    Folder,
}

/// The first element that differs in a checkpoint or in the final folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Element {
    /// `checkpoint-N` or `final`.
    pub folder: String,
    /// `weights`, `first moment` or `second moment`.
    pub kind: &'static str,
    pub tensor: String,
    pub shape: Vec<usize>,
    /// In row-major order.
    pub index: usize,
    pub recorded: f32,
    pub replayed: f32,
}

/// Replays the updates `steps` and compares them with the chain. `prepared` is the run of the
/// chain: [`explain`] finds nothing.
pub fn replay<E: Engine>(
    make: impl FnOnce(&Settings) -> Result<E, RunError>,
    prepared: &Prepared,
    chain: &Chain,
    steps: RangeInclusive<u64>,
    watch: &mut dyn FnMut(Event),
) -> Result<Replayed, RunError> {
    Replay::begin(make, prepared, chain, *steps.start(), watch)?.through(*steps.end())
}

/// The files of the final folder, made again.
pub struct Rebuilt {
    pub names: Vec<String>,
    /// Trained tensors that files hold in another layout than memory.
    pub reordered: Vec<String>,
}

/// Writes the files of the final folder into `folder` as `train` does, from the checkpoint of their
/// update, or a replay from the one before. `base` is the folder that the run knew its base by.
pub fn rebuild<E: Engine>(
    make: impl FnOnce(&Settings) -> Result<E, RunError>,
    prepared: &Prepared,
    chain: &Chain,
    (base, folder): (&Path, &Path),
) -> Result<Result<Rebuilt, Replayed>, RunError> {
    let mut silent = |_: Event| ();
    let step = final_step(&prepared.run, chain);
    let mut replay = Replay::begin(make, prepared, chain, step + 1, &mut silent)?;
    let replayed = replay.through(step)?;
    if replayed.first_difference().is_some() {
        return Ok(Err(replayed));
    }
    let config = final_folder::adapter_config(&build_settings(&prepared.run), prepared, base);
    let result = Final::new(&replay.state, prepared, config.as_ref())?;
    let names = final_folder::write(&replay.state, prepared, &result, None, folder)?;
    let tensors = replay.state.engine.tensors().iter().filter(|tensor| tensor.is_reordered());
    Ok(Ok(Rebuilt { names, reordered: tensors.map(|tensor| tensor.name.clone()).collect() }))
}

/// The update whose weights the final folder holds.
fn final_step(run: &Run, chain: &Chain) -> u64 {
    let best = chain.updates.iter().rev().find(|update| update.evaluation.is_some_and(|of| of.best));
    let best = best.filter(|_| run.training.load_best_model_at_end).map(|update| update.step);
    best.unwrap_or(chain.updates.len() as u64)
}

/// What checkpoints and the final folder hold.
fn holds(run: &Run) -> Holds {
    if matches!(run.adapter, Adapter::Lora(_)) { Holds::Adapter } else { Holds::Model }
}

/// The latest intact checkpoint before a step; None stands for the base.
fn nearest(
    prepared: &Prepared,
    chain: &Chain,
    first: u64,
    watch: &mut dyn FnMut(Event),
) -> Result<Option<Opened>, RunError> {
    let output = &prepared.run.output_dir;
    for step in checkpoint::steps(output)?.into_iter().rev().filter(|step| *step < first) {
        let folder = checkpoint::folder_of(output, step);
        match checkpoint::open(&folder, &prepared.identity) {
            Ok(opened) if opened.progress.step == step && opened.progress.chain == chain.link(step) => {
                return Ok(Some(opened));
            }
            Ok(_) => watch(Event::Skipped(format!("{}: its link is not in the chain", folder.display()))),
            Err(error) => watch(Event::Skipped(error.to_string())),
        }
    }
    Ok(None)
}

/// A run that is executed again, after some of its updates.
pub(crate) struct Replay<'a, E: Engine> {
    pub(crate) state: State<E>,
    prepared: &'a Prepared,
    chain: &'a Chain,
    order: EpochOrder,
    schedule: Schedule,
    /// Steps with a checkpoint.
    saved: BTreeSet<u64>,
    /// What the checkpoint held that it began with.
    read: Option<Restored>,
    watch: &'a mut dyn FnMut(Event),
}

impl<'a, E: Engine> Replay<'a, E> {
    /// Starts from the nearest checkpoint before an update, or from the base.
    pub(crate) fn begin(
        make: impl FnOnce(&Settings) -> Result<E, RunError>,
        prepared: &'a Prepared,
        chain: &'a Chain,
        first: u64,
        watch: &'a mut dyn FnMut(Event),
    ) -> Result<Self, RunError> {
        let run = &prepared.run;
        let settings = build_settings(run);
        let opened = nearest(prepared, chain, first, watch)?;
        let mut state =
            State { engine: make(&settings)?, shards: None, progress: Progress::start(prepared.identity.clone()) };
        let read = match &opened {
            Some(opened) => Some(state.restore(Some(opened), &Team::alone())?),
            None => starting_adapter::load(prepared, &mut state.engine).map(|()| None)?,
        };
        watch(Event::Started(state.progress.step));
        let saved = checkpoint::steps(&run.output_dir)?.into_iter().collect();
        let order = EpochOrder::new(run.seed, prepared.train.len());
        let schedule = Schedule::new(run, prepared.steps);
        Ok(Self { state, prepared, chain, order, schedule, saved, read, watch })
    }

    fn through(&mut self, last: u64) -> Result<Replayed, RunError> {
        let from = self.state.progress.step;
        let mut replayed = Replayed {
            from,
            agreeing: 0,
            checkpoints: Vec::new(),
            unread: Vec::new(),
            altered: Vec::new(),
            difference: self.begins_differently()?,
        };
        while replayed.difference.is_none() && self.state.progress.step < last {
            let found = self.update()?;
            let (step, recorded) = (found.step, &self.chain.updates[found.step as usize - 1]);
            if let Some(item) = recorded.first_difference(&found) {
                let mut difference = self.named(step, item);
                difference.numbers = numbers(item, recorded, &found);
                difference.element = self.next_element(step)?.element();
                replayed.difference = Some(difference);
                break;
            }
            replayed.agreeing += 1;
            (self.watch)(Event::Agrees(step));
            let mut element = None;
            if self.saved.contains(&step) {
                match self.stored(step)? {
                    Checkpoint::Same => {
                        replayed.checkpoints.push(step);
                        (self.watch)(Event::CheckpointAgrees(step));
                    }
                    Checkpoint::Differs(found) => element = Some(found),
                    Checkpoint::Unread(why) => replayed.unread.push((step, why)),
                }
            }
            if element.is_none() && self.final_step() == Some(step) {
                element = self.final_element()?;
            }
            if let Some(element) = element {
                let (tensors, element) = (vec![element.tensor.clone()], Some(element));
                let found_in = FoundIn::Folder;
                replayed.altered.push(Difference { step, found_in, tensors, numbers: None, element });
            }
        }
        Ok(replayed)
    }

    /// The update whose weights the final folder holds, if there is one.
    fn final_step(&self) -> Option<u64> {
        let run = &self.prepared.run;
        run.output_dir.join(checkpoint::FINAL).is_dir().then(|| final_step(run, self.chain))
    }

    /// The first weight of the final folder that is not that of the replay, rounded as the folder's
    /// are.
    fn final_element(&self) -> Result<Option<Element>, RunError> {
        let folder = self.prepared.run.output_dir.join(checkpoint::FINAL);
        let files = holds(&self.prepared.run).open(&folder)?;
        let engine = &self.state.engine;
        for (at, tensor) in engine.tensors().iter().enumerate() {
            for own in tensor.to_file(engine.read(at, Stored::Value)?) {
                // A head that is tied to the table is not written.
                let Ok(saved) = files.get(&own.name) else { continue };
                let round = |value: f32| match saved.dtype {
                    Dtype::Bf16 => bf16_to_f32(f32_to_bf16(value)),
                    Dtype::F16 => f16_to_f32(f32_to_f16(value)),
                    _ => value,
                };
                let values: Vec<f32> = own.values.iter().map(|value| round(*value)).collect();
                let found =
                    first_element(checkpoint::FINAL, "weights", (own.name, own.shape), &saved.to_f32()?, &values);
                if found.is_some() {
                    return Ok(found);
                }
            }
        }
        Ok(None)
    }

    /// What it begins with against what the chain has at that step: the names of the tensors too,
    /// in their order.
    fn begins_differently(&self) -> Result<Option<Difference>, RunError> {
        let step = self.state.progress.step;
        let names = self.state.engine.tensors().iter().map(|tensor| &tensor.name);
        if !names.eq(&self.chain.origin.tensors) {
            return Ok(Some(self.named(0, Item::Tensors)));
        }
        if let (Some(before), Some(read)) = (step.checked_sub(1), &self.read) {
            let item = read.difference(&self.chain.updates[before as usize]);
            return Ok(item.map(|item| Difference { found_in: FoundIn::Start(item), ..self.named(step, item) }));
        }
        let found = combined(&self.state.engine.digests()?);
        Ok((found != self.chain.origin.weights).then(|| self.named(step, Item::Weights(None))))
    }

    fn named(&self, step: u64, item: Item) -> Difference {
        let tensors = item.part().map_or(Vec::new(), |part| self.chain.tensors_of(part).to_vec());
        Difference { step, found_in: FoundIn::Chain(item), tensors, numbers: None, element: None }
    }

    /// The next update, and its line.
    pub(crate) fn update(&mut self) -> Result<Update, RunError> {
        float_state::restore();
        let Self { state, prepared, order, schedule, .. } = self;
        let (run, completed) = (&prepared.run, state.progress.step);
        let rows = rows_of(prepared, order, completed);
        let (learning_rate, step) = (schedule.at(completed), completed + 1);
        let report = state.engine.step(&rows, step, learning_rate, &step_settings(run))?;
        state.progress.step = step;
        let mut evaluation = None;
        if run.has_eval() && run.eval.every.is_due(step, prepared.steps) {
            let rows: Vec<&Row> = prepared.eval.iter().collect();
            let micro = run.eval.micro_batch_size.max(1) as usize;
            let found = update::evaluate(&state.engine, &Team::alone(), &rows, run.profile, micro)?;
            let better = state.progress.take_eval(found.loss());
            evaluation = Some(record::evaluated(&found, better));
        }
        Ok(record::line(step, &rows, &report, learning_rate, evaluation))
    }

    /// Goes on to the next checkpoint, if there is one, and looks for the first element there.
    fn next_element(&mut self, step: u64) -> Result<Checkpoint, RunError> {
        let Some(next) = self.saved.range(step..).next().copied() else { return Ok(Checkpoint::Same) };
        while self.state.progress.step < next {
            self.update()?;
        }
        self.stored(next)
    }

    /// The tensors of a checkpoint against those of the replay.
    fn stored(&mut self, step: u64) -> Result<Checkpoint, RunError> {
        let folder = checkpoint::folder_of(&self.prepared.run.output_dir, step);
        let opened = match checkpoint::open_as_it_is(&folder, holds(&self.prepared.run)) {
            Ok(opened) => opened,
            Err(error) => {
                (self.watch)(Event::Skipped(error.to_string()));
                return Ok(Checkpoint::Unread(error.to_string()));
            }
        };
        let engine = &self.state.engine;
        let kinds =
            [("weights", Stored::Value), ("first moment", Stored::Moment(0)), ("second moment", Stored::Moment(1))];
        for (kind, which) in kinds {
            for (at, tensor) in engine.tensors().iter().enumerate() {
                for own in tensor.to_file(engine.read(at, which)?) {
                    let saved = match which {
                        Stored::Value => opened.weight(&own.name, &own.shape),
                        Stored::Moment(order) => opened.moment(order, &own.name, &own.shape),
                    }?;
                    let name = checkpoint::folder_name(step);
                    let found = first_element(&name, kind, (own.name, own.shape), &saved, &own.values);
                    if let Some(found) = found {
                        return Ok(Checkpoint::Differs(found));
                    }
                }
            }
        }
        Ok(Checkpoint::Same)
    }
}

/// A checkpoint against the replay.
enum Checkpoint {
    Same,
    /// The first element that differs.
    Differs(Element),
    /// It cannot be read.
    Unread(String),
}

impl Checkpoint {
    fn element(self) -> Option<Element> {
        match self {
            Self::Differs(element) => Some(element),
            Self::Same | Self::Unread(_) => None,
        }
    }
}

/// The first element of a tensor whose bits differ.
fn first_element(
    folder: &str,
    kind: &'static str,
    (tensor, shape): (String, Vec<usize>),
    saved: &[f32],
    own: &[f32],
) -> Option<Element> {
    let index = saved.iter().zip(own).position(|(a, b)| a.to_bits() != b.to_bits())?;
    let (recorded, replayed) = (saved[index], own[index]);
    Some(Element { folder: folder.to_string(), kind, tensor, shape, index, recorded, replayed })
}

/// Both values of an item that is a number, if it is the number that differs.
fn numbers(item: Item, recorded: &Update, found: &Update) -> Option<[Number; 2]> {
    let pair = |number: fn(&Update) -> Option<Number>| Some([number(recorded)?, number(found)?]);
    let both = match item {
        Item::Loss => pair(|update| Some(Number::F64(f64::from_bits(update.loss)))),
        Item::LearningRate => pair(|update| Some(Number::F64(f64::from_bits(update.learning_rate)))),
        // Of no tensor: it is the norm.
        Item::Gradient(None) => pair(|update| Some(Number::F32(f32::from_bits(update.norm)))),
        Item::Evaluation => pair(|update| update.evaluation.map(|of| Number::F64(f64::from_bits(of.loss)))),
        _ => None,
    };
    both.filter(|[recorded, found]| recorded.bits() != found.bits())
}

/// Why `prepared` is not the run of the chain, in words: what differs between its inputs and those
/// of the record. Empty if it is the same run.
pub fn explain(prepared: &Prepared, chain: &Chain, receipt: Option<&Receipt>) -> Result<Vec<String>, RunError> {
    let (ours, recorded) = (prepared.identity.fields(), &chain.origin.identity);
    if ours == *recorded {
        return Ok(Vec::new());
    }
    let mut said = Vec::new();
    let differs = |field: &str| ours.get(field) != recorded.get(field);
    let value = |of: Option<&String>| of.map_or("none".to_string(), |value| harmless(value, 16));
    let fields: BTreeSet<&str> = ours.keys().chain(recorded.keys()).map(String::as_str).collect();
    for field in fields.into_iter().filter(|field| differs(field) && !DIGESTS_OF_INPUTS.contains(field)) {
        let name = named(field);
        said.push(format!("{name} is {}, the run's was {}", value(ours.get(field)), value(recorded.get(field))));
    }
    if differs("run") {
        said.extend(changed_keys(prepared, receipt));
    }
    if differs("base") {
        said.extend(changed_base(prepared, receipt));
    }
    if differs("data") {
        said.extend(changed_data(prepared, chain, receipt)?);
    }
    if said.is_empty() {
        said.push(
            "the identity of the run differs, but nothing that its receipt names: `isobit verify` it".to_string(),
        );
    }
    Ok(said)
}

/// A field of an identity, in words.
fn named(field: &str) -> String {
    match field {
        "numerics" => "the numerics version".to_string(),
        "profile" => "the profile".to_string(),
        "start" => "the starting adapter".to_string(),
        "load_in_4bit" => "the rule by which the base is quantised while it is loaded (`load_in_4bit`)".to_string(),
        other => format!("{} of the run's identity", quoted(other)),
    }
}

fn changed_keys(prepared: &Prepared, receipt: Option<&Receipt>) -> Vec<String> {
    let Some(receipt) = receipt else { return vec!["a config key that influences the result differs".to_string()] };
    let (ours, recorded) = (prepared.run.influences(), &receipt.made.config);
    let keys: BTreeSet<&String> = ours.keys().chain(recorded.keys()).collect();
    let shown = |value: Option<&String>| value.map_or("not set".to_string(), Clone::clone);
    let differing = keys.into_iter().filter(|key| ours.get(*key) != recorded.get(*key));
    let said = differing.map(|key| match (shown(ours.get(key)), shown(recorded.get(key))) {
        (ours, recorded) if key == "training.rows_per_update" => {
            format!(
                "an update has {ours} rows (micro_batch_size × gradient_accumulation_steps), the run's had {recorded}"
            )
        }
        (ours, recorded) => format!("config `{key}` is {ours}, the run's was {recorded}"),
    });
    said.collect()
}

fn changed_base(prepared: &Prepared, receipt: Option<&Receipt>) -> Vec<String> {
    let folder = prepared.run.base_model.display();
    let Some(receipt) = receipt else { return vec![format!("{folder} is not the base of the run")] };
    let recorded = &receipt.made.base.files;
    let differing = prepared.base_files.iter().filter(|(name, record)| recorded.get(name) != Some(record));
    let said: Vec<String> =
        differing.map(|(name, _)| format!("{folder}/{name} is not the file the run was trained on")).collect();
    if said.is_empty() { vec![format!("{folder} lacks files of the run's base")] } else { said }
}

/// The first update with other rows, and the first line of each file that differs.
fn changed_data(prepared: &Prepared, chain: &Chain, receipt: Option<&Receipt>) -> Result<Vec<String>, RunError> {
    let mut said = Vec::new();
    let mut order = EpochOrder::new(prepared.run.seed, prepared.train.len());
    let first =
        chain.updates.iter().find(|update| row::digest(rows_of(prepared, &mut order, update.step - 1)) != update.rows);
    said.push(match first {
        Some(update) => format!("update {}: its rows are not those of the run", update.step),
        None => "rows that no update was trained on differ".to_string(),
    });
    let recorded = receipt.map_or(&[][..], |receipt| &receipt.made.data);
    for (path, recorded) in prepared.run.datasets.iter().zip(recorded) {
        if let Some(lines) = recorded.first_difference_in(path)? {
            said.push(format!("{}: {lines} is not what the run was trained on", path.display()));
        }
    }
    Ok(said)
}
