//! `offload` and `--memory`: a run that keeps parts of itself in host memory leaves the folder of a
//! run that does not, may be resumed without them, and what makes no sense is refused.

use crate::model_folder::{Folder, Shape};
use isobit_conformance::skip;

/// Whether there is an OpenCL device to offload from.
fn is_ready(folder: &Folder, test: &str) -> bool {
    let ready = |line: &serde_json::Value| line["device"] == "opencl:0" && line["ready"] == true;
    let found = folder.run(&["devices", "--json"]).json().iter().any(ready);
    if !found {
        skip(test, &[("opencl:0".to_string(), "not ready on this machine".to_string())]);
    }
    found
}

fn in_full(folder: &Folder) {
    let config = folder.text("config.toml");
    let adapter = config.find("[adapter]").unwrap_or(config.len());
    folder.put("config.toml", format!("{}[adapter]\ntype = \"full\"\n", &config[..adapter]));
}

#[test]
fn a_run_leaves_the_same_folder() {
    let (lora, full, experts) = (Folder::new(Shape::TINY), Folder::new(Shape::TINY), Folder::of_experts());
    if !is_ready(&lora, "offload::a_run_leaves_the_same_folder") {
        return;
    }
    in_full(&full);
    in_full(&experts);
    let all = "offload=optimizer,activations,weights";
    for (folder, ways) in [(&lora, &[all][..]), (&full, &["offload=optimizer", all]), (&experts, &[all])] {
        folder.trained("first", &[]);
        for (at, way) in ways.iter().enumerate() {
            let output = format!("way-{at}");
            folder.trained(&output, &["device=opencl:0", way]);
            folder.same("first", &output);
        }
        // Back to a checkpoint and on with everything on the device, then the other way round.
        folder.trained("way-0", &["device=opencl:0", "--resume-from=checkpoint-6"]);
        folder.same("first", "way-0");
        folder.trained("way-0", &["device=opencl:0", "offload=weights", "--resume-from=checkpoint-9"]);
        folder.same("first", "way-0");
    }
}

/// A run has a folder of its own.
#[test]
fn the_folder_of_the_model_is_not_that_of_a_run() {
    let folder = Folder::new(Shape::TINY);
    let listed = |name: &str| std::fs::read_dir(folder.path(name)).expect("a folder").count();
    let before = listed("model");
    folder.train("model", &[]).says(2, &["output_dir model is the folder of the base model", "hint: "]);
    folder.train("/", &[]).says(2, &["output_dir is /", "hint: "]);
    assert_eq!(listed("model"), before, "nothing is written");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let folder = Folder::new(Shape::TINY);
    let refused = |sets: &[&str], code: i32, parts: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        folder.run(&[&["train", "config.toml"], &sets[..]].concat()).says(code, parts);
        assert!(!folder.has("out"), "nothing is written");
    };
    refused(&["device=cuda:0", "offload=moments"], 2, &["`moments` cannot be offloaded", "\"optimizer\""]);
    refused(&["offload=optimizer"], 2, &["the CPU computes in host memory already", "name a card"]);
    refused(&["device=cpu,cpu", "offload=weights"], 2, &["the CPU computes in host memory already"]);
    let limited = folder.run(&["train", "config.toml", "--memory", "1"]);
    limited.says(2, &["--memory limits the memory of a card", "ulimit -v"]);
    let limited = folder.run(&["train", "config.toml", "--memory", "1", "--device", "cpu,cpu"]);
    limited.says(2, &["--memory limits the memory of a card", "ulimit -v"]);
    let bench = ["bench", "step", "--model", "tiny", "--memory", "512MiB"];
    folder.run(&bench).says(2, &["--memory limits the memory of a card"]);
    let lists = ["train", "config.toml", "--device", "cpu,cpu", "--memory", "1,1,1"];
    folder.run(&lists).says(2, &["3 memories are given for 2 devices"]);
    let bench = ["bench", "step", "--model", "tiny", "--offload", "optimizer"];
    folder.run(&bench).says(2, &["the CPU computes in host memory already"]);
    let bench = ["bench", "step", "--model", "tiny", "--device", "opencl:0", "--offload", "gradients"];
    folder.run(&bench).says(2, &["`gradients` cannot be offloaded"]);
}

