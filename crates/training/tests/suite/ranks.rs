//! Law 9: the number of ranks changes no byte. And what happens when a rank dies, hangs, sends
//! damaged messages or differs from the others.

use crate::ranks_ground::{Ended, Fault, Ground};
use isobit_kernels::{Cpu, Path as CpuPath};
use isobit_models::build;
use isobit_training::checkpoint::Start;
use isobit_training::engine::Engine;
use isobit_training::prepare::{RunError, build_settings, step_settings};
use isobit_training::ranks::RankError;
use isobit_training::ranks::update::groups_of;
use isobit_training::run::Outcome;
use isobit_training::signal::Signal;
use isobit_training::trainer::Trainer;

const LORA: &str = "type = \"lora\"\nlora_r = 4\nlora_dropout = 0.25";
const FULL: &str = "type = \"full\"";

#[track_caller]
fn finished(ended: &Ended) {
    for (rank, outcome) in ended.iter().enumerate() {
        assert!(matches!(outcome, Ok(Outcome::Finished { step: 5, .. })), "rank {rank}: {outcome:?}");
    }
}

/// All ranks failed with this exit code, and the rank that is meant says this.
#[track_caller]
fn failed(ended: &Ended, rank: usize, code: u8, parts: &[&str]) {
    for (rank, outcome) in ended.iter().enumerate() {
        let error = outcome.as_ref().expect_err("a failure");
        assert_eq!(error.exit_code(), code, "rank {rank}: {error}");
    }
    let error = ended[rank].as_ref().expect_err("a failure").to_string();
    for part in parts {
        assert!(error.contains(part), "`{part}` is missing in: {error}");
    }
}

fn any_number_of_ranks(fixture: &str, adapter: &'static str) {
    let ground = Ground::new(fixture, adapter);
    finished(&ground.train(1, "one", &[], &[]));
    for ranks in 2..=4 {
        let output = format!("{ranks} ranks");
        finished(&ground.train(ranks, &output, &[], &[]));
        ground.same("one", &output);
    }
}

#[test]
fn dense_with_an_adapter() {
    any_number_of_ranks("qwen2-base", LORA);
}

/// Ranks with a device, and ranks with a list of devices that divide the layers.
#[test]
fn lists_of_devices_inside_ranks() {
    for (fixture, adapter) in [("qwen2-base", LORA), ("qwen2-tied", FULL)] {
        let mut ground = Ground::new(fixture, adapter);
        finished(&ground.train(1, "one", &[], &[]));
        ground.lists = true;
        for ranks in 2..=3 {
            let output = format!("{ranks} ranks");
            finished(&ground.train(ranks, &output, &[], &[]));
            ground.same("one", &output);
        }
    }
}

#[test]
fn dense_in_full_with_a_tied_table() {
    any_number_of_ranks("qwen2-tied", FULL);
}

#[test]
fn experts_with_an_adapter() {
    const EXPERTS: &str = "type = \"lora\"\nlora_r = 3\n\
                           lora_target_modules = [\"q_proj\", \"o_proj\", \"gate_proj\", \"up_proj\", \"down_proj\"]";
    any_number_of_ranks("qwen3moe-base", EXPERTS);
}

#[test]
fn experts_in_full_with_load_balance() {
    any_number_of_ranks("qwen3moe-aux", FULL);
}

/// More groups than rows, so that some are empty, and ranks without a row.
#[test]
fn more_groups_than_rows() {
    let ground = Ground::new("qwen2-tied", FULL);
    let sets = ["training.gradient_groups=7"];
    finished(&ground.train(1, "one", &sets, &[]));
    for ranks in [2, 5, 7] {
        let output = format!("{ranks} ranks");
        finished(&ground.train(ranks, &output, &sets, &[]));
        ground.same("one", &output);
    }
    finished(&ground.train(1, "other groups", &["training.gradient_groups=2"], &[]));
    assert_ne!(
        ground.contents("one")["final/model.safetensors"],
        ground.contents("other groups")["final/model.safetensors"]
    );
}

/// An update that goes past the shards would apply nothing.
#[test]
#[should_panic(expected = "applies no update")]
fn an_engine_without_moments_applies_nothing_in_silence() {
    let ground = Ground::new("qwen2-tied", FULL);
    let prepared = ground.prepared("out", &[], None).expect("it can train");
    let cpu = Cpu::new(1, CpuPath::best()).expect("a thread");
    let built = build(&cpu, &prepared.model, &prepared.weights, &build_settings(&prepared.run)).expect("built");
    let rows: Vec<_> = prepared.train.iter().take(2).collect();
    let _ = Trainer::without_moments(cpu, built).step(&rows, 1, 1e-3, &step_settings(&prepared.run));
}

#[test]
fn every_group_has_one_rank() {
    for groups in 1..20 {
        for ranks in 1..=groups {
            let mut next = 0;
            for rank in 0..ranks {
                let of_rank = groups_of(rank, ranks, groups);
                assert!(of_rank.start == next && !of_rank.is_empty(), "{groups} groups, {ranks} ranks");
                next = of_rank.end;
            }
            assert_eq!(next, groups);
        }
    }
}

