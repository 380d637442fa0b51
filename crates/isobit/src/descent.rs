//! The part of `isobit replay` that looks for an op: an update is executed on two devices of this
//! machine, and the first op that writes other bits is named.

use crate::Failure;
use crate::audit;
use crate::backend::{Chosen, Job, on_device};
use crate::diff::coordinates;
use crate::replay::Subject;
use crate::watcher::Watcher;
use isobit_autograd::Offload;
use isobit_kernels::observe::Observed;
use isobit_kernels::{Backend, Reference};
use isobit_models::build::Settings;
use isobit_numerics::digest::Digest;
use isobit_proof::name::counted;
use isobit_training::descent::{Before, Differing, Execution, Executor, Pair, first_element};
use isobit_training::prepare::{Prepared, RunError};
use isobit_training::replay::{self, Event, Replayed};
use isobit_training::trace::{Parting, TracedCall, Tracer, Written};
use isobit_training::trainer::{Placement, Trainer};
use serde_json::{Value, json};
use std::fmt;
use std::ops::RangeInclusive;

/// What `--against` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Against {
    Nothing,
    Reference,
    /// With so many threads; None for others than the first execution's.
    Cpu(Option<usize>),
    Device(isobit_kernels::gpu::Selector),
}

pub(crate) fn against(text: &str) -> Result<Against, String> {
    Ok(match text {
        "none" => Against::Nothing,
        "reference" => Against::Reference,
        "cpu" => Against::Cpu(None),
        _ => match text.strip_prefix("cpu:") {
            Some(threads) => {
                let threads = threads.parse().ok().filter(|threads| *threads > 0);
                Against::Cpu(Some(threads.ok_or("write the threads of the CPU as a number: cpu:2")?))
            }
            None => Against::Device(
                text.parse().map_err(|_| "name reference, cpu, cpu:THREADS, opencl:N, cuda:N or hip:N")?,
            ),
        },
    })
}

/// Where an execution computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    Reference,
    Device(Chosen),
}

impl On {
    /// The second device; None if there is to be none. Without a choice it is the one that audits
    /// choose.
    pub(crate) fn second(against: Option<Against>, prepared: &Prepared) -> Result<Option<Self>, Failure> {
        Ok(Some(match against {
            Some(Against::Nothing) => return Ok(None),
            Some(Against::Reference) => Self::Reference,
            Some(Against::Cpu(Some(threads))) => Self::Device(Chosen::parse("cpu", threads)?),
            Some(Against::Device(selector)) => Self::Device(Chosen::parse(&selector.to_string(), 0)?),
            None | Some(Against::Cpu(None)) => Self::Device(audit::auditing(&prepared.run, None)?),
        }))
    }

    fn run<J: Job>(self, job: J) -> Result<J::Result, Failure> {
        match self {
            Self::Reference => Ok(job.run(Reference)),
            Self::Device(chosen) => on_device(&chosen, true, job),
        }
    }
}

impl fmt::Display for On {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reference => f.write_str("reference"),
            Self::Device(Chosen::Cpu { threads: 1 }) => f.write_str("cpu with 1 thread"),
            Self::Device(Chosen::Cpu { threads }) => write!(f, "cpu with {threads} threads"),
            Self::Device(chosen) => f.write_str(&chosen.name()),
        }
    }
}

type Observing<B> = Trainer<Observed<B, Watcher>>;

/// An engine whose ops are traced. Everything is on the device, where it can be observed.
fn engine<B: Backend>(
    backend: B,
    tracer: &Tracer,
    subject: &Subject,
    settings: &Settings,
) -> Result<Observing<B>, RunError> {
    let backend = Observed { inner: backend, observer: Watcher::Trace(tracer.clone()) };
    let (prepared, placement) = (&subject.prepared, Placement::new(Offload::NONE, true, 1));
    Trainer::whole(backend, &prepared.model, &prepared.weights, settings, placement)
}

/// A replay, and for every update that agrees with the record a digest of what its ops wrote.
pub(crate) fn traced(
    on: On,
    subject: &Subject,
    steps: RangeInclusive<u64>,
    watch: &mut dyn FnMut(Event),
) -> Result<(Replayed, Vec<Digest>), Failure> {
    on.run(Tracing { subject, steps, watch })?.map_err(Failure::from)
}

struct Tracing<'a> {
    subject: &'a Subject,
    steps: RangeInclusive<u64>,
    watch: &'a mut dyn FnMut(Event),
}

impl Job for Tracing<'_> {
    type Result = Result<(Replayed, Vec<Digest>), RunError>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let Self { subject, steps, watch } = self;
        let (tracer, mut digests) = (Tracer::default(), Vec::new());
        let make = |settings: &Settings| engine(backend, &tracer, subject, settings);
        let mut watch = |event: Event| {
            match event {
                Event::Started(_) => tracer.start(None),
                Event::Agrees(_) => {
                    digests.push(tracer.stop().0.digest());
                    tracer.start(None);
                }
                _ => (),
            }
            watch(event);
        };
        let replayed = replay::replay(make, &subject.prepared, &subject.chain, steps, &mut watch)?;
        Ok((replayed, digests))
    }
}

