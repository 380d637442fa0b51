//! Going on from a checkpoint holds no more than the plan says: the model, its moments and one
//! tensor of the file; and ranks hold no more than their plans. Every allocation of the process is
//! counted, so each test runs in one of its own; the counting allocator is that of the whole
//! binary, which costs the other tests two additions an allocation.

use crate::plan::updates;
use isobit_conformance::in_own_process;
use isobit_kernels::{Cpu, Path as CpuPath};
use isobit_models::Shapes;
use isobit_models::build::Settings;
use isobit_proof::safetensors::{Dtype, Entry, write};
use isobit_training::checkpoint::Start;
use isobit_training::config;
use isobit_training::groups::Groups;
use isobit_training::plan::{Item, MemoryPlan, PeakOfUpdate, PlannedUpdate, longest_rows, memory};
use isobit_training::prepare::{Prepared, prepare, step_settings, trained};
use isobit_training::ranks::memory::Place;
use isobit_training::ranks::{Team, threads};
use isobit_training::row::Row;
use isobit_training::run::{Outcome, Watch, train};
use isobit_training::step::StepSettings;
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

struct Counted;

// SAFETY: every call goes to the system's allocator as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

struct Silent;

impl Watch for Silent {
    fn seconds(&mut self) -> f64 {
        0.0
    }

    fn wall_seconds(&mut self) -> f64 {
        0.0
    }
}

const TOKENIZER: &str = include_str!("../fixtures/tokenizer.json");
const HIDDEN: usize = 128;
const WIDE: usize = 512;
const VOCABULARY: usize = 352;
const LAYERS: usize = 4;

/// A model of a million weights, all alike: what is learnt does not matter.
fn put_model(folder: &Path) {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
        "tie_word_embeddings": true, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    });
    let mut shapes =
        vec![("embed_tokens.weight".to_string(), vec![VOCABULARY, HIDDEN]), ("norm.weight".to_string(), vec![HIDDEN])];
    for layer in 0..LAYERS {
        let mut put =
            |name: &str, shape: &[usize]| shapes.push((format!("layers.{layer}.{name}.weight"), shape.to_vec()));
        for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            put(&format!("self_attn.{name}"), &[HIDDEN, HIDDEN]);
        }
        put("mlp.gate_proj", &[WIDE, HIDDEN]);
        put("mlp.up_proj", &[WIDE, HIDDEN]);
        put("mlp.down_proj", &[HIDDEN, WIDE]);
        put("input_layernorm", &[HIDDEN]);
        put("post_attention_layernorm", &[HIDDEN]);
    }
    let bytes = 0.01f32.to_le_bytes().repeat(VOCABULARY * WIDE);
    let named: Vec<(String, Vec<usize>)> =
        shapes.into_iter().map(|(name, shape)| (format!("model.{name}"), shape)).collect();
    let entries: Vec<Entry> = named
        .iter()
        .map(|(name, shape)| Entry {
            name,
            dtype: Dtype::F32,
            shape,
            bytes: &bytes[..4 * shape.iter().product::<usize>()],
        })
        .collect();
    std::fs::create_dir(folder).expect("folder");
    write(&folder.join("model.safetensors"), &BTreeMap::new(), &entries).expect("written");
    let put = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("written");
    put("config.json", &config.to_string());
    put("tokenizer.json", TOKENIZER);
    put("tokenizer_config.json", r#"{"eos_token":"<|endoftext|>"}"#);
}

#[test]
fn a_resumed_run_holds_what_the_plan_says() {
    let test = concat!(module_path!(), "::a_resumed_run_holds_what_the_plan_says");
    in_own_process(test, |_| (), resumed_against_plan);
}

/// A run in full on the model in `folder`, with these lines of `[training]`.
fn prepared(folder: &Path, training: &str) -> Prepared {
    let at = |name: &str| folder.join(name);
    put_model(&at("model"));
    let rows = "{\"text\":\"1+2=3\"}\n{\"text\":\"2+2=4\"}\n".repeat(8);
    std::fs::write(at("data.jsonl"), rows).expect("written");
    let [model, output, data] =
        ["model", "out", "data.jsonl"].map(|name| serde_json::Value::from(at(name).display().to_string()));
    let text = format!(
        "base_model = {model}\noutput_dir = {output}\n[[datasets]]\npath = {data}\n[training]\nmax_seq_length = 16\n\
         micro_batch_size = 1\n{training}[adapter]\ntype = \"full\"\n"
    );
    std::fs::write(at("run.toml"), text).expect("written");
    prepare(config::read(&at("run.toml"), &[]).expect("a config").run).expect("a run")
}

