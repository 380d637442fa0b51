//! The descent names exactly the op that was spoiled: update, micro-batch, layer, op, element, and
//! says which device differs from itself.

use crate::ranks_ground::{Ground, Silent};
use isobit_conformance::devices_or_skips;
use isobit_kernels::cpu::CpuMemory;
use isobit_kernels::observe::{Call, Observed, Observer};
use isobit_kernels::op::Output;
use isobit_kernels::{Backend, Buffer, Cpu, Pass, Path as CpuPath, Place, Reference};
use isobit_models::build::Settings;
use isobit_proof::chain::Chain;
use isobit_training::checkpoint::Start;
use isobit_training::descent::{Before, Differing, Executor, Pair, first_element};
use isobit_training::prepare::{Prepared, RunError};
use isobit_training::ranks::Team;
use isobit_training::replay::{Event, replay};
use isobit_training::run::train_with;
use isobit_training::trace::{Format, Parting, Trace, TracedCall, Tracer};
use isobit_training::trainer::Trainer;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

const LORA: &str = "type = \"lora\"\nlora_r = 4\nlora_dropout = 0.1\nlora_target_modules = [\"q_proj\", \"down_proj\"]";
const FULL: &str = "type = \"full\"";

/// The update that is looked into; the checkpoint before it is at step 2.
const STEP: u64 = 4;
/// Two groups of rows, each one micro-batch.
const GROUPS: &str = "training.gradient_groups=2";

struct Subject {
    prepared: Prepared,
    chain: Chain,
    _ground: Ground,
}

impl Subject {
    fn new(fixture: &str, adapter: &'static str, sets: &[&str]) -> Self {
        let ground = Ground::new(fixture, adapter);
        let prepared = ground.prepared("run", &[sets, &[GROUPS]].concat(), None).expect("prepared");
        let make = |settings: &Settings| trainer(cpu(2), &prepared, settings);
        train_with(make, &prepared, Start::New, &Team::alone(), &mut Silent).expect("trained");
        let chain = Chain::read(&prepared.run.output_dir).expect("a chain");
        Self { prepared, chain, _ground: ground }
    }

    /// Works with an executor of a device.
    fn on<B: Backend, R>(
        &self,
        backend: B,
        work: impl FnOnce(&mut Executor<'_, Trainer<Observed<B, Tracer>>>) -> R,
    ) -> R {
        let tracer = Tracer::default();
        let observed = Observed { inner: backend, observer: tracer.clone() };
        let make = |settings: &Settings| trainer(observed, &self.prepared, settings);
        let mut watch = |_: Event| ();
        let executor = Executor::new(make, tracer, (&self.prepared, &self.chain), STEP, &mut watch);
        work(&mut executor.expect("an executor"))
    }

    fn before(&self) -> Before {
        self.on(cpu(1), |executor| executor.reach(STEP)).expect("reached")
    }
}

fn cpu(threads: usize) -> Cpu {
    Cpu::new(threads, CpuPath::best()).expect("an available path")
}

fn trainer<B: Backend>(backend: B, prepared: &Prepared, settings: &Settings) -> Result<Trainer<B>, RunError> {
    let built = isobit_models::build(&backend, &prepared.model, &prepared.weights, settings)?;
    Ok(Trainer::new(backend, built))
}

/// Changes one bit of the first float32 tensor that a call writes, in every execution of an update
/// or in the next one only.
#[derive(Clone)]
struct Spoil(Rc<Spoiling>);

struct Spoiling {
    /// The call, counted from the first micro-batch on as a trace counts.
    call: Cell<usize>,
    calls: Cell<usize>,
    executions_left: Cell<usize>,
    element: usize,
    mask: u32,
    /// Output and length of what was spoiled, the last time.
    spoiled: RefCell<Option<(usize, usize)>>,
}

impl Spoil {
    const ELEMENT: usize = 5;
    const MASK: u32 = 1 << 21;

    fn new() -> Self {
        let spoiled = RefCell::new(None);
        let (call, calls, executions_left) = (Cell::new(usize::MAX), Cell::new(0), Cell::new(usize::MAX));
        Self(Rc::new(Spoiling { call, calls, executions_left, element: Self::ELEMENT, mask: Self::MASK, spoiled }))
    }

    fn set(&self, call: usize, executions: usize) {
        self.0.call.set(call);
        self.0.executions_left.set(executions);
        self.0.spoiled.take();
    }
}

impl Observer<Cpu> for Spoil {
    fn enter(&self, place: Place) {
        if matches!(place, Place::MicroBatch { first: 0, .. }) {
            self.0.calls.set(0);
        }
    }

    fn before(&self, _: &Cpu, _: Call, _: &mut Buffer<u8>) {}