/// The limit holds even if nothing was planned.
#[test]
fn a_limit_on_memory_ends_the_run() {
    let folder = Folder::new(Shape::TINY);
    if !is_ready(&folder, "offload::a_limit_on_memory_ends_the_run") {
        return;
    }
    let train = ["train", "config.toml", "--device", "opencl:0", "--memory", "0.0001"];
    folder.run(&train).says(4, &["needs", "--memory", "--no-plan"]);
    let ran = folder.run(&[&train[..], &["--no-plan"]].concat());
    ran.says(4, &["a buffer of", "exceeds --memory", "isobit plan"]);
}

/// Offload lets a run pass that does not fit otherwise, and the refusal without it says so.
#[test]
fn a_model_that_does_not_fit_trains_with_offload() {
    let folder = Folder::new(Shape::TINY);
    if !is_ready(&folder, "offload::a_model_that_does_not_fit_trains_with_offload") {
        return;
    }
    in_full(&folder);
    let all = ["--set", "offload=optimizer,activations,weights"];
    let run = |command: &str, memory: &str, sets: &[&str]| {
        let rows = ["training.micro_batch_size=1", "--set", "training.gradient_accumulation_steps=8"];
        let fixed =
            [command, "config.toml", "--device", "opencl:0", "--memory", memory, "--set", rows[0], rows[1], rows[2]];
        folder.run(&[&fixed[..], sets].concat())
    };
    let needed = |sets: &[&str]| {
        let plan = run("plan", "1", &[sets, &["--json"]].concat()).json().remove(0);
        plan["needed_bytes"].as_u64().expect("bytes")
    };
    let [whole, offloaded] = [needed(&[]), needed(&all)];
    assert!(offloaded < whole);
    let between = format!("{}", (whole + offloaded) as f64 / 2.0 / f64::from(1 << 30));
    let parts = ["needs", "--memory", "--set offload=optimizer", "fits and gives the same weights"];
    run("train", &between, &[]).says(4, &parts);
    let ran = run("train", &between, &[&all[..], &["--set", "output_dir=offloaded"]].concat());
    assert_eq!(ran.code, 0, "{}", ran.err);
    folder.trained("plain", &[]);
    folder.same("plain", "offloaded");
}

/// Card and host by item, and the ranks of a config with devices for each.
#[test]
fn the_plan_counts_the_host() {
    let folder = Folder::new(Shape::TINY);
    in_full(&folder);
    let plan = |sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let ran = folder.run(&[&["plan", "config.toml", "--memory", "1", "--json"], &sets[..]].concat());
        assert_eq!(ran.code, 0, "{}", ran.err);
        ran.json()
    };
    let bytes = |plan: &serde_json::Value, name: &str| plan[name].as_u64().unwrap_or(0);
    let whole = plan(&["device=cuda:0"]).remove(0);
    let offloaded = plan(&["device=cuda:0", "offload=optimizer,activations,weights"]).remove(0);
    assert_eq!((bytes(&whole, "host_bytes"), bytes(&offloaded, "optimizer_bytes")), (0, 0));
    assert!(bytes(&offloaded, "host_bytes") > bytes(&whole, "optimizer_bytes"), "{offloaded}");
    assert!(bytes(&offloaded, "total_bytes") < bytes(&whole, "total_bytes"), "{offloaded}");
    let by_rank = plan(&["devices_by_rank=[\"cuda:0\", \"cpu,cpu\", \"cuda:0\"]", "gradient_groups=4"]).remove(0);
    let by_rank = by_rank["ranks"].as_array().expect("a plan for every kind of rank");
    let devices: Vec<&str> = by_rank.iter().filter_map(|plan| plan["device"].as_str()).collect();
    assert_eq!(devices.len(), 2, "{devices:?}");
    assert!(devices[0].starts_with("cuda:0") && devices[1] == "cpu,cpu", "{devices:?}");
    // Shards of the optimizer are on the host.
    assert_eq!(bytes(&by_rank[0], "optimizer_bytes"), 0);
    assert!(bytes(&by_rank[0], "rank_host_bytes") > 0 && bytes(&whole, "rank_host_bytes") == 0);
}