fn resumed_against_plan() {
    let held = tempfile::tempdir().expect("folder");
    let prepared = prepared(held.path(), "max_steps = 1\n");
    let cpu = || Cpu::new(1, CpuPath::best()).expect("a thread");
    train(cpu(), &prepared, Start::New, &Team::alone(), &mut Silent).expect("trained");

    let settings = Settings { trained: trained(&prepared.run), profile: prepared.run.profile, positions: 16, seed: 0 };
    let rows = longest_rows(1, 16);
    let rows: Vec<&Row> = rows.iter().collect();
    let step = step_settings(&prepared.run);
    let plan = memory(cpu(), &prepared.model, &Shapes::Of(&prepared.weights), &settings, &updates(&step, &rows))
        .expect("a plan");
    assert_eq!(plan.trained_count * 4 * 3, plan.bytes_save);
    let largest = 4 * WIDE * HIDDEN;
    assert!(
        (plan.bytes_save + largest..plan.bytes_save + 2 * largest).contains(&plan.bytes_resume),
        "{}",
        plan.bytes_resume
    );
    assert!(plan.bytes_on_host() >= plan.bytes_resume);

    // Nothing is left to train: what is held is what reading the checkpoint takes, and then one
    // tensor of `final` at a time.
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let outcome = train(cpu(), &prepared, Start::Resume, &Team::alone(), &mut Silent).expect("resumed");
    assert_eq!(outcome, Outcome::Finished { step: 1, early: false });
    let most = MOST.load(Ordering::Relaxed) - before;
    // Beside the tensors: buffers of files and the threads' own, whatever the size of the model.
    let others = 3 << 20;
    assert!(most < plan.bytes_resume + others, "{most} bytes held, {} planned", plan.bytes_resume);
    assert!(most > plan.bytes_resume - largest, "{most} bytes held, {} planned", plan.bytes_resume);
}

#[test]
fn ranks_hold_what_their_plans_say() {
    let test = concat!(module_path!(), "::ranks_hold_what_their_plans_say");
    in_own_process(test, |_| (), ranks_against_plans);
}

fn plan_of_rank(prepared: &Prepared, place: Place) -> MemoryPlan {
    let settings = Settings { trained: trained(&prepared.run), profile: prepared.run.profile, positions: 16, seed: 0 };
    let peak = PeakOfUpdate::of_rank(place, 1, 0);
    let rows = longest_rows(peak.rows, 16);
    let rows: Vec<&Row> = rows.iter().collect();
    let step = StepSettings { gradient_groups: peak.groups, ..step_settings(&prepared.run) };
    let planned = PlannedUpdate { waiting: peak.waiting, rank: Some(place), ..updates(&step, &rows) };
    let cpu = Cpu::new(1, CpuPath::best()).expect("a thread");
    memory(cpu, &prepared.model, &Shapes::Of(&prepared.weights), &settings, &planned).expect("a plan")
}

fn ranks_against_plans() {
    for (ranks, groups) in [(2, 2), (2, 4), (2, 5), (3, 4), (4, 4)] {
        let held = tempfile::tempdir().expect("folder");
        let lines = format!(
            "max_steps = 3\nsave_steps = 2\ngradient_accumulation_steps = {groups}\ngradient_groups = {groups}\n"
        );
        let prepared = prepared(held.path(), &lines);
        let place = |rank| Place { rank, ranks, groups: Groups::new(groups, groups), is_sharded: true, node: 0 };
        let of_rank = |rank| {
            let places = place(rank).most_demanding(&[rank]);
            let plans = places.into_iter().map(|place| plan_of_rank(&prepared, place)).collect();
            MemoryPlan::of_most_demanding(plans, true).expect("a rank has a place")
        };
        let plans: Vec<MemoryPlan> = (0..ranks).map(of_rank).collect();
        let planned: usize = plans.iter().map(MemoryPlan::bytes_on_host).sum();
        for plan in &plans {
            assert_eq!(plan.items.values().sum::<usize>(), plan.bytes_peak, "items and their sum");
            assert!(plan.items[&Item::Rank] > 4 * plan.trained_count, "{plan:?}");
        }

        let before = HELD.load(Ordering::Relaxed);
        MOST.store(before, Ordering::Relaxed);
        std::thread::scope(|scope| {
            for world in threads::world(ranks) {
                let prepared = &prepared;
                scope.spawn(move || {
                    let team = Team::new(&world, Duration::from_mins(10));
                    let cpu = Cpu::new(1, CpuPath::best()).expect("a thread");
                    train(cpu, prepared, Start::New, &team, &mut Silent).expect("trained");
                });
            }
        });
        let most = MOST.load(Ordering::Relaxed) - before;
        // Ranks need the most at different times, and here a message is held once by both its ends.
        let others = ranks * (1 << 20);
        assert!(most < planned + others, "{ranks} ranks, {groups} groups: {most} bytes held, {planned} planned");
        assert!(2 * most > planned, "{ranks} ranks, {groups} groups: {most} bytes held, {planned} planned");
    }
}
