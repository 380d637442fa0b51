//! The plan against the run: the backend that counts must hold, at the peak, the very bytes that
//! the CPU's buffers take.
//!
//! The counter of buffers is one for the process, so the test that reads it runs in a process of
//! its own.

use crate::short_runs::step_settings;
use isobit_autograd::{Offload, Policy};
use isobit_conformance::{devices_or_skips, in_own_process};
use isobit_kernels::Device;
use isobit_kernels::gpu::{Api, Selector};
use isobit_kernels::plan::{Counting, MemoryLayout};
use isobit_kernels::{Backend, Cpu, Gpu, Path as CpuPath, buffer};
use isobit_models::build::Settings;
use isobit_models::config::{AttentionKind, MlpKind};
use isobit_models::{Config, FloatFormat, LoraConfig, Part, Session, Shapes, Trained, WeightSource, Weights, build};
use isobit_numerics::slices::Profile;
use isobit_proof::safetensors::TensorFiles;
use isobit_training::engine::Engine;
use isobit_training::plan::{
    Generated, Item, MemoryPlan, PeakOfUpdate, PlannedStage, PlannedUpdate, least_bytes, longest_rows, memory,
    stage_memory,
};
use isobit_training::row::Row;
use isobit_training::stages::{Divided, Stage, StageDevice, Stages, parcels};
use isobit_training::step::StepSettings;
use isobit_training::trainer::Trainer;
use std::path::{Path, PathBuf};

const SEVEN: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

fn lora(dropout: f64) -> Trained {
    let mut lora = LoraConfig::new(4, 8.0, &SEVEN);
    lora.dropout = dropout;
    Trained::Lora(lora)
}

fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures").join(model)
}

fn config(model: &str) -> Config {
    let text = std::fs::read_to_string(folder(model).join("config.json")).expect("a config");
    Config::parse(&text).expect("a readable config")
}

fn rows(vocabulary: usize) -> Vec<Row> {
    let row = |length: usize, starts: &[usize]| {
        let tokens = (0..length).map(|t| ((t * 31 + length * 7) % vocabulary) as u32).collect();
        let document_starts = starts.iter().copied().chain([length]).collect();
        Row::new(tokens, vec![true; length], document_starts)
    };
    vec![row(17, &[0]), row(40, &[0, 9, 10, 30]), row(3, &[0]), row(131, &[0]), row(2, &[0])]
}

fn settings(trained: Trained, profile: Profile) -> Settings {
    Settings { trained, profile, positions: 256, seed: 7 }
}

/// Builds and trains two steps; gives the trainer, whose memory is to be looked at.
fn train<B: Backend>(
    backend: B,
    model: &str,
    source: &dyn WeightSource,
    settings: &Settings,
    step: &StepSettings,
) -> Trainer<B> {
    let built = build(&backend, &config(model), source, settings).expect("a model");
    let mut trainer = Trainer::new(backend, built);
    let rows = rows(trainer.model.config.vocabulary);
    let rows: Vec<&Row> = rows.iter().collect();
    for number in 1..=2 {
        trainer.step(&rows, number, 1e-3, step).expect("a step");
    }
    trainer
}

#[test]
fn the_plan_is_what_the_cpu_allocates() {
    let test = concat!(module_path!(), "::the_plan_is_what_the_cpu_allocates");
    in_own_process(test, |_| (), plan_against_buffers);
}

