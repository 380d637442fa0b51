//! `isobit replay`: executes updates of a run again, on this machine, and compares every one with
//! the chain of the run. It writes nothing.

use crate::Failure;
use crate::auto;
use crate::backend::{Job, Opening, on_device};
use crate::descent::{self, Against, Looked, On};
use crate::diff::coordinates;
use crate::fits::{Given, Ranks};
use crate::model;
use crate::stderr::{config_failure, tell};
use crate::train::Devices;
use isobit_kernels::Backend;
use isobit_models::build::Settings;
use isobit_proof::chain::{self, Chain, Item};
use isobit_proof::layout::METRICS;
use isobit_proof::name::counted;
use isobit_proof::receipt::Receipt;
use isobit_training::checkpoint::RESOLVED;
use isobit_training::config::{self, Adapter, EvalRows, Run};
use isobit_training::prepare::{Prepared, RunError, prepare};
use isobit_training::replay::{self, Difference, Element, Event, FoundIn, Number, Rebuilt, Replayed};
use isobit_training::stages::{Divided, Stages};
use isobit_training::trainer::{Placement, Trainer};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::Write;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// A run folder
    run: PathBuf,
    /// The updates to replay, first and last: `--steps 101..120`
    #[arg(long, value_name = "A..B", value_parser = steps)]
    steps: RangeInclusive<u64>,
    #[command(flatten)]
    how: How,
    /// Execute the updates a second time, on this, and compare op by op: reference, cpu,
    /// cpu:THREADS, opencl:N, cuda:N or hip:N; none to compare no ops [default: the CPU, with other
    /// threads if the replay computes there, and only for an update that differs]
    #[arg(long, value_name = "NAME", value_parser = descent::against)]
    against: Option<Against>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Print no progress
    #[arg(short, long)]
    quiet: bool,
}

/// Where and how updates are executed again. None of it changes a bit.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct How {
    /// Compute on this device instead of the run's: cpu, opencl:N, cuda:N, hip:N, auto, or a list
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Number of threads; 0 means all cores
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// Split an update into other micro-batches, rows times count: `--split 2x8`
    #[arg(long, value_name = "ROWSxCOUNT", value_parser = split)]
    split: Option<(u32, u32)>,
    /// Where the base model is, if not where the config says
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// Where the training data are, if not where the config says, in its order
    #[arg(long, value_name = "FILE", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Where the evaluation data are, if the run has a file of them and it is not where the config
    /// says
    #[arg(long, value_name = "FILE")]
    eval_data: Option<PathBuf>,
    /// Where the adapter is that the run started from, if there is one and it is not where the
    /// config says
    #[arg(long, value_name = "FOLDER")]
    start_adapter: Option<PathBuf>,
    /// Override a key of the config: `--set gradient_checkpointing=none`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

fn steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    let number = |text: &str| text.parse::<u64>().map_err(|_| "write the first and the last update: 101..120");
    let (first, last) = (number(first)?, number(last.trim_start_matches('='))?);
    if first == 0 || last < first {
        return Err("updates are counted from 1, and the last one does not come before the first".to_string());
    }
    Ok(first..=last)
}

fn split(text: &str) -> Result<(u32, u32), String> {
    let numbers = text.split_once('x').map(|(rows, count)| (rows.parse(), count.parse()));
    match numbers {
        Some((Ok(rows), Ok(count))) if rows > 0 && count > 0 => Ok((rows, count)),
        _ => Err("write rows times micro-batches: 2x8".to_string()),
    }
}

/// A run that can be replayed.
pub(crate) struct Subject {
    pub(crate) prepared: Prepared,
    pub(crate) chain: Chain,
    devices: Devices,
    pub(crate) threads: usize,
    /// The folder that the run knew its base by.
    base: PathBuf,
}

impl Subject {
    /// Reads the record and the inputs of a run. Inputs that are not those of the run are listed as
    /// differences.
    pub(crate) fn open(folder: &Path, how: &How) -> Result<(Self, Vec<String>), Failure> {
        if !folder.join(chain::NAME).exists() {
            let (message, hint) = without_chain(folder);
            return Err(Failure::usage(message, hint));
        }
        let chain = Chain::read(folder)?;
        let receipt = isobit_proof::regular::if_there(Receipt::read(folder))?;
        let (run, base) = how.resolved(folder)?;
        // Nothing is generated again.
        let planned = Run { generate_prompts: Vec::new(), ..run.clone() };
        let planned = auto::placed(planned, &Given::default(), Ranks::ALONE, true);
        let (devices, _) = Devices::of(&planned, &[], true, Ranks::ALONE)?;
        let threads = crate::backend::Chosen::host_threads(run.threads as usize)?;
        let prepared = prepare(run)?;
        let explained = replay::explain(&prepared, &chain, receipt.as_ref())?;
        Ok((Self { prepared, chain, devices, threads, base }, explained))
    }

