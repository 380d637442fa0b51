//! Layers over devices: any division of the layers among any devices gives the bits of one device,
//! and a failure on one of them ends the step with the message of one device.

use crate::hard_to_route::rows_of;
use crate::laws::SEVEN;
use crate::short_runs::{cpu, fixture_files, step_settings};
use isobit_autograd::Policy;
use isobit_conformance::named_devices_or_skips;
use isobit_kernels::cpu::CpuMemory;
use isobit_kernels::observe::{Call, Observed, Observer};
use isobit_kernels::op::Output;
use isobit_kernels::{Buffer, Cpu, DeviceFailure, Gpu, Path as CpuPath};
use isobit_models::build::Settings;
use isobit_models::{Config, LoraConfig, Trained, Weights, build};
use isobit_numerics::slices::Profile;
use isobit_training::engine::{Engine, Stored};
use isobit_training::row::Row;
use isobit_training::stages::{Divided, Open, Stage, StageDevice, Stages};
use isobit_training::step::StepSettings;
use isobit_training::trainer::Trainer;
use std::cell::Cell;
use std::fmt::Write;

const LINEAR: [&str; 4] = ["q_proj", "o_proj", "gate_proj", "down_proj"];
const ATTENTION: [&str; 3] = ["q_proj", "v_proj", "o_proj"];

/// A model, what is trained, and the divisions to try.
struct Case {
    name: &'static str,
    trained: Trained,
    profile: Profile,
    splits: &'static [&'static [usize]],
}

fn cases() -> Vec<Case> {
    let lora = |dropout| Trained::Lora(LoraConfig { dropout, ..LoraConfig::new(3, 6.0, &LINEAR) });
    let attention = |dropout| Trained::Lora(LoraConfig { dropout, ..LoraConfig::new(3, 6.0, &ATTENTION) });
    let of_layer = |layer| Trained::Lora(LoraConfig { layers: Some(vec![layer]), ..LoraConfig::new(2, 4.0, &LINEAR) });
    let parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"].map(str::to_string).to_vec();
    let experts = Trained::Lora(LoraConfig { parameters, ..LoraConfig::new(2, 4.0, &ATTENTION) });
    let case = |name, trained, splits| Case { name, trained, profile: Profile::X2, splits };
    vec![
        case("qwen2-tied", Trained::Full, &[&[1, 1]]),
        case("qwen2-tied", lora(0.25), &[&[1, 1]]),
        case("qwen2-tied", Trained::LastBlocks(1), &[&[1, 1]]),
        case("qwen2-window", lora(0.25), &[&[1, 1, 1], &[2, 1]]),
        case("qwen2-window", Trained::LastBlocks(1), &[&[1, 2], &[1, 1, 1]]),
        // Adapters in the middle only: one stage trains nothing and needs no gradient, one has
        // nothing trained and passes gradients on.
        case("qwen2-window", of_layer(1), &[&[1, 1, 1]]),
        Case { profile: Profile::X3, ..case("qwen3-base", Trained::Full, &[&[1, 1]]) },
        case("qwen3moe-aux", Trained::Full, &[&[1, 1]]),
        case("qwen3_5moe-aux", attention(0.0), &[&[1, 1]]),
        case("qwen3moe-base", Trained::Lora(LoraConfig::new(2, 4.0, &SEVEN)), &[&[1, 1]]),
        case("qwen3moe-mixed", experts, &[&[1, 3], &[1, 2, 1]]),
        case("qwen3_5-hybrid", Trained::Full, &[&[1, 1, 1, 1], &[3, 1]]),
        case("qwen3next-hybrid", attention(0.25), &[&[2, 2]]),
        case("deepseek-base", Trained::Full, &[&[2, 1]]),
    ]
}

struct Subject {
    config: Config,
    weights: Weights,
    settings: Settings,
}

impl Subject {
    fn new(name: &str, trained: Trained, profile: Profile) -> Self {
        let (config, weights) = fixture_files(name);
        Self { config, weights, settings: Settings { trained, profile, positions: 256, seed: 7 } }
    }

    fn trainer(&self) -> Trainer<Cpu> {
        let backend = cpu(2, CpuPath::best());
        let built = build(&backend, &self.config, &self.weights, &self.settings).expect("a model");
        Trainer::new(backend, built)
    }

    /// Runs `work` on the stages of a list of devices.
    fn on<R>(&self, devices: Vec<StageDevice>, work: impl FnOnce(&mut Stages) -> R) -> R {
        std::thread::scope(|scope| {
            let model = Divided { config: &self.config, source: &self.weights };
            let stages = Stages::new(scope, model, &self.settings, true, devices);
            work(&mut stages.unwrap_or_else(|error| panic!("stages: {error}")))
        })
    }