fn plan_against_buffers() {
    let cases = [
        ("qwen2-base", lora(0.25), Profile::X2),
        ("qwen2-tied", Trained::Full, Profile::X2),
        ("qwen3-base", Trained::Full, Profile::X3),
        ("qwen2-window", Trained::LastBlocks(1), Profile::X2),
        ("llama-bias", lora(0.0), Profile::X2),
        ("qwen3_5-hybrid", Trained::Full, Profile::X2),
        ("qwen2-bf16", lora(0.0), Profile::X3),
        ("gptq-v1", lora(0.0), Profile::X2),
        ("gptq-v2-order", lora(0.25), Profile::X3),
    ];
    for (model, trained, profile) in cases {
        let files = TensorFiles::open(&folder(model)).expect("weights");
        let source = Weights::new(files, &config(model)).expect("known names");
        for policy in Policy::ALL {
            for (threads, micro_batch_size) in [(1, 5), (2, 2), (2, 1)] {
                let settings = settings(trained.clone(), profile);
                let step = step_settings(profile, policy, micro_batch_size);
                let cpu = || Cpu::new(threads, CpuPath::best()).expect("a path");
                let case = format!("{model}, {}, {threads} threads, {micro_batch_size} rows", policy.name());

                assert_eq!(buffer::held_bytes(), 0, "{case}: nothing is left of the case before");
                buffer::forget_held_bytes_peak();
                let real = train(cpu(), model, &source, &settings, &step);
                let held = (buffer::held_bytes(), buffer::held_bytes_peak());
                let counting = Counting::new(cpu());
                let counted = train(counting.clone(), model, &Shapes::Of(&source), &settings, &step);
                assert_eq!((counting.bytes(), counting.bytes_peak()), held, "{case}: bytes now and at most");
                assert_eq!(counted.peak_bytes(), real.peak_bytes(), "{case}: buffers on loan");
                drop((real, counted));
                counting.scratch().clear();
                assert_eq!(counting.bytes(), 0, "{case}: everything is given back");
            }
        }
    }
}

/// Where there is a device: apart from small tables, its buffers take what the plan says.
#[test]
fn the_plan_is_what_a_device_reports() {
    const CASES: [(&str, Policy); 2] = [("qwen2-bf16", Policy::Full), ("qwen3moe-aux", Policy::None)];
    let test = concat!(module_path!(), "::the_plan_is_what_a_device_reports");
    for (model, policy) in CASES {
        // Opened anew for every model: a device reports its peak since then.
        for gpu in devices_or_skips(test) {
            let files = TensorFiles::open(&folder(model)).expect("weights");
            let source = Weights::new(files, &config(model)).expect("known names");
            let settings = settings(lora(0.0), Profile::X2);
            let step = step_settings(Profile::X2, policy, 5);
            let counting = Counting::new(gpu.clone());
            drop(train(counting.clone(), model, &Shapes::Of(&source), &settings, &step));
            let real = train(gpu, model, &source, &settings, &step);
            let reported = real.backend.device_peak_bytes().expect("a device has memory") as usize;
            let planned = counting.bytes_peak();
            let apart = reported.abs_diff(planned);
            assert!(apart * 100 <= planned * 3, "{model}: {reported} bytes reported, {planned} planned");
        }
    }
}

#[test]
fn the_plan_of_a_list_is_what_its_devices_allocate() {
    let test = concat!(module_path!(), "::the_plan_of_a_list_is_what_its_devices_allocate");
    in_own_process(test, |_| (), stages_against_buffers);
}