    fn after(&self, _: &Cpu, _: Call, outputs: Vec<Output<'_, CpuMemory>>) {
        let Spoiling { call, calls, executions_left, element, mask, spoiled } = &*self.0;
        let compared = outputs.iter().any(|output| !matches!(output, Output::Rows(_) | Output::Weight(_)));
        let number = calls.replace(calls.get() + usize::from(compared));
        if !compared || number != call.get() || executions_left.get() == 0 {
            return;
        }
        executions_left.set(executions_left.get() - 1);
        let tensors = outputs.into_iter().enumerate();
        let first = tensors.filter_map(|(at, output)| match output {
            Output::F32(tensor) | Output::Kept(tensor) => Some((at, tensor)),
            _ => None,
        });
        if let Some((at, tensor)) = first.into_iter().find(|(_, tensor)| !tensor.is_empty()) {
            let element = element % tensor.len();
            tensor[element] = f32::from_bits(tensor[element].to_bits() ^ mask);
            spoiled.replace(Some((at, element)));
        }
    }
}

/// All calls of a trace.
fn calls(trace: &Trace) -> impl Iterator<Item = TracedCall> + '_ {
    (0..trace.len()).map_while(|number| trace.call(number))
}

/// One trace for every thread count, path and device, and the line is that of the chain.
#[test]
fn every_backend_has_the_same_trace() {
    let gpus = devices_or_skips("descent::every_backend_has_the_same_trace");
    for (fixture, adapter, sets) in [
        ("qwen2-base", LORA, &["training.gradient_checkpointing=selective"][..]),
        ("qwen2-tied", FULL, &["training.gradient_checkpointing=none"]),
        ("qwen3moe-base", FULL, &["training.gradient_checkpointing=full"]),
        ("qwen3_5moe-hybrid", LORA, &["training.gradient_checkpointing=full"]),
    ] {
        let subject = Subject::new(fixture, adapter, sets);
        let before = subject.before();
        let execution = subject.on(cpu(2), |executor| executor.execute(&before)).expect("executed");
        let recorded = &subject.chain.updates[STEP as usize - 1];
        assert_eq!(execution.line.as_ref(), Ok(recorded), "{fixture}");
        assert!(execution.trace.len() > 200, "{fixture}: {} calls", execution.trace.len());
        let same = |name: &str, trace: &Trace| {
            assert_eq!(execution.trace.parting(trace), None, "{fixture}, {name}");
            assert_eq!(execution.trace.digest(), trace.digest());
        };
        let scalar = Cpu::new(1, CpuPath::Scalar).expect("every machine has this path");
        same("scalar", &subject.on(scalar, |executor| executor.execute(&before)).expect("executed").trace);
        same("reference", &subject.on(Reference, |executor| executor.execute(&before)).expect("executed").trace);
        // The hybrid mixture has most ops; compiling them for others takes long.
        for gpu in gpus.iter().filter(|_| fixture == "qwen3_5moe-hybrid") {
            same("device", &subject.on(gpu.clone(), |executor| executor.execute(&before)).expect("executed").trace);
        }
    }
}

/// Every op in every part of the model and every pass is spoiled once.
#[test]
fn the_spoiled_op_is_named() {
    for (fixture, adapter, sets) in [
        ("qwen2-base", LORA, &["training.gradient_checkpointing=full"][..]),
        ("qwen3_5moe-hybrid", FULL, &["training.gradient_checkpointing=none"]),
    ] {
        let subject = Subject::new(fixture, adapter, sets);
        let before = subject.before();
        let sound = subject.on(cpu(2), |executor| executor.execute(&before)).expect("executed");
        // One call of each op in each place of the second micro-batch, and of each op elsewhere.
        let second = |call: &TracedCall| call.at.batch == Place::MicroBatch { first: 2, end: 4 };
        let mut seen = BTreeSet::new();
        let targets: Vec<TracedCall> = calls(&sound.trace)
            .filter(|call| second(call) || matches!(call.at.batch, Place::Update | Place::Evaluation { .. }))
            .filter(|call| seen.insert((call.call.op, call.at)))
            .collect();
        assert!(targets.len() > 40, "{fixture}: {} targets", targets.len());
        let spoil = Spoil::new();
        let spoiled = Observed { inner: cpu(1), observer: spoil.clone() };
        let mut spoiled_count = 0;
        subject.on(spoiled, |faulty| {
            for target in &targets {
                spoil.set(target.number, usize::MAX);
                let execution = faulty.execute(&before).expect("executed");
                let Some((output, index)) = spoil.0.spoiled.take() else { continue };
                spoiled_count += 1;
                // The op, its place and which call of the op there it is.
                assert_eq!(
                    execution.trace.parting(&sound.trace).as_ref().map(number),
                    Some(target.number),
                    "{target:?}"
                );
                let Some(Parting::Written(found)) = execution.trace.parting(&sound.trace) else { panic!("{target:?}") };
                assert_eq!((found.call, found.at, found.nth), (target.call, target.at, target.nth));
                let theirs = faulty.fetch(&before, &found).expect("executed").expect("the fault repeats");
                let ours = subject.on(cpu(2), |executor| executor.fetch(&before, target)).expect("executed");
                let ours = ours.expect("the same again");
                let Differing { bits: [bad, good], count, format, .. } = element(&theirs, &ours, (output, index));
                assert_eq!((bad ^ good, count, format), (Spoil::MASK, 1, Format::F32), "{target:?}");
            }
        });
        // The others write indices or digests alone.
        assert!(spoiled_count * 4 > targets.len() * 3, "{fixture}: {spoiled_count} of {} targets", targets.len());
    }
}

