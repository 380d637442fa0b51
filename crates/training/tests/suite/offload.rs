//! Offload moves bytes and changes no bit: every subset of what can be in host memory gives the
//! weights, moments, losses and norms of a device that holds everything, and needs the memory that
//! the plan counts.

use crate::hard_to_route::rows_of;
use crate::laws::SEVEN;
use crate::short_runs::{cpu, fixture_files, step_settings};
use isobit_autograd::{Offload, Policy};
use isobit_conformance::{devices_or_skips, in_own_process};
use isobit_kernels::gpu::{Api, Selector};
use isobit_kernels::plan::Counting;
use isobit_kernels::{Backend, Device, Gpu, Path as CpuPath, buffer};
use isobit_models::build::Settings;
use isobit_models::{Config, LoraConfig, Part, Shapes, Trained, WeightSource, Weights, build_placed};
use isobit_numerics::slices::Profile;
use isobit_training::engine::{Engine, Stored};
use isobit_training::plan::{Generated, Item, PlannedUpdate, longest_rows, memory};
use isobit_training::row::Row;
use isobit_training::step::StepSettings;
use isobit_training::trainer::{Placement, Trainer};
use std::fmt::Write;

/// All, and every other subset.
fn subsets() -> impl Iterator<Item = Offload> {
    (0..8).rev().map(|bits| Offload { optimizer: bits & 1 > 0, activations: bits & 2 > 0, weights: bits & 4 > 0 })
}

struct Subject {
    name: &'static str,
    config: Config,
    weights: Weights,
    settings: Settings,
}

fn subjects() -> Vec<Subject> {
    let lora = |rank, targets: &[&str]| LoraConfig { dropout: 0.25, ..LoraConfig::new(rank, 8.0, targets) };
    let parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"].map(str::to_string).to_vec();
    let experts = LoraConfig { parameters, ..LoraConfig::new(4, 8.0, &SEVEN[..4]) };
    let all = [
        ("qwen2-tied", Trained::Full, Profile::X2),
        ("qwen3-base", Trained::Full, Profile::X3),
        ("qwen2-window", Trained::LastBlocks(1), Profile::X2),
        ("qwen2-bf16", Trained::Lora(lora(4, &SEVEN)), Profile::X2),
        ("qwen3moe-aux", Trained::Full, Profile::X2),
        ("qwen3_5-hybrid", Trained::Full, Profile::X2),
        ("deepseek-base", Trained::Lora(lora(3, &["q_a_proj", "kv_b_proj", "o_proj"])), Profile::X2),
        ("gptq-v2-order", Trained::Lora(lora(4, &SEVEN)), Profile::X2),
        ("gptq-moe-order", Trained::Lora(experts), Profile::X2),
    ];
    all.map(|(name, trained, profile)| {
        let (config, weights) = fixture_files(name);
        Subject { name, config, weights, settings: Settings { trained, profile, positions: 256, seed: 7 } }
    })
    .into()
}

impl Subject {
    fn trainer<B: Backend>(&self, backend: B, source: &dyn WeightSource, offload: Offload) -> Trainer<B> {
        let part = Part::whole(&self.config);
        let built = build_placed(&backend, &self.config, source, &self.settings, &part, offload).expect("a model");
        // Gradients of these models are small: none waits for the end of its group.
        let placement = Placement { waiting_max: 0, ..Placement::new(offload, true, 2) };
        Trainer::placed(backend, built, placement).expect("a trainer")
    }

    /// Three groups, so that gradients are added, and micro-batches of two rows.
    fn step(&self, policy: Policy) -> StepSettings {
        StepSettings { gradient_groups: 3, ..step_settings(self.settings.profile, policy, 2) }
    }

    /// Two steps and an evaluation as text: losses, norms, digests, weights and moments.
    fn trace<B: Backend>(&self, trainer: &mut Trainer<B>, policy: Policy) -> String {
        let (settings, rows) = (self.step(policy), rows_of(self.config.vocabulary));
        let rows: Vec<&Row> = rows.iter().collect();
        let mut text = String::new();
        for step in 1..=2 {
            let report = trainer.step(&rows, step, 1e-2, &settings).expect("a step");
            let _ = writeln!(text, "{:016x} {:08x}", report.loss.to_bits(), report.grad_norm.to_bits());
        }
        let evaluation = trainer.evaluate(&rows, settings.profile, 2).expect("an evaluation");
        let _ = writeln!(text, "{:016x} {}", evaluation.loss_sum.to_bits(), evaluation.correct);
        let _ = writeln!(text, "{:?}", trainer.digests().expect("digests"));
        for (at, tensor) in trainer.tensors().iter().enumerate() {
            for which in [Stored::Value, Stored::Moment(0), Stored::Moment(1)] {
                let numbers = trainer.read(at, which).expect("numbers");
                let bits: Vec<u8> = numbers.into_iter().flat_map(f32::to_le_bytes).collect();
                let _ = writeln!(text, "{} {which:?} {}", tensor.name, isobit_proof::Hash::of_bytes(&bits));
            }
        }
        text
    }
}