/// Between steps to the byte; during a step their peaks need not coincide.
fn stages_against_buffers() {
    let cases = [
        ("qwen2-base", lora(0.25), Profile::X2, &[1, 1][..]),
        ("qwen2-tied", Trained::Full, Profile::X2, &[1, 1]),
        ("qwen2-window", Trained::LastBlocks(1), Profile::X2, &[1, 1, 1]),
        ("qwen3moe-aux", Trained::Full, Profile::X2, &[1, 1]),
        ("qwen3_5-hybrid", Trained::Full, Profile::X2, &[2, 1, 1]),
    ];
    let all = longest_rows(6, 40);
    let all: Vec<&Row> = all.iter().collect();
    for (model, trained, profile, counts) in cases {
        let files = TensorFiles::open(&folder(model)).expect("weights");
        let config = config(model);
        let source = Weights::new(files, &config).expect("known names");
        let settings = settings(trained, profile);
        for policy in Policy::ALL {
            let step = step_settings(profile, policy, 1);
            let case = format!("{model} as {counts:?}, {}", policy.name());
            assert_eq!(buffer::held_bytes(), 0, "{case}: nothing is left of the case before");
            buffer::forget_held_bytes_peak();
            let (held, peak) = std::thread::scope(|scope| {
                let divided = Divided { config: &config, source: &source };
                let mut stages = Stages::new(scope, divided, &settings, true, on_cpus(counts)).expect("stages");
                for number in 1..=2 {
                    stages.step(&all, number, 1e-3, &step).expect("a step");
                }
                // Answered after everything before it.
                stages.evaluate(&[], profile, 1).expect("nothing");
                (buffer::held_bytes(), buffer::held_bytes_peak())
            });
            let (mut between, mut peaks, mut trained_before) = (0, 0, false);
            for (at, part) in Part::divide(&config, counts).into_iter().enumerate() {
                let stages_after = counts.len() - 1 - at;
                let rows = &all[..PeakOfUpdate::of_stage(6, 1, 1, stages_after).rows];
                let (settings, step, offload) = (&settings, &step, Offload::NONE);
                let stage = PlannedStage {
                    part,
                    stages_after,
                    trained_before,
                    settings,
                    step,
                    rows,
                    packs: false,
                    group_rows: 6,
                    waiting: 0,
                    evaluated: 0,
                    offload,
                    rank: None,
                };
                let plan = stage_memory(&Counting::new(cpu()), &config, &Shapes::Of(&source), &stage).expect("a plan");
                assert_eq!(plan.items.values().sum::<usize>(), plan.bytes_peak, "{case}: items and their sum");
                trained_before |= plan.trained_count > 0;
                between += plan.bytes_between_steps;
                peaks += plan.bytes_peak;
            }
            // Beside the devices' own: parcels, as many as were on their way at once.
            let parcel = 40 * config.hidden * size_of::<f32>();
            let most = (1..counts.len()).map(parcels).sum::<usize>() * parcel;
            let travelling = held.checked_sub(between).expect("what the devices hold");
            assert!(travelling.is_multiple_of(parcel) && travelling > 0, "{case}: {held} held, {between} planned");
            assert!(travelling <= most, "{case}: parcels of {travelling} bytes, {most} planned");
            assert!(peak <= peaks + most && between < peak, "{case}: {peak} bytes at most, {peaks} planned");
        }
    }
}

fn on_cpus(counts: &[usize]) -> Vec<StageDevice> {
    let device = |&layers: &usize| {
        let open = |stage: Stage<'_>| {
            stage.run(cpu());
            Ok(())
        };
        StageDevice { name: "cpu".to_string(), layers, open: Box::new(open) }
    };
    counts.iter().map(device).collect()
}

fn plan_of<L: MemoryLayout>(like: L, model: &str, trained: Trained, policy: Policy) -> MemoryPlan {
    let (source, rows) = (Shapes::All(FloatFormat::Bf16), longest_rows(2, 64));
    let rows: Vec<&Row> = rows.iter().collect();
    let step = step_settings(Profile::X2, policy, 1);
    memory(like, &config(model), &source, &settings(trained, Profile::X2), &updates(&step, &rows)).expect("a plan")
}

/// Updates over `rows`, with nothing offloaded.
pub(crate) fn updates<'a>(step: &'a StepSettings, rows: &'a [&'a Row]) -> PlannedUpdate<'a> {
    PlannedUpdate {
        step,
        rows,
        packs: false,
        waiting: 0,
        evaluated: 0,
        generated: Generated::default(),
        offload: Offload::NONE,
        rank: None,
    }
}

/// A plan counts no less than the samples of a run take, and the texts themselves.
#[test]
fn generation_is_counted() {
    let rows = longest_rows(2, 8);
    let rows: Vec<&Row> = rows.iter().collect();
    let step = step_settings(Profile::X2, Policy::Full, 1);
    let (prompt, tokens) = (40, 9);
    for (model, trained) in
        [("qwen2-base", Trained::Full), ("qwen3moe-base", lora(0.0)), ("qwen3_5moe-hybrid", lora(0.0))]
    {
        let (model, source) = (config(model), Shapes::All(FloatFormat::Bf16));
        let planned =
            PlannedUpdate { generated: Generated { prompt, tokens: prompt + tokens }, ..updates(&step, &rows) };
        let settings = settings(trained, Profile::X2);
        let plan = memory(cpu(), &model, &source, &settings, &planned).expect("a plan");
        let trained = if settings.trained == Trained::Full { Trained::Nothing } else { settings.trained };
        let backend = Counting::new(cpu());
        let settings = Settings { trained, positions: prompt + tokens, ..settings };
        let built = build(&backend, &model, &source, &settings).expect("a model");
        let mut session = Session::new(&backend, &built.model, &built.parameters, Profile::X2);
        session.extend(&vec![0; prompt]).expect("logits");
        (0..tokens).for_each(|_| drop(session.extend(&[0]).expect("logits")));
        let taken = backend.bytes_peak();
        assert!(taken <= plan.bytes_generate && plan.bytes_generate < 2 * taken, "{taken} of {}", plan.bytes_generate);
        assert!(plan.host_bytes_generate > 0 && plan.bytes_on_device() >= plan.bytes_peak.max(plan.bytes_generate));
    }
}