fn number(parting: &Parting) -> usize {
    match parting {
        Parting::Written(call) => call.number,
        Parting::Calls(_) => usize::MAX,
    }
}

/// The first element that differs is the expected one.
fn element(
    theirs: &[isobit_training::trace::Written],
    ours: &[isobit_training::trace::Written],
    expected: (usize, usize),
) -> Differing {
    let differing = first_element(theirs, ours).expect("a difference");
    assert_eq!((differing.output, differing.index), expected);
    differing
}

/// A fault that happens once: the device differs from itself, and the other does not.
#[test]
fn a_device_that_differs_from_itself_is_told() {
    let subject = Subject::new("qwen2-base", LORA, &[]);
    let before = subject.before();
    let twice = |executor: &mut Executor<'_, Trainer<Observed<Cpu, Tracer>>>| {
        [(); 2].map(|()| executor.execute(&before).expect("executed"))
    };
    let second = subject.on(cpu(2), twice);
    let target = calls(&second[0].trace)
        .find(|call| call.at.part == Place::Layer(1, Pass::Backward) && call.call.op == "rms_norm_backward")
        .expect("a norm");
    let spoil = Spoil::new();
    let spoiled = Observed { inner: cpu(1), observer: spoil.clone() };
    subject.on(spoiled, |faulty| {
        spoil.set(target.number, 1);
        let first = [(); 2].map(|()| faulty.execute(&before).expect("executed"));
        let pair = Pair { first, second };
        let Some(Parting::Written(found)) = pair.parting() else { panic!("no difference") };
        assert_eq!((found.number, found.at), (target.number, target.at));
        assert_eq!(pair.own_partings(), [Some(Parting::Written(found)), None]);
        // It cannot be shown: another execution does not repeat it.
        assert_eq!(faulty.fetch(&before, &found).expect("executed"), None);
    });
}

/// A run on a card that computes one op wrongly: the replay names update and tensor, the descent
/// the op.
#[test]
fn from_the_record_to_the_op() {
    let ground = Ground::new("qwen2-base", LORA);
    let prepared = ground.prepared("run", &[GROUPS], None).expect("prepared");
    let spoil = Spoil::new();
    let faulty = || Observed { inner: cpu(1), observer: spoil.clone() };
    // The backward pass of a norm in layer 0 of the second micro-batch: about call 200.
    let make = |settings: &Settings| trainer(cpu(1), &prepared, settings);
    train_with(make, &prepared, Start::New, &Team::alone(), &mut Silent).expect("trained");
    let chain = Chain::read(&prepared.run.output_dir).expect("a chain");
    let subject = Subject { prepared, chain, _ground: ground };
    let before = subject.before();
    let sound = subject.on(cpu(2), |executor| executor.execute(&before)).expect("executed");
    let target = calls(&sound.trace)
        .filter(|call| call.at.part == Place::Layer(0, Pass::Backward) && call.call.op == "rms_norm_backward")
        .last()
        .expect("a norm");
    spoil.set(target.number, usize::MAX);
    let make = |settings: &Settings| trainer(faulty(), &subject.prepared, settings);
    let replayed = replay(make, &subject.prepared, &subject.chain, STEP..=STEP, &mut |_| ()).expect("replayed");
    // It begins with the checkpoint of update 2, so update 3 is the first that it executes wrongly.
    let difference = replayed.difference.expect("a difference");
    assert_eq!(difference.step, 3);
    assert!(difference.tensors.iter().any(|name| name.contains("layers.0.")), "{:?}", difference.tensors);
    let execution = subject.on(faulty(), |executor| executor.execute(&before)).expect("executed");
    let Some(Parting::Written(found)) = execution.trace.parting(&sound.trace) else { panic!("no difference") };
    assert_eq!((found.number, found.call, found.at), (target.number, target.call, target.at));
    let rows = Place::MicroBatch { first: 2, end: 4 };
    assert_eq!(found.at.to_string(), format!("{rows}, layer 0, backward pass"));
    assert_eq!(rows.to_string(), "micro-batch of rows 3 to 4");
}