#[test]
fn every_subset_under_every_policy() {
    for subject in subjects() {
        let on = |offload, policy| {
            let mut trainer = subject.trainer(cpu(2, CpuPath::best()), &subject.weights, offload);
            subject.trace(&mut trainer, policy)
        };
        let want = on(Offload::NONE, Policy::Full);
        for policy in Policy::ALL {
            for offload in subsets() {
                assert!(on(offload, policy) == want, "{}: {:?}, {}", subject.name, offload.names(), policy.name());
            }
        }
    }
}

/// A run goes on where it stopped with something else in host memory.
#[test]
fn state_moves_between_subsets() {
    for subject in subjects() {
        let new = |offload| subject.trainer(cpu(1, CpuPath::best()), &subject.weights, offload);
        let want = {
            let mut trainer = new(Offload::NONE);
            subject.trace(&mut trainer, Policy::Full) + &subject.trace(&mut trainer, Policy::Full)
        };
        for offload in subsets() {
            let (mut first, mut second) = (new(offload), new(Offload { weights: !offload.weights, ..Offload::NONE }));
            let trace = subject.trace(&mut first, Policy::Full);
            for at in 0..first.tensors().len() {
                for which in [Stored::Value, Stored::Moment(0), Stored::Moment(1)] {
                    second.write(at, which, first.read(at, which).expect("numbers")).expect("written");
                }
            }
            let trace = trace + &subject.trace(&mut second, Policy::Full);
            assert!(trace == want, "{}: {:?}", subject.name, offload.names());
        }
    }
}

#[test]
fn devices_that_offload_equal_the_cpu() {
    let devices = devices_or_skips("offload::devices_that_offload_equal_the_cpu");
    for subject in subjects() {
        let on_cpu = &mut subject.trainer(cpu(2, CpuPath::best()), &subject.weights, Offload::NONE);
        let want = subject.trace(on_cpu, Policy::Full);
        for gpu in &devices {
            for (offload, policy) in subsets().zip(Policy::ALL.into_iter().cycle()) {
                let got = subject.trace(&mut subject.trainer(gpu.clone(), &subject.weights, offload), policy);
                assert!(got == want, "{}: {:?} on {}", subject.name, offload.names(), gpu.name());
            }
        }
    }
}

/// With a device whose memory is the process's, device and host together, between steps to the
/// byte; their peaks need not coincide.
#[test]
fn the_plan_is_what_offload_allocates() {
    let test = concat!(module_path!(), "::the_plan_is_what_offload_allocates");
    in_own_process(test, |_| (), plan_against_buffers);
}

fn plan_against_buffers() {
    for subject in subjects() {
        for (offload, policy) in subsets().zip(Policy::ALL.into_iter().cycle()) {
            let case = format!("{}: {:?}, {}", subject.name, offload.names(), policy.name());
            assert_eq!(buffer::held_bytes(), 0, "{case}: nothing is left of the case before");
            buffer::forget_held_bytes_peak();
            let mut real = subject.trainer(cpu(1, CpuPath::best()), &subject.weights, offload);
            let _ = subject.trace(&mut real, policy);
            let (held, peak) = (buffer::held_bytes(), buffer::held_bytes_peak());
            let counting = Counting::new(cpu(1, CpuPath::best()));
            let mut counted = subject.trainer(counting.clone(), &Shapes::Of(&subject.weights), offload);
            let _ = subject.trace(&mut counted, policy);
            assert_eq!(counting.bytes() + counting.host_bytes(), held, "{case}: between steps");
            let peaks = counting.bytes_peak() + counting.host_bytes_peak();
            assert!(peak <= peaks, "{case}: {peak} bytes at most, {peaks} planned");
            assert!(!offload.is_none() || counting.host_bytes_peak() == 0, "{case}");
            assert!(!(offload.optimizer || offload.weights) || counting.host_bytes() > 0, "{case}");
        }
    }
}

#[test]
fn the_plan_of_a_device_is_what_it_allocates() {
    let test = concat!(module_path!(), "::the_plan_of_a_device_is_what_it_allocates");
    in_own_process(test, |_| (), || plan_against_devices(test));
}

