//! Replay finds where a run and its record part: the update, the item, the tensor, and in the next
//! checkpoint the element.

use crate::ranks_ground::{Ground, Silent};
use isobit_kernels::cpu::CpuMemory;
use isobit_kernels::observe::{Call, Observed, Observer};
use isobit_kernels::op::Output;
use isobit_kernels::{Backend, Buffer, Cpu, Path as CpuPath};
use isobit_models::build::{self, Settings};
use isobit_proof::chain::{Chain, Item};
use isobit_training::audit::Auditor;
use isobit_training::checkpoint::Start;
use isobit_training::prepare::{Prepared, RunError};
use isobit_training::ranks::Team;
use isobit_training::replay::{Difference, Element, FoundIn, Replayed, explain, replay};
use isobit_training::run::{Watch, train_with};
use isobit_training::trainer::Trainer;
use std::cell::Cell;
use std::ops::RangeInclusive;

const LORA: &str = "type = \"lora\"\nlora_r = 4\nlora_target_modules = [\"q_proj\", \"down_proj\"]";
const FULL: &str = "type = \"full\"";

/// Changes one bit of one result: an output of the n-th call of an op.
struct Flip {
    op: &'static str,
    /// Calls until it happens.
    left: Cell<usize>,
    /// Which of the op's outputs, and which element of it.
    output: usize,
    element: usize,
    /// The bits that change.
    mask: u32,
}

impl Observer<Cpu> for Flip {
    fn before(&self, _: &Cpu, _: Call, _: &mut Buffer<u8>) {}

    fn after(&self, _: &Cpu, call: Call, outputs: Vec<Output<'_, CpuMemory>>) {
        if call.op != self.op || self.left.get() == 0 {
            return;
        }
        self.left.set(self.left.get() - 1);
        let mut results = outputs.into_iter().filter_map(|output| match output {
            Output::F32(result) => Some(result),
            _ => None,
        });
        if let (0, Some(result)) = (self.left.get(), results.nth(self.output)) {
            result[self.element] = f32::from_bits(result[self.element].to_bits() ^ self.mask);
        }
    }
}

fn cpu(threads: usize) -> Cpu {
    Cpu::new(threads, CpuPath::best()).expect("an available path")
}

fn trainer<B: Backend>(backend: B, prepared: &Prepared, settings: &Settings) -> Result<Trainer<B>, RunError> {
    let built = build(&backend, prepared, settings)?;
    Ok(Trainer::new(backend, built))
}

fn build<B: Backend>(backend: &B, prepared: &Prepared, settings: &Settings) -> Result<build::Built<B>, RunError> {
    Ok(isobit_models::build(backend, &prepared.model, &prepared.weights, settings)?)
}

fn train<B: Backend>(prepared: &Prepared, backend: B) {
    let make = |settings: &Settings| trainer(backend, prepared, settings);
    train_with(make, prepared, Start::New, &Team::alone(), &mut Silent).expect("trained");
}

fn replayed(prepared: &Prepared, threads: usize, steps: RangeInclusive<u64>) -> Replayed {
    let chain = Chain::read(&prepared.run.output_dir).expect("a chain");
    let make = |settings: &Settings| trainer(cpu(threads), prepared, settings);
    replay(make, prepared, &chain, steps, &mut |_| ()).expect("replayed")
}

#[test]
fn every_window_agrees_from_the_nearest_checkpoint_or_the_base() {
    for (model, adapter) in [("qwen2-base", LORA), ("qwen2-tied", FULL)] {
        let ground = Ground::new(model, adapter);
        let prepared = ground.prepared("run", &[], None).expect("prepared");
        train(&prepared, cpu(2));
        // The checkpoints are of updates 2, 4 and 5.
        for (steps, from, checkpoints) in
            [(1..=3, 0, vec![2]), (3..=3, 2, vec![]), (4..=5, 2, vec![4, 5]), (5..=5, 4, vec![5])]
        {
            let last = *steps.end();
            let agreeing = last - from;
            let expected = Replayed { from, agreeing, checkpoints, ..Replayed::default() };
            assert_eq!(replayed(&prepared, 1, steps), expected, "{model}, to {last}");
        }
        // Another split of the same rows.
        let other =
            ground.prepared("run", &["training.micro_batch_size=4", "training.gradient_accumulation_steps=1"], None);
        assert_eq!(replayed(&other.expect("prepared"), 2, 1..=5).difference, None);
    }
}