/// A rank dies at one message after another; the run is resumed with another number of ranks.
fn killed_and_resumed_with_other_ranks(ground: &Ground, points: &[(usize, usize)]) {
    finished(&ground.train(1, "one", &[], &[]));
    let mut resumed = 0;
    for (point, ranks) in points.iter().copied() {
        let output = format!("killed at {point}");
        let dies = ranks - 1;
        let ended = ground.train(ranks, &output, &[], &[(dies, Fault::Dies(point))]);
        if ended.iter().all(Result::is_ok) {
            ground.same("one", &output);
            continue;
        }
        for (rank, outcome) in ended.iter().enumerate().filter(|(rank, _)| *rank != dies) {
            let error = outcome.as_ref().expect_err("it cannot go on alone");
            assert_eq!(error.exit_code(), 6, "rank {rank}: {error}");
        }
        resumed += 1;
        finished(&ground.start(ranks % 4 + 1, &output, &[], &[], Start::Resume));
        ground.same("one", &output);
    }
    assert!(3 * resumed >= 2 * points.len(), "only {resumed} runs were killed");
}

#[test]
fn killed_anywhere_with_an_adapter() {
    let points = [(0, 2), (4, 3), (9, 4), (17, 2), (23, 3), (31, 4)];
    killed_and_resumed_with_other_ranks(&Ground::new("qwen2-base", LORA), &points);
}

/// The optimizer state is in shards, and those of other ranks are gone.
#[test]
fn killed_anywhere_in_full() {
    killed_and_resumed_with_other_ranks(&Ground::new("qwen2-tied", FULL), &[(5, 3), (40, 4), (44, 2)]);
}

#[test]
fn killed_anywhere_with_experts() {
    killed_and_resumed_with_other_ranks(&Ground::new("qwen3moe-aux", FULL), &[(5, 3), (17, 2), (29, 4)]);
}

#[test]
fn a_rank_that_hangs_is_named() {
    let ground = Ground::new("qwen2-base", LORA);
    // Rank 0 waits for rank 2 in the tree, which waits for rank 3.
    for (point, hangs) in [(3, 3), (11, 1)] {
        let ended = ground.train(4, &format!("{hangs} hangs"), &[], &[(hangs, Fault::Hangs(point))]);
        let named = ended.iter().filter(
            |outcome| matches!(outcome, Err(RunError::Rank(RankError::Silent { rank, seconds: 1 })) if *rank == hangs),
        );
        assert!(named.count() >= 1, "{ended:?}");
        let wrong = |outcome: &Result<Outcome, RunError>| matches!(outcome, Err(RunError::Rank(RankError::Silent { rank, .. })) if *rank != hangs);
        assert!(!ended.iter().any(wrong), "{ended:?}");
        assert!(ended.iter().all(|outcome| outcome.as_ref().is_err_and(|error| error.exit_code() == 6)), "{ended:?}");
    }
}

/// The lines of the metrics have the time of updates and evaluations; saves take some too.
#[test]
fn all_communication_is_told() {
    let ground = Ground::new("qwen2-tied", FULL);
    finished(&ground.train(2, "out", &[], &[]));
    let metrics = std::fs::read_to_string(ground.path("out").join("metrics.jsonl")).expect("a file");
    let lines = metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
    let seconds = |line: &serde_json::Value| line["timing"]["communication_s"].as_f64().expect("two ranks");
    let (evaluations, updates): (Vec<_>, Vec<_>) = lines.partition(|line| line.get("eval_loss").is_some());
    let [evaluations, updates] = [evaluations, updates].map(|lines| lines.iter().map(seconds).sum::<f64>());
    let told = *ground.communication.lock().expect("no rank panics");
    assert!(evaluations > 0.0 && updates > 0.0);
    assert!(told > evaluations + updates, "{told} s, of which {updates} and {evaluations}");
}

#[test]
fn a_late_message_changes_nothing() {
    let ground = Ground::new("qwen2-base", LORA);
    finished(&ground.train(1, "one", &[], &[]));
    finished(&ground.train(3, "late", &[], &[(0, Fault::Delays(9)), (2, Fault::Delays(5))]));
    ground.same("one", "late");
}

#[test]
fn a_damaged_message_is_never_used() {
    let ground = Ground::new("qwen2-base", LORA);
    finished(&ground.train(1, "one", &[], &[]));
    let ended = ground.train(2, "damaged", &[], &[(1, Fault::Corrupts(14))]);
    failed(&ended, 0, 6, &["a message from rank 1 arrived damaged: its checksum does not match"]);
    finished(&ground.start(3, "damaged", &[], &[], Start::Resume));
    ground.same("one", "damaged");
}