    /// The name of what it computes on.
    pub(crate) fn device(&self) -> String {
        self.devices.name()
    }

    fn check_recorded(&self, steps: &RangeInclusive<u64>) -> Result<(), Failure> {
        let done = self.chain.updates.len() as u64;
        if *steps.end() > done {
            let message = format!("the chain of the run has {}, not {}", counted(done, "update"), steps.end());
            return Err(Failure::usage(message, format!("name updates up to {done}")));
        }
        Ok(())
    }

    /// Replays updates on the device.
    pub(crate) fn replay(
        &self,
        steps: RangeInclusive<u64>,
        quiet: bool,
        watch: &mut dyn FnMut(Event),
    ) -> Result<Replayed, Failure> {
        self.check_recorded(&steps)?;
        let Self { prepared, chain, .. } = self;
        let replayed = match &self.devices {
            Devices::One(chosen) => on_device(chosen, quiet, Replaying { subject: self, steps, watch })?,
            Devices::Several(split) => {
                let stages = split.stages(|_| self.opening())?;
                std::thread::scope(|scope| {
                    let make = |settings: &Settings| Stages::new(scope, self.model(), settings, true, stages);
                    replay::replay(make, prepared, chain, steps, watch)
                })
            }
        };
        replayed.map_err(Failure::from)
    }

    /// Writes the files of the final folder into another one, as the run gives them.
    pub(crate) fn rebuild(&self, folder: &Path) -> Result<Result<Rebuilt, Replayed>, Failure> {
        let Self { prepared, chain, base, .. } = self;
        let rebuilt = match &self.devices {
            Devices::One(chosen) => on_device(chosen, true, Rebuilding { subject: self, folder })?,
            Devices::Several(split) => {
                let stages = split.stages(|_| self.opening())?;
                std::thread::scope(|scope| {
                    let make = |settings: &Settings| Stages::new(scope, self.model(), settings, true, stages);
                    replay::rebuild(make, prepared, chain, (base, folder))
                })
            }
        };
        rebuilt.map_err(Failure::from)
    }

    /// How each device of a list is opened.
    fn opening(&self) -> Opening {
        Opening { threads: self.threads, offload: self.prepared.run.offload, ..Opening::PLAIN }
    }

    fn model(&self) -> Divided<'_> {
        Divided { config: &self.prepared.model, source: &self.prepared.weights }
    }

    /// On one device.
    fn trainer<B: Backend>(&self, backend: B, settings: &Settings) -> Result<Trainer<B>, RunError> {
        let Self { prepared, threads, .. } = self;
        let placement = Placement::new(prepared.run.offload, true, *threads);
        Trainer::whole(backend, &prepared.model, &prepared.weights, settings, placement)
    }
}

