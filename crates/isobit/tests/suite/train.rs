//! `isobit train` as a whole: the laws. However a run is cut up, its weights, optimizer, metrics
//! and best checkpoint are the same.

use crate::model_folder::{Folder, Shape};
use isobit_conformance::skip;

/// The three kinds of run that the laws are checked on, as overrides.
const KINDS: [(&str, &[&str]); 3] = [
    ("lora", &[]),
    (
        "packed",
        &["sample_packing=true", "training.micro_batch_size=1", "gradient_accumulation_steps=8", "max_seq_length=24"],
    ),
    ("full", &[]),
];

/// A folder whose run `first` the others are compared with.
fn folder(kind: &str, overrides: &[&str]) -> Folder {
    let folder = Folder::new(Shape::TINY);
    if kind == "full" {
        let config = folder.text("config.toml");
        let adapter = config.find("[adapter]").expect("a section");
        folder.put("config.toml", format!("{}[adapter]\ntype = \"full\"\n", &config[..adapter]));
    }
    folder.trained("first", overrides);
    for due in ["checkpoint-3", "checkpoint-6", "checkpoint-9", "checkpoint-12"] {
        assert!(folder.checkpoints("first").iter().any(|name| name == due), "{due}");
    }
    assert_eq!(folder.metrics("first").len(), 12 + 3);
    folder
}

/// Each set of overrides gives the run `first` again.
fn unchanged(folder: &Folder, kind: &[&str], ways: &[&[&str]]) {
    for (index, way) in ways.iter().enumerate() {
        let output = format!("way-{index}-of-{}", ways.len());
        folder.trained(&output, &[kind, way].concat());
        folder.same("first", &output);
    }
}

#[test]
fn again_with_other_threads_and_workers() {
    for (kind, overrides) in KINDS {
        let folder = folder(kind, overrides);
        unchanged(&folder, overrides, &[&[], &["threads=2"], &["data_workers=3"], &["data_workers=1"]]);
        // Once is enough for more threads than most machines have cores: they wait for each other.
        if kind == "lora" {
            unchanged(&folder, overrides, &[&["threads=7"]]);
        }
    }
}

/// TensorBoard's files are extra: the run stays the same. What they hold is tested where they are
/// written.
#[test]
fn tensorboard_on_request() {
    let folder = folder("lora", &[]);
    folder.trained("shown", &["report_to_tensorboard=true"]);
    assert!(!folder.has("first/tensorboard"));
    let events = std::fs::read_dir(folder.path("shown/tensorboard")).expect("a folder of events");
    let sizes: Vec<_> = events.map(|file| file.expect("a file").metadata().expect("its size").len()).collect();
    assert!(sizes.len() == 1 && sizes[0] > 500, "{sizes:?}");
}

#[test]
fn any_split_of_the_batch() {
    for (kind, overrides) in KINDS {
        let folder = folder(kind, overrides);
        for (index, (micro, accumulation)) in [(8, 1), (2, 4), (1, 8), (4, 2)].into_iter().enumerate() {
            let output = format!("split-{index}");
            let split =
                [format!("training.micro_batch_size={micro}"), format!("gradient_accumulation_steps={accumulation}")];
            let split: Vec<&str> = overrides.iter().copied().chain(split.iter().map(String::as_str)).collect();
            // The last of two equal keys holds.
            folder.trained(&output, &[&split[..], &["eval.micro_batch_size=5"]].concat());
            folder.same("first", &output);
        }
    }
}

#[test]
fn gradient_groups_are_part_of_a_run_and_its_split_is_not() {
    for (kind, overrides) in KINDS {
        let folder = folder(kind, overrides);
        let grouped = |output: &str, groups: usize, micro: usize, accumulation: usize| {
            let keys = [
                format!("gradient_groups={groups}"),
                format!("training.micro_batch_size={micro}"),
                format!("gradient_accumulation_steps={accumulation}"),
            ];
            let keys: Vec<&str> = overrides.iter().copied().chain(keys.iter().map(String::as_str)).collect();
            folder.trained(output, &keys);
        };
        grouped("three", 3, 8, 1);
        grouped("three-by-rows", 3, 1, 8);
        grouped("three-by-twos", 3, 2, 4);
        folder.same("three", "three-by-rows");
        folder.same("three", "three-by-twos");
        let diff = folder.run(&["diff", "first", "three"]);
        assert_eq!(diff.code, 1, "{kind}: three groups are another sum: {}", diff.out);
    }
}

#[test]
fn any_checkpoint_policy() {
    for (kind, overrides) in KINDS {
        let folder = folder(kind, overrides);
        let ways: &[&[&str]] = &[
            &["gradient_checkpointing=none"],
            &["gradient_checkpointing=selective"],
            &["gradient_checkpointing=full"],
        ];
        unchanged(&folder, overrides, ways);
    }
}

#[test]
fn on_any_device() {
    let folder = folder("lora", &[]);
    let ready = |line: &serde_json::Value| line["device"] == "opencl:0" && line["ready"] == true;
    if !folder.run(&["devices", "--json"]).json().iter().any(ready) {
        return skip("train::on_any_device", &[("opencl:0".to_string(), "not ready on this machine".to_string())]);
    }
    unchanged(&folder, &[], &[&["device=opencl:0"]]);
}