/// What two devices showed.
pub(crate) enum Looked {
    /// So many updates are the same in every op.
    Same {
        on: [On; 2],
        updates: usize,
    },
    At(Box<Descent>),
    /// Something differs in this update, and it could not be executed again: a device may be gone,
    /// or have too little memory for a model of which nothing is offloaded.
    Failed {
        step: u64,
        why: String,
    },
}

impl Looked {
    /// Descends into an update. What was found before stands, whatever becomes of this.
    pub(crate) fn into(subject: &Subject, step: u64, on: [On; 2]) -> Self {
        match Failure::catch(|| descend(subject, step, on)) {
            Ok(descent) => Self::At(Box::new(descent)),
            Err(failure) => Self::Failed { step, why: failure.message },
        }
    }

    /// Whether the devices differ from each other or from themselves.
    pub(crate) fn found(&self) -> bool {
        match self {
            Self::Same { .. } => false,
            Self::At(descent) => descent.found(),
            Self::Failed { .. } => true,
        }
    }

    pub(crate) fn text(&self) -> Vec<String> {
        match self {
            Self::Same { on: [first, second], updates } => {
                let updates = counted(*updates as u64, "update");
                vec![format!("{first} and {second} write the same bits in every op of {updates}")]
            }
            Self::At(descent) => descent.text(),
            Self::Failed { step, why } => vec![format!("update {step}: its ops were not compared: {why}")],
        }
    }

    pub(crate) fn object(&self) -> Value {
        match self {
            Self::Same { on, updates } => {
                json!({ "on": on.map(|on| on.to_string()), "updates": updates, "difference": null })
            }
            Self::At(descent) => descent.object(),
            Self::Failed { step, why } => json!({ "step": step, "failed": why }),
        }
    }
}

/// What was found about an update.
pub(crate) struct Descent {
    pub(crate) step: u64,
    on: [On; 2],
    /// Ops of the update.
    calls: usize,
    parting: Option<Parting>,
    own: [Option<Parting>; 2],
    element: Option<Differing>,
    /// Whether each gave the line of the record; if it stopped, why.
    recorded: [Result<bool, String>; 2],
}

/// Executes an update on two devices, each twice, and compares op by op.
fn descend(subject: &Subject, step: u64, on: [On; 2]) -> Result<Descent, Failure> {
    let (before, first) = on[0].run(First { subject, step })??;
    let (second, theirs) = on[1].run(Second { subject, before: &before, first: &first[0] })??;
    let pair = Pair { first, second };
    let parting = pair.parting();
    let mut element = None;
    if let (Some(Parting::Written(call)), Some(theirs)) = (parting, theirs) {
        let ours = on[0].run(Fetching { subject, before: &before, call })??;
        element = ours.and_then(|ours| first_element(&ours, &theirs));
    }
    let recorded = &subject.chain.updates[step as usize - 1];
    let equals = |[one, _]: &[Execution; 2]| one.line.as_ref().map(|line| line == recorded).map_err(Clone::clone);
    let (calls, own) = (pair.first[0].trace.len(), pair.own_partings());
    let recorded = [equals(&pair.first), equals(&pair.second)];
    Ok(Descent { step, on, calls, parting, own, element, recorded })
}

/// Replays up to an update and executes it twice.
struct First<'a> {
    subject: &'a Subject,
    step: u64,
}

impl Job for First<'_> {
    type Result = Result<(Before, [Execution; 2]), RunError>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        with_executor(backend, self.subject, self.step, |executor| {
            let before = executor.reach(self.step)?;
            let executions = [executor.execute(&before)?, executor.execute(&before)?];
            Ok((before, executions))
        })
    }
}

/// Executes the update twice, and once more for the tensors of the call that differs.
struct Second<'a> {
    subject: &'a Subject,
    before: &'a Before,
    first: &'a Execution,
}

impl Job for Second<'_> {
    type Result = Result<([Execution; 2], Option<Vec<Written>>), RunError>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let Self { subject, before, first } = self;
        with_executor(backend, subject, 1, |executor| {
            let executions = [executor.execute(before)?, executor.execute(before)?];
            // What this device wrote in the call is the other side of the difference.
            let theirs = match executions[0].trace.parting(&first.trace) {
                Some(Parting::Written(call)) => executor.fetch(before, &call)?,
                _ => None,
            };
            Ok((executions, theirs))
        })
    }
}

struct Fetching<'a> {
    subject: &'a Subject,
    before: &'a Before,
    call: TracedCall,
}

impl Job for Fetching<'_> {
    type Result = Result<Option<Vec<Written>>, RunError>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        with_executor(backend, self.subject, 1, |executor| executor.fetch(self.before, &self.call))
    }
}