/// Host memory to the byte, device memory up to the tables that the plan does not count.
fn plan_against_devices(test: &str) {
    const TABLES: u64 = 256 << 10;
    for gpu in devices_or_skips(test) {
        let selector = gpu.selector();
        drop(gpu);
        // Opening a device takes a second.
        for subject in subjects().into_iter().filter(|of| ["qwen2-tied", "gptq-moe-order"].contains(&of.name)) {
            for (offload, policy) in subsets().step_by(2).zip(Policy::ALL.into_iter().cycle()) {
                let case = format!("{}: {:?}, {}", subject.name, offload.names(), policy.name());
                buffer::forget_held_bytes_peak();
                assert_eq!(buffer::held_bytes(), 0, "{case}: nothing is left of the case before");
                let gpu = Gpu::open(selector).expect("it was there before");
                let mut real = subject.trainer(gpu, &subject.weights, offload);
                let _ = subject.trace(&mut real, policy);
                let (held, host_peak) = (buffer::held_bytes(), buffer::held_bytes_peak());
                let peak = real.backend.device_peak_bytes().expect("it has memory of its own");
                drop(real);
                let counting = Counting::new(Gpu::open(selector).expect("it was there before"));
                let mut counted = subject.trainer(counting.clone(), &Shapes::Of(&subject.weights), offload);
                let _ = subject.trace(&mut counted, policy);
                assert_eq!((counting.host_bytes(), counting.host_bytes_peak()), (held, host_peak), "{case}: host");
                let planned = counting.bytes_peak() as u64;
                assert!(planned.abs_diff(peak) <= TABLES, "{case}: {peak} bytes at most, {planned} planned");
            }
        }
    }
}

/// Full fine-tuning of Qwen2.5-3B in 32 GB of a card, with the figures of `docs/scale.md`.
#[test]
fn a_model_of_three_billion_weights_trains_in_full_in_32_gigabytes() {
    let text = r#"{"model_type":"qwen2","hidden_size":2048,"intermediate_size":11008,"num_hidden_layers":36,
        "num_attention_heads":16,"num_key_value_heads":2,"vocab_size":151936,"tie_word_embeddings":true,"rope_theta":1000000.0}"#;
    let config = Config::parse(text).expect("a config");
    let rows = longest_rows(2, 1024);
    let rows: Vec<&Row> = rows.iter().collect();
    let settings = Settings { trained: Trained::Full, profile: Profile::X2, positions: 1024, seed: 0 };
    let step = step_settings(Profile::X2, Policy::Full, 1);
    let plan_on = |architecture, offload| {
        let gpu = Gpu::absent(Selector { api: Api::Cuda, index: 0 }, architecture);
        let planned = PlannedUpdate {
            step: &step,
            rows: &rows,
            packs: false,
            waiting: 0,
            evaluated: 0,
            generated: Generated::default(),
            offload,
            rank: None,
        };
        let source = Shapes::All(isobit_models::FloatFormat::Bf16);
        memory(gpu, &config, &source, &settings, &planned).expect("a plan")
    };
    // The most demanding card: that of Hopper has kernels of its own.
    let plan = |offload| {
        let plans = [None, Some((9, 0))].map(|architecture| plan_on(architecture, offload));
        plans.into_iter().max_by_key(|plan| plan.bytes_peak).expect("two plans")
    };
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/scale.md")).expect("a page");
    for (name, [optimizer, activations, weights]) in [
        ("nothing", [false, false, false]),
        ("activations", [false, true, false]),
        ("weights", [false, false, true]),
        ("optimizer", [true, false, false]),
        ("optimizer, weights", [true, false, true]),
        ("all three", [true, true, true]),
    ] {
        let plan = plan(Offload { optimizer, activations, weights });
        assert_eq!(plan.trained_count, 3_085_938_688);
        assert_eq!(plan.items[&Item::Optimizer] == 0, optimizer, "{name}");
        assert_eq!(plan.bytes_peak < 32_000_000_000, optimizer, "{name}: {}", plan.bytes_peak);
        let shown = |bytes: usize| format!(" {:.2} GiB", bytes as f64 / f64::from(1 << 30));
        let host = if plan.host_bytes_peak == 0 { String::new() } else { shown(plan.host_bytes_peak) };
        let saving = shown(plan.host_bytes_between_steps + plan.bytes_save);
        let row = format!("| {name} |{} |{host} |{saving} |", shown(plan.bytes_peak));
        assert!(page.contains(&row), "docs/scale.md has no {row}");
    }
}