    /// Two steps and an evaluation, as text: losses, norms, weights and moments.
    fn trace(&self, engine: &mut impl Engine, settings: &StepSettings) -> String {
        let rows = rows_of(self.config.vocabulary);
        let rows: Vec<&Row> = rows.iter().collect();
        let mut text = String::new();
        for step in 1..=2 {
            let report = engine.step(&rows, step, 1e-2, settings).expect("a step");
            let _ = writeln!(text, "{:016x} {:08x}", report.loss.to_bits(), report.grad_norm.to_bits());
        }
        let evaluation = engine.evaluate(&rows, settings.profile, settings.micro_batch_size).expect("an evaluation");
        let _ = writeln!(text, "{:016x} {} {}", evaluation.loss_sum.to_bits(), evaluation.correct, evaluation.targets);
        text + &tensors(engine)
    }
}

/// Every trained tensor with its moments.
fn tensors(engine: &impl Engine) -> String {
    let mut text = String::new();
    for (at, tensor) in engine.tensors().iter().enumerate() {
        for which in [Stored::Value, Stored::Moment(0), Stored::Moment(1)] {
            let bytes: Vec<u8> = engine.read(at, which).expect("read").into_iter().flat_map(f32::to_le_bytes).collect();
            let _ = writeln!(text, "{} {which:?} {}", tensor.name, isobit_proof::Hash::of_bytes(&bytes));
        }
    }
    text
}

fn on_cpu(layers: usize) -> StageDevice {
    let open = |stage: Stage<'_>| {
        stage.run(cpu(1, CpuPath::best()));
        Ok(())
    };
    StageDevice { name: "cpu".to_string(), layers, open: Box::new(open) }
}

fn on_gpu(name: &str, layers: usize) -> StageDevice {
    let selector = name.parse().expect("a device");
    let open = move |stage: Stage<'_>| {
        stage.run(Gpu::open(selector)?);
        Ok(())
    };
    StageDevice { name: name.to_string(), layers, open: Box::new(open) }
}

#[test]
fn any_division_of_the_layers() {
    for Case { name, trained, profile, splits } in cases() {
        let subject = Subject::new(name, trained, profile);
        let want = subject.trace(&mut subject.trainer(), &step_settings(profile, Policy::None, 5));
        for split in splits {
            for (policy, micro) in [(Policy::None, 1), (Policy::Selective, 3), (Policy::Full, 1), (Policy::Full, 2)] {
                let settings = step_settings(profile, policy, micro);
                let devices = split.iter().map(|layers| on_cpu(*layers)).collect();
                let got = subject.on(devices, |stages| subject.trace(stages, &settings));
                assert_eq!(got, want, "{name} as {split:?}, {} and micro-batches of {micro}", policy.name());
            }
        }
    }
}

#[test]
fn gradient_groups_and_transfers() {
    for (name, trained) in [("qwen2-tied", Trained::Full), ("qwen3moe-aux", Trained::Full)] {
        let subject = Subject::new(name, trained, Profile::X2);
        let settings = StepSettings { gradient_groups: 3, ..step_settings(Profile::X2, Policy::Full, 1) };
        let mut single = subject.trainer();
        let rows = rows_of(subject.config.vocabulary);
        let rows: Vec<&Row> = rows.iter().collect();
        let (of_group, _) = single.group_gradients(&update(&rows), 1..4, &settings).expect("gradients");
        let parts = single.download(&of_group).expect("parts");
        let whole = single.gradients(&rows, 1, &settings).expect("gradients").gradients;
        let whole = single.download(&whole).expect("parts");
        let want = subject.trace(&mut single, &settings);
        subject.on(vec![on_cpu(1), on_cpu(1)], |stages| {
            let (of_group, _) = stages.group_gradients(&update(&rows), 1..4, &settings).expect("gradients");
            assert_eq!(stages.download(&of_group).expect("parts"), parts, "{name}: a group before its parts are added");
            let there = stages.upload(parts.clone()).expect("gradients");
            assert_eq!(stages.download(&there).expect("parts"), parts, "{name}: to the devices and back");
            let all = stages.gradients(&rows, 1, &settings).expect("gradients").gradients;
            assert_eq!(stages.download(&all).expect("parts"), whole, "{name}: an update");
            let there = stages.upload(whole.clone()).expect("gradients");
            assert_eq!(stages.download(&there).expect("parts"), whole, "{name}: an update to the devices and back");
            assert_eq!(
                stages.sums_of_squares(&there).expect("sums").len(),
                stages.tensors().len(),
                "{name}: the copy of the table counts for nothing"
            );
            drop((of_group, all));
            assert_eq!(subject.trace(stages, &settings), want, "{name}");
        });
    }
}

