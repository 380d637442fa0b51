//! Law 8 from the outside: a list of devices divides the layers, and the run's folder is that of
//! one device, byte for byte. What cannot be divided is refused.

use crate::model_folder::{Folder, Shape};
use isobit_conformance::named_devices_or_skips;

/// Ends the config with this section instead of its adapter.
fn adapter(folder: &Folder, section: &str) {
    let config = folder.text("config.toml");
    let at = config.find("[adapter]").expect("a section");
    folder.put("config.toml", format!("{}{section}", &config[..at]));
}

fn full() -> Folder {
    let folder = Folder::new(Shape::TINY);
    adapter(&folder, "[adapter]\ntype = \"full\"\n");
    folder
}

const MICRO: [&str; 2] = ["training.micro_batch_size=1", "gradient_accumulation_steps=8"];

#[test]
fn a_list_gives_the_folder_of_one_device() {
    let experts = |section: &str| {
        let folder = Folder::of_experts();
        folder.put("config.toml", folder.text("config.toml") + section);
        folder
    };
    for folder in [
        Folder::new(Shape::TINY),
        full(),
        experts("[adapter]\nlora_target_modules = [\"q_proj\", \"o_proj\"]\n"),
        experts("[adapter]\ntype = \"full\"\n"),
    ] {
        folder.trained("one", &[]);
        folder.trained("list", &["device=cpu,cpu", "threads=2"]);
        folder.same("one", "list");
        folder.trained("micro", &[&["device=[\"cpu\", \"cpu\"]", "device_map=[1, 1]"], &MICRO[..]].concat());
        folder.same("one", "micro");
    }
}

#[test]
fn other_devices_in_a_list_give_the_same_folder() {
    for (name, gpu) in named_devices_or_skips("device_lists::other_devices_in_a_list_give_the_same_folder") {
        drop(gpu);
        let folder = full();
        folder.trained("one", &[]);
        for (at, list) in [format!("{name},cpu"), format!("cpu,{name}"), format!("{name},{name}")].iter().enumerate() {
            let output = format!("list-{at}");
            folder.trained(&output, &[&format!("device={list}"), "threads=1"]);
            folder.same("one", &output);
        }
    }
}

#[test]
fn a_run_is_resumed_on_another_list() {
    let folder = full();
    folder.trained("one", &["max_steps=12"]);
    for (at, (first, then)) in [("cpu,cpu", "cpu"), ("cpu", "cpu,cpu")].into_iter().enumerate() {
        let output = format!("resumed-{at}");
        folder.trained(&output, &["max_steps=12", &format!("device={first}")]);
        folder.trained(&output, &["max_steps=12", &format!("device={then}"), "--resume-from=checkpoint-6"]);
        folder.same("one", &output);
    }
}