/// One bit of one element of a clipped gradient, in update 3: it is named, and the first element
/// that it has changed in the checkpoint after it.
#[test]
fn a_flipped_bit_of_a_gradient_is_named() {
    let ground = Ground::new("qwen2-base", LORA);
    let prepared = ground.prepared("run", &[], None).expect("prepared");
    let observer = Flip { op: "scale", left: Cell::new(3), output: 2, element: 5, mask: 1 };
    train(&prepared, Observed { inner: cpu(1), observer });
    let chain = Chain::read(&prepared.run.output_dir).expect("a chain");
    for steps in [1..=5, 3..=3, 3..=4] {
        let found = replayed(&prepared, 2, steps.clone());
        let Some(Difference { step, found_in, tensors, element, .. }) = found.difference else { panic!("{steps:?}") };
        assert_eq!((step, found_in), (3, FoundIn::Chain(Item::Gradient(Some(2)))));
        assert_eq!(tensors, [chain.origin.tensors[2].clone()]);
        let Element { folder, recorded, replayed, .. } = element.expect("a checkpoint follows");
        assert!(folder == "checkpoint-4" && recorded.to_bits() != replayed.to_bits());
    }
    assert_eq!(replayed(&prepared, 2, 1..=2).difference, None);
    // From a checkpoint after it the record is consistent.
    assert_eq!(replayed(&prepared, 2, 5..=5).difference, None);
}

/// What goes wrong in the optimizer is told from what goes wrong before it.
#[test]
fn a_flipped_bit_of_a_weight_is_named() {
    let ground = Ground::new("qwen2-base", LORA);
    let prepared = ground.prepared("run", &[], None).expect("prepared");
    let observer = Flip { op: "adamw", left: Cell::new(2), output: 0, element: 1, mask: 1 };
    train(&prepared, Observed { inner: cpu(1), observer });
    let Some(Difference { step, found_in, .. }) = replayed(&prepared, 1, 1..=5).difference else { panic!("none") };
    assert_eq!((step, found_in), (2, FoundIn::Chain(Item::Weights(Some(0)))));
}

#[test]
fn other_inputs_are_explained() {
    let ground = Ground::new("qwen2-base", LORA);
    let prepared = ground.prepared("run", &[], None).expect("prepared");
    train(&prepared, cpu(1));
    let chain = Chain::read(&prepared.run.output_dir).expect("a chain");
    let receipt = isobit_proof::receipt::Receipt::read(&prepared.run.output_dir).expect("a receipt");
    let said = |other: &Prepared| explain(other, &chain, Some(&receipt)).expect("explained");
    assert_eq!(said(&prepared), Vec::<String>::new());
    let seed = ground.prepared("run", &["seed=43"], None).expect("prepared");
    let all = said(&seed);
    assert!(all.iter().any(|line| line == "config `seed` is 43, the run's was 42"), "{all:?}");
    // Line 8 of the data.
    let path = ground.path("data.jsonl");
    let text = std::fs::read_to_string(&path).expect("read");
    let mut lines: Vec<String> = text.lines().map(str::to_string).collect();
    lines[7] =
        lines[7].replacen("[[", "[", 1).replacen("ids\":[", "ids\":[4,", 1).replacen("labels\":[", "labels\":[4,", 1);
    std::fs::write(&path, lines.join("\n") + "\n").expect("written");
    let all = said(&ground.prepared("run", &[], None).expect("prepared"));
    assert!(all.iter().any(|line| line.ends_with("data.jsonl: line 8 is not what the run was trained on")), "{all:?}");
    assert!(all.iter().any(|line| line.starts_with("update ") && line.contains("rows are not those")), "{all:?}");
}

/// A run whose second computation of a micro-batch has one bit wrong stops before the update; one
/// without a fault is the run without audits.
#[test]
fn an_audit_stops_at_a_difference() {
    struct Audited<'a> {
        auditor: &'a mut dyn Auditor,
    }

    impl Watch for Audited<'_> {
        fn seconds(&mut self) -> f64 {
            0.0
        }

        fn wall_seconds(&mut self) -> f64 {
            0.0
        }

        fn auditor(&mut self, step: u64) -> Option<(&mut dyn Auditor, u64)> {
            step.is_multiple_of(2).then_some((&mut *self.auditor, step / 2))
        }
    }

    let ground = Ground::new("qwen2-base", LORA);
    let prepared = |output: &str| ground.prepared(output, &[], None).expect("prepared");
    train(&prepared("run"), cpu(2));
    for (output, calls, fails) in [("audited", 0, None), ("faulty", 1, Some(2))] {
        let prepared = prepared(output);
        let settings = isobit_training::prepare::build_settings(&prepared.run);
        // The slices of a product would not see the lowest bit, and the recomputation would find a
        // change in the forward pass first.
        let observer = Flip { op: "rms_norm_backward", left: Cell::new(calls), output: 0, element: 3, mask: 1 << 22 };
        let mut other = trainer(Observed { inner: cpu(1), observer }, &prepared, &settings).expect("a model");
        let make = |settings: &Settings| trainer(cpu(2), &prepared, settings);
        let mut watch = Audited { auditor: &mut other };
        let outcome = train_with(make, &prepared, Start::New, &Team::alone(), &mut watch);
        match fails {
            None => {
                outcome.expect("no difference");
                ground.same("run", output);
            }
            Some(step) => {
                let error = outcome.expect_err("a difference");
                assert_eq!(error.exit_code(), 6);
                assert!(error.to_string().starts_with(&format!("step {step}: an audit of rows ")), "{error}");
            }
        }
    }
}