/// What was audited, how often, and that it agreed.
#[test]
fn audits_are_in_the_summary() {
    let folder = Folder::new(Shape::TINY);
    let train = |output: &str, more: &[&str]| {
        let output = format!("output_dir={output}");
        folder.run(&[&["train", "config.toml", "--threads", "2", "--set", &output], more].concat())
    };
    let line = "audited every 5 updates on the CPU with 1 thread: 2 micro-batches, ";
    train("said", &["--audit-every", "5"]).says(0, &[line, " tokens, every bit agreed"]);
    let ran = train("told", &["--audit-every", "5", "--json"]);
    let events = ran.json();
    let audited: Vec<u64> =
        events.iter().filter(|event| event["event"] == "audited").filter_map(|event| event["step"].as_u64()).collect();
    assert_eq!((ran.code, &audited[..]), (0, &[5, 10][..]), "{}", ran.err);
    let audits = &events.last().expect("an end")["audits"];
    assert_eq!((&audits["every"], &audits["micro_batches"]), (&5.into(), &2.into()), "{audits}");
    assert!(!train("plain", &[]).err.contains("audited"));
    let ran = train("list", &["--audit-every", "5", "--device", "cpu,cpu"]);
    ran.says(0, &["audited every 5 updates on the CPU with 2 threads: 2 micro-batches, "]);
    assert!(!ran.err.contains("repeat what the run does"), "{}", ran.err);
    train("never", &["--audit-every", "50"]).says(0, &["audited nothing: a micro-batch every 50 updates"]);
}

#[test]
fn another_seed_is_another_run() {
    let folder = folder("lora", &[]);
    folder.trained("other", &["seed=8"]);
    let diff = folder.run(&["diff", "first", "other"]);
    assert_eq!(diff.code, 1, "{}", diff.out);
    assert_ne!(folder.metrics("first"), folder.metrics("other"));
}

/// A run whose evaluation asks for what it is never taught, so that it gets worse.
const WORSE: [&str; 7] = [
    "val_set_size=0",
    "eval.path=letters.jsonl",
    "eval_steps=1",
    "learning_rate=0.1",
    "lr_scheduler_type=constant",
    "warmup_ratio=0",
    "lora_dropout=0",
];

fn folder_of_letters() -> Folder {
    let folder = Folder::new(Shape::TINY);
    folder.put("letters.jsonl", "{\"prompt\":\"1+1=\",\"completion\":\"qxzjkqxzjkqxzjk\"}\n");
    folder
}

#[test]
fn the_best_weights_are_the_final_ones_where_asked_for() {
    let folder = folder_of_letters();
    folder.trained("best", &[&WORSE[..], &["save_steps=12", "load_best_model_at_end=true"]].concat());
    let best = folder.pointer("best", "best");
    assert!(best < 12, "{best}");
    assert_eq!(folder.pointer("best", "latest"), 12);
    let file = "adapter_model.safetensors";
    let [chosen, last] = [format!("checkpoint-{best}"), "checkpoint-12".to_string()];
    let code = |a: &str| folder.run(&["diff", &format!("best/{a}/{file}"), &format!("best/final/{file}")]).code;
    assert_eq!((code(&chosen), code(&last)), (0, 1));
}

#[test]
fn a_run_that_does_not_improve_stops_early_and_stays_stopped() {
    let folder = folder_of_letters();
    let overrides = [&WORSE[..], &["early_stopping_patience=2", "max_steps=60", "save_steps=100"]].concat();
    let ran = folder.trained("early", &overrides);
    assert!(ran.err.contains("stopped early"), "{}", ran.err);
    let last = folder.pointer("early", "latest");
    assert!((2..60).contains(&last), "{last}");
    let lines = folder.metrics("early");
    std::fs::remove_dir_all(folder.path("early/final")).expect("removed");
    // As after a crash between the last checkpoint and the final weights.
    let ran = folder.trained("early", &[&overrides[..], &["--resume"]].concat());
    assert!(ran.err.contains("stopped early"), "{}", ran.err);
    assert_eq!((folder.pointer("early", "latest"), folder.metrics("early")), (last, lines));
    folder.trained("again", &overrides);
    folder.same("again", "early");
}

#[test]
fn old_checkpoints_go_and_the_best_and_the_latest_stay() {
    let folder = folder_of_letters();
    let overrides = [&WORSE[..], &["save_steps=1"]].concat();
    folder.trained("few", &[&overrides[..], &["save_total_limit=2", "load_best_model_at_end=true"]].concat());
    let best = folder.pointer("few", "best");
    assert!(best < 11, "{best}");
    assert_eq!(folder.pointer("few", "latest"), 12);
    assert_eq!(folder.checkpoints("few"), [best, 11, 12].map(|step| format!("checkpoint-{step}")));
    folder.trained("one", &[&overrides[..], &["save_total_limit=1"]].concat());
    assert_eq!(folder.checkpoints("one"), [best, 12].map(|step| format!("checkpoint-{step}")));
}