fn cpu() -> Cpu {
    Cpu::new(1, CpuPath::Scalar).expect("always there")
}

#[test]
fn items_add_up_and_policies_are_ordered() {
    for (model, trained) in [("qwen2-base", lora(0.0)), ("qwen2-tied", Trained::Full), ("qwen3-base", Trained::Full)] {
        let peaks = Policy::ALL.map(|policy| {
            let plan = plan_of(cpu(), model, trained.clone(), policy);
            assert_eq!(plan.items.values().sum::<usize>(), plan.bytes_peak, "{model}: items and their sum");
            // Two micro-batches of one row of 64 tokens.
            let least = least_bytes(&config(model), 64) as usize;
            assert!(0 < least && least < plan.items[&Item::Activations], "{model}: {least} bytes at least");
            let bytes = 4 * plan.trained_count;
            assert_eq!(plan.items[&Item::Optimizer], 2 * bytes, "{model}: two moments");
            assert!(plan.items[&Item::Gradients] >= bytes, "{model}: a gradient for every number");
            assert!(plan.items[&Item::Trained] >= bytes, "{model}: trained values");
            assert!(Item::ALL.iter().all(|item| plan.items[item] > 0 || *item == Item::Weights), "{model}: {plan:?}");
            [plan.bytes_peak, plan.items[&Item::Activations]]
        });
        for what in [0, 1] {
            let [none, selective, full] = peaks.map(|peak| peak[what]);
            assert!(full <= selective && selective <= none && full < none, "{model}: {peaks:?}");
        }
    }
}

#[test]
fn calls_and_arithmetic_of_a_step() {
    let config = config("qwen2-tied");
    let (layers, tokens) = (config.layers.len() as u64, 64);
    let (AttentionKind::Softmax(attention), MlpKind::Dense { width, .. }) =
        (&config.layers[0].attention, &config.layers[0].mlp)
    else {
        panic!("a dense model");
    };
    let (q, kv) = (attention.query_rows(), attention.kv_rows());
    let down = config.hidden * width;
    let matrices = config.hidden * (q + 2 * kv) + q * config.hidden + 3 * down;
    for policy in Policy::ALL {
        // Two micro-batches of one row. All blocks but the last are computed again, each up to the
        // input of its last product.
        let again = if policy == Policy::None { 0 } else { layers - 1 };
        let plan = plan_of(cpu(), "qwen2-tied", Trained::Full, policy);
        let multiply_adds = 2 * layers * (matrices * tokens) as u64;
        for (op, calls, recomputed) in [
            ("linear_forward", 7 * layers + 6 * again, 2 * again * ((matrices - down) * tokens) as u64),
            ("linear_grad_input", 7 * layers, 0),
            ("product_grad_weight", 7 * layers, 0),
        ] {
            let work = plan.work[op];
            assert_eq!((work.calls, work.multiply_adds), (2 * calls, multiply_adds + recomputed), "{op}");
        }
        let work = plan.work["attention_forward"];
        let calls = 2 * (layers + if policy == Policy::Full { again } else { 0 });
        let pairs = tokens * (tokens + 1) / 2 * 2 * attention.head_width * attention.heads;
        assert_eq!((work.calls, work.multiply_adds), (calls, calls * pairs as u64));
        assert_eq!(plan.work["head_loss_backward"].calls, 2);
        assert_eq!(plan.work["sum_squares"].calls, 2, "gradients and updated values are looked at");
    }
}