fn update<'a>(rows: &'a [&'a Row]) -> isobit_training::step::Update<'a> {
    isobit_training::step::Update::new(rows, 1)
}

/// Law 8 where there is another device: before the CPU, after it, and twice.
#[test]
fn lists_of_devices_equal_the_cpu() {
    for (name, gpu) in named_devices_or_skips("stages::lists_of_devices_equal_the_cpu") {
        drop(gpu);
        for (model, trained) in
            [("qwen2-tied", Trained::Full), ("qwen3moe-aux", Trained::Lora(LoraConfig::new(3, 6.0, &ATTENTION)))]
        {
            let subject = Subject::new(model, trained, Profile::X2);
            let settings = step_settings(Profile::X2, Policy::Full, 2);
            let want = subject.trace(&mut subject.trainer(), &settings);
            for devices in [
                vec![on_gpu(&name, 1), on_cpu(1)],
                vec![on_cpu(1), on_gpu(&name, 1)],
                vec![on_gpu(&name, 1), on_gpu(&name, 1)],
            ] {
                let got = subject.on(devices, |stages| subject.trace(stages, &settings));
                assert_eq!(got, want, "{model} with {name}");
            }
        }
    }
}

/// A checkpoint of one division is one of any other: what is read from one is written to another,
/// and both go on alike.
#[test]
fn state_moves_between_divisions() {
    for (name, trained) in [("qwen2-tied", Trained::Full), ("qwen2-window", Trained::LastBlocks(2))] {
        let subject = Subject::new(name, trained, Profile::X2);
        let settings = step_settings(Profile::X2, Policy::Full, 2);
        let mut single = subject.trainer();
        subject.trace(&mut single, &settings);
        let layers = subject.config.layers.len();
        let saved = state(&single);
        let want = subject.trace(&mut single, &settings);
        for split in [vec![1, layers - 1], vec![1; layers]] {
            let devices = split.iter().map(|layers| on_cpu(*layers)).collect();
            let got = subject.on(devices, |stages| {
                for (at, which, values) in &saved {
                    stages.write(*at, *which, values.clone()).expect("written");
                }
                assert_eq!(state(stages), saved);
                subject.trace(stages, &settings)
            });
            assert_eq!(got, want, "{name} as {split:?}");
        }
    }
}

fn state(engine: &impl Engine) -> Vec<(usize, Stored, Vec<f32>)> {
    let of = |at| [Stored::Value, Stored::Moment(0), Stored::Moment(1)].map(|which| (at, which));
    let all = (0..engine.tensors().len()).flat_map(of);
    all.map(|(at, which)| (at, which, engine.read(at, which).expect("read"))).collect()
}

/// The error of the first step that fails.
fn failure(engine: &mut impl Engine, rows: &[&Row], settings: &StepSettings) -> String {
    let mut failed = (1..=9).filter_map(|step| engine.step(rows, step, 1e30, settings).err());
    failed.next().expect("a step fails").to_string()
}

#[test]
fn numbers_that_are_not_finite_stop_a_step_as_on_one_device() {
    for (name, trained) in [("qwen2-window", Trained::Full), ("qwen2-window", Trained::LastBlocks(1))] {
        let subject = Subject::new(name, trained, Profile::X2);
        let settings = StepSettings { max_grad_norm: None, ..step_settings(Profile::X2, Policy::Full, 1) };
        let rows = rows_of(subject.config.vocabulary);
        let rows: Vec<&Row> = rows.iter().collect();
        let mut single = subject.trainer();
        let want = failure(&mut single, &rows, &settings);
        assert!(want.starts_with("step "), "{want}");
        let of_rows = single.evaluate(&rows, Profile::X2, 1).map_err(|error| error.to_string());
        subject.on(vec![on_cpu(1), on_cpu(1), on_cpu(1)], |stages| {
            assert_eq!(failure(stages, &rows, &settings), want);
            // The engine is still there, and so are its threads.
            assert_eq!(stages.evaluate(&rows, Profile::X2, 1).map_err(|error| error.to_string()), of_rows);
        });
    }
}

/// What an observed device does wrong.
#[derive(Clone, Copy)]
enum Fault {
    /// Panics in this op.
    Panic(&'static str),
    /// Changes the second result of this op, and so on: a recomputation differs.
    Drift(&'static str),
    OutOfMemory,
}

struct Faulty {
    fault: Fault,
    calls: Cell<usize>,
}

impl Observer<Cpu> for Faulty {
    fn before(&self, _: &Cpu, call: Call, _: &mut Buffer<u8>) {
        match self.fault {
            Fault::Panic(op) => assert!(call.op != op, "no {op} today"),
            Fault::OutOfMemory if call.op == "attention_forward" => drop(Buffer::<f32>::zeros(usize::MAX / 8)),
            Fault::OutOfMemory | Fault::Drift(_) => {}
        }
    }

    fn after(&self, _: &Cpu, call: Call, outputs: Vec<Output<'_, CpuMemory>>) {
        if !matches!(self.fault, Fault::Drift(op) if op == call.op) {
            return;
        }
        self.calls.set(self.calls.get() + 1);
        for output in outputs {
            if let (Output::F32(result), true) = (output, self.calls.get() > 5) {
                result.iter_mut().for_each(|value| *value = f32::from_bits(value.to_bits() ^ 1));
            }
        }
    }
}

fn faulty(fault: Fault) -> StageDevice {
    let open = move |stage: Stage<'_>| {
        stage.run(Observed { inner: cpu(1, CpuPath::best()), observer: Faulty { fault, calls: Cell::new(0) } });
        Ok(())
    };
    StageDevice { name: "the faulty one".to_string(), layers: 1, open: Box::new(open) }
}

#[test]
fn a_fault_on_one_device_ends_the_step_and_hangs_nothing() {
    let subject = Subject::new("qwen2-window", Trained::Full, Profile::X2);
    let settings = step_settings(Profile::X2, Policy::Full, 1);
    let rows = rows_of(subject.config.vocabulary);
    let rows: Vec<&Row> = rows.iter().collect();
    for at in 0..3 {
        let devices = |fault: Fault| -> Vec<StageDevice> {
            (0..3).map(|stage| if stage == at { faulty(fault) } else { on_cpu(1) }).collect()
        };
        for op in ["attention_forward", "attention_backward"] {
            let error = subject.on(devices(Fault::Panic(op)), |stages| {
                let first = stages.step(&rows, 1, 1e-2, &settings).expect_err("a panic").to_string();
                let next = stages.step(&rows, 1, 1e-2, &settings).expect_err("no thread").to_string();
                assert!(next.contains("the faulty one: its thread has ended"), "{next}");
                first
            });
            assert_eq!(error, format!("the faulty one: its thread panicked: no {op} today"));
        }
    }
    // The last layer is not recomputed.
    for at in 0..2 {
        let devices =
            (0..3).map(|stage| if stage == at { faulty(Fault::Drift("attention_forward")) } else { on_cpu(1) });
        let error = subject.on(devices.collect(), |stages| {
            stages.step(&rows, 1, 1e-2, &settings).expect_err("a recomputation differs").to_string()
        });
        assert!(error.starts_with(&format!("the recomputation of layer {at} gave different bits")), "{error}");
    }
    let thrown = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let devices = vec![on_cpu(1), faulty(Fault::OutOfMemory), on_cpu(1)];
        subject.on(devices, |stages| stages.step(&rows, 1, 1e-2, &settings).map(|_| ()))
    }));
    let thrown = thrown.expect_err("memory that is not there");
    assert!(thrown.is::<isobit_kernels::buffer::OutOfMemory>());
}

#[test]
fn a_device_that_does_not_open_is_named() {
    let subject = Subject::new("qwen2-tied", Trained::Full, Profile::X2);
    let broken = |open: Open| StageDevice { name: "cuda:7".to_string(), layers: 1, open };
    let error = |device: StageDevice| {
        std::thread::scope(|scope| {
            let model = Divided { config: &subject.config, source: &subject.weights };
            let made = Stages::new(scope, model, &subject.settings, true, vec![on_cpu(1), device]);
            made.err().expect("a device that does not open").to_string()
        })
    };
    let failure = || DeviceFailure { device: "cuda:7".to_string(), what: "there is no such device".to_string() };
    assert_eq!(error(broken(Box::new(move |_| Err(failure())))), "cuda:7: there is no such device");
    let panics = error(broken(Box::new(|_| panic!("a driver's bug"))));
    assert_eq!(panics, "cuda:7: its thread panicked: a driver's bug");
}