impl How {
    /// The config of a run, with what was asked for instead, and the folder of the base in it.
    fn resolved(&self, folder: &Path) -> Result<(Run, PathBuf), Failure> {
        let mut overrides = self.overrides.clone();
        overrides.extend(self.device.iter().map(|device| format!("device={device}")));
        overrides.extend(self.threads.iter().map(|threads| format!("threads={threads}")));
        if let Some((rows, count)) = self.split {
            let recorded = config::read(&folder.join(RESOLVED), &[]).map_err(RunError::Config)?.run.rows_per_update();
            if u64::from(rows) * u64::from(count) != recorded {
                let message = format!(
                    "`--split {rows}x{count}` is {} rows, an update of the run has {recorded}",
                    u64::from(rows) * u64::from(count)
                );
                return Err(Failure::usage(message, "give rows times count with that product"));
            }
            overrides.push(format!("training.micro_batch_size={rows}"));
            overrides.push(format!("training.gradient_accumulation_steps={count}"));
        }
        let settled = config::read(&folder.join(RESOLVED), &overrides);
        let mut run = settled.map_err(|error| config_failure(error, self.device.as_deref()))?.run;
        run.output_dir = folder.to_path_buf();
        let base = run.base_model.clone();
        run.base_model = model::located(self.model.as_ref().unwrap_or(&run.base_model));
        if !self.data.is_empty() {
            if self.data.len() != run.datasets.len() {
                let named = counted(self.data.len() as u64, "data file");
                let verb = if self.data.len() == 1 { "is" } else { "are" };
                let message = format!("{named} {verb} named, the run has {}", run.datasets.len());
                return Err(Failure::usage(message, "name one for each, in the order of the config"));
            }
            run.datasets.clone_from(&self.data);
        }
        match (&mut run.eval.rows, &self.eval_data) {
            (EvalRows::File(path), Some(named)) => path.clone_from(named),
            (_, Some(_)) => {
                return Err(Failure::usage("the run evaluates on no file of its own", "leave out --eval-data"));
            }
            (_, None) => {}
        }
        match (start_of(&mut run), &self.start_adapter) {
            (Some(path), Some(named)) => path.clone_from(named),
            (None, Some(_)) => {
                return Err(Failure::usage("the run did not start from an adapter", "leave out --start-adapter"));
            }
            (_, None) => {}
        }
        check_there(&mut run)?;
        Ok((run, base))
    }
}

/// A folder that cannot be replayed: what it is, and what to do. A run that went on from a version
/// without receipts leaves none.
fn without_chain(folder: &Path) -> (String, &'static str) {
    let shown = folder.display();
    if folder.join(METRICS).exists() {
        let message = format!("{shown} has no {}: it holds a run that left no receipt", chain::NAME);
        return (message, "start the run again in another `output_dir`; `train --fixed` insists on a receipt");
    }
    let message = format!("{shown} holds no run: it has neither {} nor {METRICS}", chain::NAME);
    (message, "name the folder that `train` wrote, where metrics.jsonl is")
}

/// Where the adapter is that a run starts from.
fn start_of(run: &mut Run) -> Option<&mut PathBuf> {
    match &mut run.adapter {
        Adapter::Lora(lora) => lora.resume_from.as_mut(),
        Adapter::Full | Adapter::LastBlocks(_) => None,
    }
}

/// The inputs of a run may have moved: says how to name them.
fn check_there(run: &mut Run) -> Result<(), Failure> {
    let start = start_of(run).map(|path| ("--start-adapter", path.clone()));
    let start = start.iter().map(|(flag, path)| (*flag, path));
    let eval = match &run.eval.rows {
        EvalRows::File(path) => Some(("--eval-data", path)),
        _ => None,
    };
    let data = run.datasets.iter().map(|path| ("--data", path));
    for (flag, path) in std::iter::once(("--model", &run.base_model)).chain(data).chain(eval).chain(start) {
        if !path.exists() {
            let message = format!("{} does not exist", path.display());
            let hint = format!("say with `{flag}` where it is now; paths of the run are relative to where it started");
            return Err(Failure::usage(message, hint));
        }
    }
    Ok(())
}

struct Replaying<'a> {
    subject: &'a Subject,
    steps: RangeInclusive<u64>,
    watch: &'a mut dyn FnMut(Event),
}

impl Job for Replaying<'_> {
    type Result = Result<Replayed, RunError>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let Subject { prepared, chain, .. } = self.subject;
        let make = |settings: &Settings| self.subject.trainer(backend, settings);
        replay::replay(make, prepared, chain, self.steps, self.watch)
    }
}

struct Rebuilding<'a> {
    subject: &'a Subject,
    folder: &'a Path,
}