#[test]
fn different_weights_are_noticed_before_anything_is_saved() {
    let ground = Ground::new("qwen2-base", LORA);
    let ended = ground.train(3, "out", &["training.save_steps=1"], &[(1, Fault::OtherWeights)]);
    failed(&ended, 0, 6, &["after update 1 the weights of rank 1 differ from those of rank 0"]);
    let ended = ground.train(3, "first", &["training.save_steps=1"], &[(0, Fault::OtherWeights)]);
    failed(&ended, 0, 6, &["after update 1 the weights of rank 0 differ from those of rank 1"]);
    for output in ["out", "first"] {
        assert!(!ground.contents(output).keys().any(|name| name.starts_with("checkpoint")), "{output}");
    }
}

#[test]
fn ranks_that_differ_are_refused_before_the_first_step() {
    let ground = Ground::new("qwen2-base", LORA);
    ground.put_data("other.jsonl", 13, 1);
    for (fault, code, parts) in [
        (Fault::Sets("training.learning_rate=0.02"), 2, ["training.learning_rate", "on rank 2"]),
        (Fault::Sets("training.gradient_groups=3"), 2, ["training.gradient_groups", "set to 3 on rank 2"]),
        (Fault::Sets("training.save_steps=3"), 2, ["training.save_steps", "on rank 2"]),
        (Fault::OtherData, 8, ["the data of rank 2", "rank 0"]),
        (Fault::OtherBase, 8, ["the base model of rank 2", "rank 0"]),
    ] {
        let ended = ground.train(3, "out", &[], &[(2, fault.clone())]);
        failed(&ended, 0, code, &parts);
        assert!(!ground.path("out").exists(), "{fault:?}");
    }
    // What does not matter may differ.
    finished(&ground.train(1, "one", &[], &[]));
    let smaller = Fault::Sets("eval.micro_batch_size=1");
    finished(&ground.train(3, "other", &[], &[(1, smaller)]));
    ground.same("one", "other");
}

#[test]
fn a_failure_of_one_rank_is_that_of_all() {
    let ground = Ground::new("qwen2-base", LORA);
    let ended = ground.train(3, "out", &[], &[(2, Fault::NoDevice)]);
    failed(&ended, 2, 2, &["no device"]);
    failed(&ended, 0, 2, &["rank 2: no device"]);
    let ended = ground.train(2, "out", &[], &[(1, Fault::Sets("training.learning_rate=never"))]);
    failed(&ended, 0, 2, &["rank 1: ", "learning_rate"]);
}

/// The same message, whatever the number of ranks.
#[test]
fn numbers_that_are_not_finite() {
    let ground = Ground::new("qwen2-tied", FULL);
    let sets = ["training.learning_rate=1.0", "training.weight_decay=1e15"];
    let alone = ground.train(1, "one", &sets, &[])[0].as_ref().expect_err("not finite").to_string();
    for ranks in 2..=4 {
        let ended = ground.train(ranks, &format!("{ranks} ranks"), &sets, &[]);
        failed(&ended, 0, 5, &[&alone]);
    }
}

#[test]
fn more_ranks_than_groups() {
    let ground = Ground::new("qwen2-base", LORA);
    failed(&ground.train(5, "out", &[], &[]), 0, 2, &["5 ranks cannot share 4 gradient groups"]);
    assert!(!ground.path("out").exists());
}

/// A signal to one rank stops all of them, with a checkpoint.
#[test]
fn a_signal_to_one_rank_stops_all() {
    let ground = Ground::new("qwen2-base", LORA);
    finished(&ground.train(1, "one", &[], &[]));
    for (ranks, of, after) in [(2, 1, 9), (3, 0, 10), (3, 2, 8)] {
        let output = format!("stopped {ranks} {of}");
        let ended = ground.train(ranks, &output, &[], &[(of, Fault::Signal(after))]);
        let Ok(Outcome::Stopped { step, signal: Signal::Terminate }) = ended[0] else { panic!("{ended:?}") };
        assert!(
            (1..5).contains(&step)
                && ended
                    .iter()
                    .all(|outcome| matches!(outcome, Ok(Outcome::Stopped { step: other, .. }) if *other == step)),
            "{ended:?}"
        );
        assert!(ground.path(&output).join(format!("checkpoint-{step}")).exists());
        finished(&ground.start(4, &output, &[], &[], Start::Resume));
        ground.same("one", &output);
    }
}

#[test]
fn stopping_early() {
    let ground = Ground::new("qwen2-base", LORA);
    let sets = ["training.early_stopping_patience=1", "training.learning_rate=1.0", "eval.eval_steps=1"];
    let one = ground.train(1, "one", &sets, &[]);
    assert!(matches!(one[0], Ok(Outcome::Finished { early: true, .. })), "{one:?}");
    let three = ground.train(3, "three", &sets, &[]);
    assert!(three.iter().all(|outcome| outcome.as_ref().ok() == one[0].as_ref().ok()), "{three:?}");
    ground.same("one", "three");
}