/// Lengths of rows come and go; memory is that of the longest.
#[test]
fn shapes_that_were_seen_take_no_memory() {
    let counting = Counting::new(cpu());
    let (profile, shapes) = (Profile::X2, Shapes::All(FloatFormat::Bf16));
    let built = build(&counting, &config("qwen2-base"), &shapes, &settings(lora(0.0), profile)).expect("a model");
    let mut trainer = Trainer::new(counting.clone(), built);
    let step = step_settings(profile, Policy::None, 1);
    let mut train = |tokens| {
        let rows = longest_rows(1, tokens);
        trainer.step(&[&rows[0]], 1, 0.0, &step).expect("a step");
    };
    train(200);
    let (held, peak) = (counting.bytes(), counting.bytes_peak());
    for tokens in (20..200).chain([200, 7, 200]) {
        train(tokens);
    }
    assert!(counting.bytes_peak() <= peak, "{} bytes, {peak} for the longest row", counting.bytes_peak());
    assert!(counting.bytes() <= held, "{} bytes, {held} for the longest row", counting.bytes());
}

#[test]
fn devices_that_are_not_there_can_be_planned_for() {
    let selector = Selector { api: Api::Cuda, index: 0 };
    let [plain, hopper] = [None, Some((9, 0))].map(|architecture| {
        let gpu = Gpu::absent(selector, architecture);
        plan_of(gpu, "qwen2-base", lora(0.0), Policy::Full)
    });
    assert!(plain.bytes_peak > 0 && plain.items[&Item::Workspace] <= hopper.items[&Item::Workspace]);
    assert_eq!(plain.items[&Item::Optimizer], hopper.items[&Item::Optimizer]);
}

/// A model of a billion numbers, without a number of it.
#[test]
fn a_large_model_is_planned_without_its_weights() {
    let text = r#"{"model_type":"qwen2","hidden_size":1536,"intermediate_size":8960,"num_hidden_layers":28,
        "num_attention_heads":12,"num_key_value_heads":2,"vocab_size":151936,"tie_word_embeddings":true,"rope_theta":1000000.0}"#;
    let model = Config::parse(text).expect("a config");
    let rows = longest_rows(2, 2048);
    let rows: Vec<&Row> = rows.iter().collect();
    let settings = Settings { trained: Trained::Full, profile: Profile::X2, positions: 2048, seed: 0 };
    let step = step_settings(Profile::X2, Policy::Full, 1);
    let plan =
        memory(cpu(), &model, &Shapes::All(FloatFormat::Bf16), &settings, &updates(&step, &rows)).expect("a plan");
    assert_eq!(plan.trained_count, 1_543_714_304);
    // Values, moments, gradients and slices.
    assert!(plan.bytes_peak > 18 * plan.trained_count && plan.bytes_peak < 24 * plan.trained_count, "{plan:?}");
}

/// Hybrid and latent models at their published sizes: every tensor and every op, without a number.
#[test]
fn published_sizes_of_hybrid_and_latent_models() {
    let rows = longest_rows(2, 256);
    let rows: Vec<&Row> = rows.iter().collect();
    let step = step_settings(Profile::X2, Policy::Full, 1);
    for (text, count) in [
        (r#"{"model_type":"qwen3_5_moe_text"}"#, Some(34_660_610_688)),
        (r#"{"model_type":"qwen3_next"}"#, None),
        (r#"{"model_type":"deepseek_v3"}"#, None),
    ] {
        let model = Config::parse(text).expect("a config");
        let targets = ["q_proj", "in_proj_qkv", "in_proj_qkvz", "kv_b_proj"];
        for trained in [Trained::Full, Trained::Lora(LoraConfig::new(8, 16.0, &targets))] {
            let full = trained == Trained::Full;
            let settings = Settings { trained, profile: Profile::X2, positions: 256, seed: 0 };
            let plan = memory(cpu(), &model, &Shapes::All(FloatFormat::Bf16), &settings, &updates(&step, &rows))
                .expect("a plan");
            assert!(plan.bytes_peak > plan.trained_count, "{text}");
            if let Some(count) = count.filter(|_| full) {
                assert_eq!(plan.trained_count, count, "{text}");
            }
        }
    }
}