impl Job for Rebuilding<'_> {
    type Result = Result<Result<Rebuilt, Replayed>, RunError>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let Subject { prepared, chain, base, .. } = self.subject;
        let make = |settings: &Settings| self.subject.trainer(backend, settings);
        replay::rebuild(make, prepared, chain, (base, self.folder))
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let (subject, explained) = Subject::open(&arguments.run, &arguments.how)?;
    if !explained.is_empty() {
        return other_run(arguments, &explained);
    }
    let quiet = arguments.quiet || arguments.json;
    let (first, last) = (*arguments.steps.start(), *arguments.steps.end());
    let mut watch = |event: Event| match event {
        Event::Skipped(why) => tell(&format!("note: not used: {why}")),
        _ if quiet => (),
        Event::Started(0) => tell(&format!("from the base, to replay {}", updates(first, last))),
        Event::Started(from) => tell(&format!("from checkpoint-{from}, to replay {}", updates(first, last))),
        Event::Agrees(step) => tell(&format!("update {step}: the same bits")),
        Event::CheckpointAgrees(step) => tell(&format!("checkpoint-{step}: the same bits")),
    };
    let (replayed, looked) = replayed(&subject, arguments, quiet, &mut watch)?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let printed = if arguments.json {
        let mut object = object(arguments, &replayed, &[]);
        object["descent"] = looked.as_ref().map(Looked::object).into();
        writeln!(out, "{object}")
    } else {
        let mut lines = text(&replayed, &arguments.steps);
        lines.extend(looked.iter().flat_map(Looked::text));
        lines.iter().try_for_each(|line| writeln!(out, "{line}"))
    };
    printed.and_then(|()| out.flush()).map_err(|error| Failure::output(&error))?;
    match looked.filter(Looked::found) {
        Some(_) => Err(Failure::difference()),
        None => ending(&replayed),
    }
}

/// How a command ends that has printed a replay. A checkpoint that cannot be read is damage, not a
/// difference.
pub(crate) fn ending(replayed: &Replayed) -> Result<(), Failure> {
    match replayed.first_difference() {
        Some(_) => Err(Failure::difference()),
        None if replayed.agrees() => Ok(()),
        None => Err(Failure::printed(8)),
    }
}

/// Replays, and descends into the first update that differs from the record, or on the two devices.
/// With `--against` both execute all updates.
fn replayed(
    subject: &Subject,
    arguments: &Arguments,
    quiet: bool,
    watch: &mut dyn FnMut(Event),
) -> Result<(Replayed, Option<Looked>), Failure> {
    let steps = arguments.steps.clone();
    let Devices::One(chosen) = subject.devices else {
        if arguments.against.is_some_and(|against| against != Against::Nothing) {
            let hint = "name one device with `--device`";
            return Err(Failure::usage("`--against` compares one device with another, not a list", hint));
        }
        return Ok((subject.replay(steps, quiet, watch)?, None));
    };
    let (first, second) = (On::Device(chosen), On::second(arguments.against, &subject.prepared)?);
    if let (Some(On::Device(second)), Some(_)) = (second, arguments.against) {
        // Before an hour of work on the first.
        second.check_there()?;
        if second == chosen {
            tell(&format!("note: both executions are on {first}: what it gets wrong every time is not found"));
        }
    }
    let (Some(second), Some(_)) = (second, arguments.against) else {
        let replayed = subject.replay(steps, quiet, watch)?;
        let step = replayed.difference.as_ref().and_then(Difference::computed);
        let looked = second.zip(step).map(|(second, step)| Looked::into(subject, step, [first, second]));
        return Ok((replayed, looked));
    };
    subject.check_recorded(&steps)?;
    let (replayed, ours) = descent::traced(first, subject, steps.clone(), watch)?;
    let computed = |replayed: &Replayed| replayed.difference.as_ref().and_then(Difference::computed);
    let (other, theirs) = match Failure::catch(|| descent::traced(second, subject, steps, &mut |_| ())) {
        Ok(traced) => traced,
        // What the first device found stands.
        Err(failure) => {
            let step = computed(&replayed).ok_or_else(|| failure.clone())?;
            return Ok((replayed, Some(Looked::Failed { step, why: failure.message })));
        }
    };
    let parted = ours.iter().zip(&theirs).position(|(a, b)| a != b).map(|at| replayed.from + 1 + at as u64);
    let differing = [&replayed, &other].map(computed);
    let step = differing.into_iter().chain([parted]).flatten().min();
    let looked = match step {
        Some(step) => Looked::into(subject, step, [first, second]),
        None => Looked::Same { on: [first, second], updates: ours.len().min(theirs.len()) },
    };
    Ok((replayed, Some(looked)))
}

/// The inputs are not those of the run: nothing is computed.
fn other_run(arguments: &Arguments, explained: &[String]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let none = Replayed::default();
    let printed = if arguments.json {
        writeln!(out, "{}", object(arguments, &none, explained))
    } else {
        explained.iter().try_for_each(|line| writeln!(out, "{line}"))
    };
    printed.map_err(|error| Failure::output(&error))?;
    Err(Failure::difference())
}