/// An executor from the nearest checkpoint before an update. Checkpoints that cannot be used have
/// been named already.
fn with_executor<B: Backend, R>(
    backend: B,
    subject: &Subject,
    step: u64,
    work: impl FnOnce(&mut Executor<'_, Observing<B>>) -> Result<R, RunError>,
) -> Result<R, RunError> {
    let tracer = Tracer::default();
    let make = |settings: &Settings| engine(backend, &tracer, subject, settings);
    let mut watch = |_: Event| ();
    let of = (&subject.prepared, &subject.chain);
    work(&mut Executor::new(make, tracer.clone(), of, step, &mut watch)?)
}

impl Descent {
    fn found(&self) -> bool {
        self.parting.is_some() || self.own.iter().any(Option::is_some)
    }

    fn text(&self) -> Vec<String> {
        let Self { step, on: [first, second], calls, .. } = self;
        let mut lines = Vec::new();
        match &self.parting {
            None => lines.push(format!("update {step}: {first} and {second} write the same bits in all {calls} ops")),
            Some(parting) => {
                lines.push(format!("update {step}, {}: {first} and {second} differ", parted(parting)));
                lines.extend(self.element_text());
            }
        }
        for (on, own) in self.on.iter().zip(&self.own) {
            lines.push(match own {
                None => format!("{on}: agrees with itself"),
                Some(parting) => {
                    format!("{on}: does not agree with itself: executed again, it differs in {}", parted(parting))
                }
            });
        }
        lines.push(self.verdict());
        lines
    }

    fn element_text(&self) -> Vec<String> {
        let Some(Parting::Written(TracedCall { call, after_slices, .. })) = self.parting else { return Vec::new() };
        let mut lines = Vec::new();
        let [first, second] = &self.on;
        if let Some(Differing { output, outputs, index, length, count, format, bits }) = &self.element {
            let [one, other] = bits.map(|bits| format.text(bits));
            let place = place(call.size, *index, *length);
            lines.push(format!(
                "output {} of {outputs}, element {place}: {one} on {first}, {other} on {second}; {count} of {length} \
                 elements differ",
                output + 1
            ));
        } else {
            lines.push("its elements cannot be shown: another execution did not repeat it".to_string());
        }
        if after_slices {
            lines.push("slices that it may read were made just before; they are not compared themselves".to_string());
        }
        lines
    }

    /// Who gives the recorded bits.
    fn verdict(&self) -> String {
        let [first, second] = &self.on;
        let says = |of: &Result<bool, String>| matches!(of, Ok(true));
        match (self.recorded.each_ref().map(says), self.found()) {
            ([true, true], _) => "both give the recorded update".to_string(),
            ([true, false], _) => format!("the record has the bits of {first}"),
            ([false, true], _) => format!("the record has the bits of {second}"),
            ([false, false], true) => "neither gives the recorded update".to_string(),
            ([false, false], false) => {
                "both devices agree: the machine that made the record computes differently, or the record was \
                 changed later"
                    .to_string()
            }
        }
    }

    fn object(&self) -> Value {
        let parting = |parting: &Parting| match parting {
            Parting::Written(call) => call_object(call),
            Parting::Calls(calls) => json!({ "calls": calls.each_ref().map(|call| call.as_ref().map(call_object)) }),
        };
        let element = self.element.as_ref().map(|element| {
            let Differing { output, outputs, index, length, count, format, bits } = element;
            let values = bits.map(|bits| format.text(bits));
            json!({ "output": output, "outputs": outputs, "index": index, "length": length, "differing": count,
                "values": values, "bits": bits.map(|bits| format!("{bits:08x}")) })
        });
        let recorded = self.recorded.each_ref().map(|of| match of {
            Ok(equal) => json!(equal),
            Err(why) => json!(why),
        });
        json!({ "step": self.step, "on": self.on.map(|on| on.to_string()), "ops": self.calls,
            "difference": self.parting.as_ref().map(parting), "element": element,
            "differs_from_itself": self.own.each_ref().map(|own| own.as_ref().map(parting)),
            "gives_the_record": recorded })
    }
}

/// Row and column in the result of a product, or the index.
fn place([rows, columns, _]: [usize; 3], index: usize, length: usize) -> String {
    if rows * columns == length && length > 0 {
        return format!("{:?}", coordinates(index as u64, &[rows, columns]));
    }
    index.to_string()
}

fn call_object(call: &TracedCall) -> Value {
    let TracedCall { number, call, at, nth, .. } = call;
    json!({ "number": number, "op": call.op, "size": call.size, "batch": at.batch.to_string(),
        "part": at.part.to_string(), "nth": nth })
}

fn parted(parting: &Parting) -> String {
    let named = |call: &TracedCall| {
        let TracedCall { call, at, nth, .. } = call;
        let size = if call.size == [0; 3] { String::new() } else { format!(" {:?}", call.size) };
        format!("{at}, {}{size} (call {nth} of it there)", call.op)
    };
    match parting {
        Parting::Written(call) => named(call),
        Parting::Calls([one, other]) => {
            let named = |call: &Option<TracedCall>| call.as_ref().map_or("its end".to_string(), named);
            format!("the order of ops ({} and {})", named(one), named(other))
        }
    }
}