#[test]
fn eval_and_bench_take_a_list() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("out", &[]);
    let eval = |device: &str| {
        let ran = folder.run(&[
            "eval",
            "--model",
            "model",
            "--adapter",
            "out",
            "--data",
            "data.jsonl",
            "--json",
            "--device",
            device,
        ]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        let mut value = ran.json().remove(0);
        assert_eq!(value["device"], device);
        value["device"] = "any".into();
        value
    };
    assert_eq!(eval("cpu,cpu"), eval("cpu"));
    let bench = |device: &str| {
        let ran = folder.run(&[
            "bench",
            "step",
            "--config",
            "config.toml",
            "--set",
            &format!("device={device}"),
            "--steps",
            "1",
            "--json",
        ]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        ran.json().remove(0)["loss"].clone()
    };
    assert_eq!(bench("cpu,cpu"), bench("cpu"));
}

#[test]
fn plan_shows_every_device() {
    let folder = full();
    let ran = folder.run(&["plan", "config.toml", "--device", "cpu,cpu"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    for part in ["the CPU, layer 0:", "the CPU, layer 1:", "with 2 micro-batches in flight", "fits as 1 + 1 layers"] {
        assert!(ran.out.contains(part), "`{part}` is missing in: {}", ran.out);
    }
    let plan =
        |memory: &str| folder.run(&["plan", "config.toml", "--json", "--device", "cuda:0,hip:0", "--memory", memory]);
    let ran = plan("1GiB,1");
    let value = &ran.json()[0];
    assert_eq!((ran.code, &value["fits"], value["devices"].as_array().map(Vec::len)), (0, &true.into(), Some(2)));
    let number = |value: &serde_json::Value| value.as_u64().expect("bytes");
    let total = |at: usize| number(&value["devices"][at]["total_bytes"]);
    assert_eq!(number(&value["memories"][0]["needed_bytes"]), total(0));
    assert!(number(&value["transfer_host_bytes"]) > 0);
    let one = folder.run(&["plan", "config.toml", "--json", "--device", "cuda:0", "--memory", "1"]);
    let one = number(&one.json()[0]["total_bytes"]);
    assert!(total(0) < one && total(1) < one && total(0) + total(1) > one, "{} and {} of {one}", total(0), total(1));
    // One byte less than the second card needs.
    let gib = |bytes: u64| format!("{:.12}", bytes as f64 / f64::from(1 << 30));
    let ran = plan(&format!("{},{}", gib(total(0) + 1), gib(total(1) - 4096)));
    ran.says(4, &["this run does not fit as 1 + 1 layers: hip:0", "hint: "]);
}

/// Layers move to where memory is left; the last device has none to spare.
#[test]
fn layers_go_where_memory_is() {
    let folder = Folder::new(Shape::TINY);
    let config = folder.text("model/config.json").replace("\"num_hidden_layers\":2", "\"num_hidden_layers\":8");
    assert!(config.contains("\"num_hidden_layers\":8"), "{config}");
    std::fs::create_dir(folder.path("alone")).expect("a folder");
    folder.put("alone/config.json", config);
    let plan = |memory: &str| {
        let set = ["--set", "base_model=alone", "--device", "cuda:0,hip:0", "--memory", memory];
        folder.run(&[&["plan", "config.toml", "--json"], &set[..]].concat())
    };
    let ran = plan("1");
    ran.says(0, &["holds no weights: planned from its config"]);
    let value = &ran.json()[0];
    let of = |value: &serde_json::Value, at: usize| value["devices"][at]["layers"].as_u64();
    assert_eq!([of(value, 0), of(value, 1)], [Some(4), Some(4)]);
    let second = value["devices"][1]["total_bytes"].as_u64().expect("bytes");
    let ran = plan(&format!("1,{:.12}", (second - 4096) as f64 / f64::from(1 << 30)));
    let value = &ran.json()[0];
    assert_eq!((ran.code, [of(value, 0), of(value, 1)]), (0, [Some(5), Some(3)]));
}

#[test]
fn what_cannot_be_divided_is_refused() {
    let folder = Folder::new(Shape::TINY);
    let refused = |sets: &[&str], code: i32, parts: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        folder.run(&[&["train", "config.toml"], &sets[..]].concat()).says(code, parts);
        assert!(!folder.has("out"), "nothing is written");
    };
    refused(&["device=cpu,cpu,cpu"], 2, &["3 devices are listed, but the model has 2 layers"]);
    refused(&["device=cpu,cpu", "device_map=[1, 2]"], 2, &["divides 3 layers, but the model has 2"]);
    refused(&["device=cpu,cpu", "device_map=[2]"], 2, &["every device of `device` one number"]);
    refused(&["device=cpu,cpu", "device_map=[2, 0]"], 2, &["at least one layer"]);
    refused(&["device=cpu,cpu", "device_map={ cpu = 2 }"], 2, &["listed twice"]);
    refused(&["device=cpu,opencl:0", "device_map={ cpu = 1, \"cuda:0\" = 1 }"], 2, &["every device of `device`"]);
    refused(&["device_map=[1, 1]"], 2, &["`device` is not a list"]);
    refused(&["device=cpu,auto"], 2, &["auto cannot be listed"]);
    refused(&["device=cpu,opencl:999"], 6, &["opencl:999", "isobit devices"]);
    let ran = folder.run(&["train", "config.toml", "--device", "cpu,opencl:999", "--no-plan"]);
    ran.says(6, &["opencl:999", "isobit devices"]);
    for command in ["generate", "chat"] {
        folder.run(&[command, "--model", "model", "--device", "cpu,cpu"]).says(2, &["`cpu,cpu` is a list of devices"]);
    }
    let bench = ["bench", "step", "--model", "tiny", "--device", "cpu,cpu", "--breakdown"];
    folder.run(&bench).says(2, &["one device only"]);
}