pub(crate) fn text(replayed: &Replayed, steps: &RangeInclusive<u64>) -> Vec<String> {
    let from = if replayed.from == 0 { "the base".to_string() } else { format!("checkpoint-{}", replayed.from) };
    let mut lines: Vec<String> = Vec::new();
    for difference in replayed.altered.iter().chain(&replayed.difference) {
        lines.push(describe(difference));
        lines.extend(difference.element.as_ref().map(describe_element));
    }
    let unread = replayed.unread.iter().map(|(step, why)| format!("checkpoint-{step} was not compared: {why}"));
    lines.extend(unread);
    let Some(difference) = &replayed.difference else {
        let checkpoints = match replayed.checkpoints.len() {
            0 => String::new(),
            1 => ", and so does 1 checkpoint".to_string(),
            count => format!(", and so do {count} checkpoints"),
        };
        let whom = if replayed.altered.is_empty() { "record" } else { "chain" };
        let agreeing = agree(replayed.from + 1, *steps.end());
        lines.push(format!("replayed from {from}: {agreeing} with the {whom}{checkpoints}"));
        return lines;
    };
    if replayed.agreeing > 0 {
        let last = replayed.from + replayed.agreeing;
        lines.push(format!("replayed from {from}: {}", agree(replayed.from + 1, last)));
    }
    if difference.step < *steps.end() {
        lines.push(format!("not replayed: {}", updates(difference.step + 1, *steps.end())));
    }
    lines
}

/// "update 7", or "updates 7 to 9".
pub(crate) fn updates(first: u64, last: u64) -> String {
    if first == last { format!("update {first}") } else { format!("updates {first} to {last}") }
}

fn agree(first: u64, last: u64) -> String {
    format!("{} agree{}", updates(first, last), if first == last { "s" } else { "" })
}

fn describe(difference: &Difference) -> String {
    let Difference { step, found_in, tensors, numbers, .. } = difference;
    let item = match found_in {
        FoundIn::Chain(item) => item,
        FoundIn::Start(item) => {
            return format!("checkpoint-{step}, where the replay begins: {} the chain", item.is_not_that_of());
        }
        FoundIn::Folder => {
            let folder = difference.element.as_ref().map_or("a folder", |element| &element.folder);
            return format!("update {step}: the chain agrees, but {folder} holds other numbers");
        }
    };
    let name = if is_norm(difference) { "norm of the gradient" } else { item.name() };
    let mut line = match step {
        0 => format!("before the first update: {name} differ{}", if item.is_plural() { "" } else { "s" }),
        _ => format!("update {step}: {name} differ{}", if item.is_plural() { "" } else { "s" }),
    };
    match &tensors[..] {
        [] => (),
        [one] => _ = write!(line, " in {one}"),
        [first, .., last] => _ = write!(line, " in a tensor from {first} to {last}"),
    }
    if let Some([recorded, replayed]) = numbers {
        _ = write!(line, ": {recorded} recorded, {replayed} replayed");
    }
    line
}

/// Whether the norm is the number that differs: of the gradient itself no tensor is named.
fn is_norm(difference: &Difference) -> bool {
    difference.numbers.is_some() && matches!(difference.found_in, FoundIn::Chain(Item::Gradient(_)))
}

fn describe_element(element: &Element) -> String {
    let Element { folder, kind, tensor, shape, index, recorded, replayed } = element;
    format!(
        "{folder}, {kind}, {tensor} {:?}: {recorded:?} (0x{:08x}) recorded, {replayed:?} (0x{:08x}) replayed",
        coordinates(*index as u64, shape),
        recorded.to_bits(),
        replayed.to_bits()
    )
}

/// What a replay found: what differs first (null if nothing does), everything that differs, and the
/// checkpoints that could not be read.
pub(crate) fn add_found(object: &mut Value, replayed: &Replayed) {
    let all: Vec<Value> = replayed.altered.iter().chain(&replayed.difference).map(difference_object).collect();
    let unread = replayed.unread.iter().map(|(step, why)| json!({ "step": step, "why": why }));
    object["unread"] = unread.collect();
    object["difference"] = all.first().cloned().into();
    object["differences"] = all.into();
}

fn difference_object(difference: &Difference) -> Value {
    let (found_in, item) = match difference.found_in {
        FoundIn::Chain(item) => ("chain", item.name()),
        FoundIn::Start(item) => ("start", item.name()),
        FoundIn::Folder => ("folder", "folder"),
    };
    let item = if is_norm(difference) { "norm" } else { item };
    json!({ "step": difference.step, "found_in": found_in, "item": item, "tensors": difference.tensors,
        "numbers": difference.numbers.map(numbers_object),
        "element": difference.element.as_ref().map(element_object) })
}

fn numbers_object([recorded, replayed]: [Number; 2]) -> Value {
    let value = |number: Number| match number {
        Number::F32(value) => json!(value),
        Number::F64(value) => json!(value),
    };
    json!({ "recorded": value(recorded), "recorded_bits": recorded.bits(),
        "replayed": value(replayed), "replayed_bits": replayed.bits() })
}

fn element_object(element: &Element) -> Value {
    let mut object = numbers_object([element.recorded, element.replayed].map(Number::F32));
    object["folder"] = element.folder.as_str().into();
    object["kind"] = element.kind.into();
    object["tensor"] = element.tensor.as_str().into();
    object["place"] = json!(coordinates(element.index as u64, &element.shape));
    object
}

fn object(arguments: &Arguments, replayed: &Replayed, explained: &[String]) -> Value {
    let mut object = json!({ "schema": "isobit.replay/1", "run": arguments.run.display().to_string(),
        "steps": [arguments.steps.start(), arguments.steps.end()], "from": replayed.from,
        "agreeing": replayed.agreeing, "checkpoints": replayed.checkpoints,
        "ok": replayed.agrees() && explained.is_empty(), "inputs": explained });
    add_found(&mut object, replayed);
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(found_in: FoundIn, numbers: Option<[Number; 2]>) -> Difference {
        Difference { step: 4, found_in, tensors: Vec::new(), numbers, element: None }
    }

    #[test]
    fn a_norm_is_shown_with_the_bits_that_are_recorded() {
        let numbers = Some([1.5_f32, 1.25].map(Number::F32));
        let norm = of(FoundIn::Chain(Item::Gradient(None)), numbers);
        let line = "update 4: norm of the gradient differs: 1.5 (0x3fc00000) recorded, 1.25 (0x3fa00000) replayed";
        assert_eq!(describe(&norm), line);
        let loss = of(FoundIn::Chain(Item::Loss), Some([1.5, 1.25].map(Number::F64)));
        let line = "update 4: loss differs: 1.5 (0x3ff8000000000000) recorded, 1.25 (0x3ff4000000000000) replayed";
        assert_eq!(describe(&loss), line);
    }

    /// The object says what the text says.
    #[test]
    fn the_object_has_every_difference_and_what_was_not_read() {
        let element = Element {
            folder: "checkpoint-2".to_string(),
            kind: "weights",
            tensor: "a".to_string(),
            shape: vec![2, 3],
            index: 4,
            recorded: 1.5,
            replayed: 1.25,
        };
        let folder = Difference { step: 2, element: Some(element), ..of(FoundIn::Folder, None) };
        let norm = of(FoundIn::Chain(Item::Gradient(None)), Some([1.5_f32, 1.25].map(Number::F32)));
        let unread = vec![(3, "checkpoint-3: it is gone".to_string())];
        let replayed = Replayed { altered: vec![folder], unread, difference: Some(norm), ..Replayed::default() };
        let mut object = json!({});
        add_found(&mut object, &replayed);
        assert_eq!(object["unread"], json!([{ "step": 3, "why": "checkpoint-3: it is gone" }]));
        let [first, second] = &object["differences"].as_array().expect("a list")[..] else { panic!("{object}") };
        assert_eq!((first, &first["found_in"]), (&object["difference"], &"folder".into()));
        assert_eq!(
            (&first["element"]["place"], &first["element"]["recorded_bits"]),
            (&json!([1, 1]), &"3fc00000".into())
        );
        assert_eq!((&second["found_in"], &second["item"]), (&"chain".into(), &"norm".into()));
        assert_eq!(second["numbers"]["replayed_bits"], "3fa00000");
        assert_eq!(text(&replayed, &(1..=4)).len(), 4);
    }

    /// A checkpoint that cannot be read is damage, for `prove` as for `replay`.
    #[test]
    fn what_cannot_be_read_is_no_difference() {
        let code = |replayed: &Replayed| ending(replayed).map_or_else(|failure| failure.code, |()| 0);
        let unread = Replayed { unread: vec![(3, String::new())], ..Replayed::default() };
        let differing = Replayed { difference: Some(of(FoundIn::Folder, None)), ..unread.clone() };
        assert_eq!([&Replayed::default(), &unread, &differing].map(code), [0, 8, 1]);
    }
}
