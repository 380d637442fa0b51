//! `isobit diff` from the outside: what it prints for equal and for differing files and folders,
//! and with which exit code.

use crate::model_folder::{Folder, Shape};
use isobit_proof::safetensors::{Dtype, Entry, write};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

const ONE: [u8; 4] = 1.0_f32.to_le_bytes();
const NEXT: [u8; 4] = (1.0_f32.to_bits() + 1).to_le_bytes();

/// Exit code, standard output and standard error.
fn diff(folder: &Path, arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_isobit"))
        .current_dir(folder)
        .arg("diff")
        .args(arguments)
        .output()
        .expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    let (out, err) = (text(output.stdout), text(output.stderr));
    assert!(!err.contains("panicked"), "{err}");
    (output.status.code().expect("no signal"), out, err)
}

fn float<'a>(name: &'a str, shape: &'a [usize], bytes: &'a [u8]) -> Entry<'a> {
    Entry { name, dtype: Dtype::F32, shape, bytes }
}

fn put(path: &Path, tensors: &[Entry]) {
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("folder");
    write(path, &BTreeMap::new(), tensors).expect("written");
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).expect("one JSON object")
}

#[test]
fn equal_files_are_one_line_and_exit_0() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    put(&folder.join("a.safetensors"), &[float("w", &[1], &ONE)]);
    put(&folder.join("b.safetensors"), &[float("w", &[1], &ONE)]);
    let equal = (0, "max=0 nonzero=0\n".to_string(), String::new());
    assert_eq!(diff(folder, &["a.safetensors", "b.safetensors"]), equal);
    let (code, out, _) = diff(folder, &["a.safetensors", "b.safetensors", "--json"]);
    let report = json(&out);
    assert_eq!((code, &report["schema"], &report["equal"]), (0, &"isobit.diff/1".into(), &true.into()));
    assert_eq!((&report["max"], &report["nonzero"], &report["tensor_count"]), (&0.0.into(), &0.into(), &1.into()));
}

#[test]
fn every_differing_tensor_has_a_line() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    let [mut one, mut other] = [[ONE; 6].concat(), [ONE; 6].concat()];
    other[16..20].copy_from_slice(&NEXT);
    let half = Entry { name: "half", dtype: Dtype::Bf16, shape: &[1], bytes: &[0x80, 0x3f] };
    let a =
        [float("w", &[2, 3], &one), float("shape", &[1, 1], &ONE), float("half", &[1], &ONE), float("a", &[1], &ONE)];
    let b = [float("w", &[2, 3], &other), float("shape", &[1], &ONE), half, float("b\u{1b}", &[1], &ONE)];
    put(&folder.join("a.safetensors"), &a);
    put(&folder.join("b.safetensors"), &b);
    let (code, out, err) = diff(folder, &["a.safetensors", "b.safetensors"]);
    let expected = "\
max=1.1920928955078125e-7 nonzero=1 ulps=1 compared=2 of 5 tensors=4 of 5
a: only in A
b\\u{1b}: only in B
half: max=0 nonzero=0 of 1 (F32 against BF16, by value)
shape: shape [1, 1] against [1]
w: max=1.1920928955078125e-7 nonzero=1 of 6 ulps=1 first=[1, 1] 1 (0x3f800000) against 1.0000001192092896 (0x3f800001)
";
    assert_eq!((code, out.as_str(), err.as_str()), (1, expected, ""));
    for threads in ["1", "7"] {
        assert_eq!(diff(folder, &["a.safetensors", "b.safetensors", "--threads", threads]).1, expected);
    }

    // A number against a NaN, and JSON, which has no infinity.
    one[0..4].copy_from_slice(&f32::NAN.to_le_bytes());
    put(&folder.join("a.safetensors"), &[float("w", &[2, 3], &one)]);
    put(&folder.join("b.safetensors"), &[float("w", &[2, 3], &other)]);
    let (code, out, _) = diff(folder, &["a.safetensors", "b.safetensors", "--json"]);
    let report = json(&out);
    assert_eq!((code, &report["equal"], &report["max"]), (1, &false.into(), &"inf".into()));
    let line = &report["tensors"][0];
    assert_eq!((&line["name"], &line["kind"], &line["nan"]), (&"w".into(), &"values".into(), &1.into()));
    assert_eq!((&line["nonzero"], &line["ulps"]), (&2.into(), &1.into()));
    assert_eq!((&line["first"]["index"][1], &line["first"]["a"]["hex"]), (&0.into(), &"0x7fc00000".into()));
}

#[test]
fn two_formats_of_the_same_numbers_are_equal_with_a_note() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    let half = Entry { name: "w", dtype: Dtype::F16, shape: &[1], bytes: &[0x00, 0x3c] };
    put(&folder.join("a.safetensors"), &[float("w", &[1], &ONE)]);
    put(&folder.join("b.safetensors"), &[half]);
    let (code, out, _) = diff(folder, &["a.safetensors", "b.safetensors"]);
    assert_eq!((code, out.as_str()), (0, "max=0 nonzero=0\nw: max=0 nonzero=0 of 1 (F32 against F16, by value)\n"));
}

#[test]
fn adapters_are_compared_with_their_config() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    for (name, config) in [
        ("a", r#"{"r": 8, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 16}"#),
        ("b", r#"{"lora_alpha": 16.0, "r": 8, "target_modules": ["v_proj", "q_proj"]}"#),
        ("c", r#"{"r": 8, "target_modules": ["q_proj"], "lora_alpha": 32, "extra": null}"#),
    ] {
        put(&folder.join(name).join("adapter_model.safetensors"), &[float("w", &[1], &ONE)]);
        std::fs::write(folder.join(name).join("adapter_config.json"), config).expect("written");
    }
    assert_eq!(diff(folder, &["a", "b"]).0, 0);
    let expected = "\
compared=1 of 1 tensors=0 of 1 files=1
adapter_config.json extra: absent against null
adapter_config.json lora_alpha: 16 against 32
adapter_config.json target_modules[1]: \"v_proj\" against absent
";
    assert_eq!(diff(folder, &["a", "c"]), (1, expected.to_string(), String::new()));
    assert_eq!(diff(folder, &["a/adapter_model.safetensors", "c"]).0, 0, "against a file, only tensors count");
    assert_eq!(json(&diff(folder, &["a", "c", "--json"]).1)["json"][1]["key"], "lora_alpha");
}

#[test]
fn runs_checkpoints_and_sharded_models_are_found() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    let [w, v] = [float("w", &[1], &ONE), float("v", &[1], &NEXT)];
    put(&folder.join("run/final/adapter_model.safetensors"), &[w]);
    put(&folder.join("checkpoint/adapter_model.safetensors"), &[w]);
    put(&folder.join("checkpoint/optimizer.safetensors"), &[v]);
    let (code, out, _) = diff(folder, &["run", "checkpoint"]);
    assert_eq!((code, out.as_str()), (1, "compared=1 of 1 tensors=0 of 1 files=1\noptimizer.safetensors: only in B\n"));
    assert_eq!(diff(folder, &["run", "checkpoint/adapter_model.safetensors"]).0, 0);
    put(&folder.join("other/adapter_model.safetensors"), &[w]);
    put(&folder.join("other/optimizer.safetensors"), &[float("v", &[1], &ONE)]);
    let (code, out, _) = diff(folder, &["checkpoint", "other"]);
    assert_eq!(code, 1);
    assert!(out.contains("\noptimizer v: max=1.1920928955078125e-7 nonzero=1 of 1 ulps=1"), "{out}");

    put(&folder.join("single/model.safetensors"), &[w, v]);
    put(&folder.join("sharded/model-00001-of-00002.safetensors"), &[w]);
    put(&folder.join("sharded/model-00002-of-00002.safetensors"), &[v]);
    let index = r#"{"metadata":{},"weight_map":{"w":"model-00001-of-00002.safetensors","v":"model-00002-of-00002.safetensors"}}"#;
    std::fs::write(folder.join("sharded/model.safetensors.index.json"), index).expect("written");
    assert_eq!(diff(folder, &["single", "sharded"]), (0, "max=0 nonzero=0\n".to_string(), String::new()));
}

/// A run folder as `isobit train` leaves it: metrics, perhaps final weights, checkpoints.
fn put_run(folder: &Path, losses: &[f64], checkpoints: &[u64], finished: bool) {
    std::fs::create_dir_all(folder).expect("folder");
    for step in checkpoints {
        put(&folder.join(format!("checkpoint-{step}/adapter_model.safetensors")), &[float("w", &[1], &ONE)]);
    }
    if finished {
        let last = if losses.ends_with(&[1.0]) { ONE } else { NEXT };
        put(&folder.join("final/adapter_model.safetensors"), &[float("w", &[1], &last)]);
    }
    let line = |(index, loss): (usize, &f64)| {
        let (step, bits) = (index + 1, loss.to_bits());
        format!(
            "{{\"schema\":\"isobit.metrics/1\",\"step\":{step},\"loss\":{loss:?},\"loss_bits\":\"{bits:016x}\",\"timing\":{{\"seconds\":{:?}}}}}\n",
            folder.as_os_str().len()
        )
    };
    let text: String = losses.iter().enumerate().map(line).collect();
    std::fs::write(folder.join("metrics.jsonl"), text).expect("written");
}

#[test]
fn two_runs_part_at_a_step() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    put_run(&folder.join("a"), &[3.0, 2.0, 1.0], &[2], true);
    put_run(&folder.join("the-same"), &[3.0, 2.0, 1.0], &[2], true);
    put_run(&folder.join("other"), &[3.0, 2.5, 1.5], &[2], true);
    put_run(&folder.join("short"), &[3.0, 2.0], &[2], false);
    put_run(&folder.join("shorter"), &[3.0], &[], false);
    assert_eq!(diff(folder, &["a", "the-same"]), (0, "max=0 nonzero=0\n".to_string(), String::new()));
    let expected = "\
max=1.1920928955078125e-7 nonzero=1 ulps=1 tensors=1 of 1 first_step=2
first differing step 2: loss 2.0 against 2.5
w: max=1.1920928955078125e-7 nonzero=1 of 1 ulps=1 first=[0] 1 (0x3f800000) against 1.0000001192092896 (0x3f800001)
";
    assert_eq!(diff(folder, &["a", "other"]), (1, expected.to_string(), String::new()));
    let report = json(&diff(folder, &["a", "other", "--json"]).1);
    let first = serde_json::json!({ "step": 2, "same_until": 1, "field": "loss", "a": 2.0, "b": 2.5 });
    assert_eq!((&report["run"]["first_difference"], &report["run"]["steps_b"]), (&first, &3.into()));
    let expected = "\
compared=1 of 1 tensors=0 of 1
steps: 3 against 2, the same as far as both go
tensors of checkpoint-2: one of the runs has no final ones
";
    assert_eq!(diff(folder, &["a", "short"]), (1, expected.to_string(), String::new()));
    let (code, out, _) = diff(folder, &["a", "shorter"]);
    assert_eq!(code, 1);
    assert!(out.contains("steps: 3 against 1, ") && out.contains("share no checkpoint"), "{out}");
    assert_eq!(json(&diff(folder, &["a", "shorter", "--json"]).1)["run"]["steps_b"], 1);
    // Against a folder of weights, the run stands for its final ones.
    assert_eq!(diff(folder, &["a", "the-same/final"]).0, 0);
    std::fs::write(folder.join("other/metrics.jsonl"), "{}\n").expect("written");
    let (code, _, err) = diff(folder, &["a", "other"]);
    assert!(code == 8 && err.contains("other/metrics.jsonl is malformed: line 1"), "{err}");
}

#[test]
fn what_cannot_be_compared_does_not_read_as_equal() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    put(&folder.join("adapter/adapter_model.safetensors"), &[float("q.lora_A.weight", &[1], &ONE)]);
    put(&folder.join("base/model.safetensors"), &[float("model.embed_tokens.weight", &[1], &ONE)]);
    let expected = "\
compared=0 of 2 tensors=2 of 2
A holds an adapter, B a model
model.embed_tokens.weight: only in B
q.lora_A.weight: only in A
";
    assert_eq!(diff(folder, &["adapter", "base"]), (1, expected.to_string(), String::new()));
    let report = json(&diff(folder, &["adapter", "base", "--json"]).1);
    assert_eq!((&report["kinds"][0], &report["tensors_compared"]), (&"adapter".into(), &0.into()));
}

/// Two runs of the tiny model that log every fifth step.
#[test]
fn runs_name_the_keys_and_the_steps_between_which_they_part() {
    let folder = Folder::new(Shape::TINY);
    let five = ["max_steps=5", "logging_steps=5", "eval_steps=5"];
    folder.trained("a", &five);
    folder.trained("b", &[&five[..], &["data_workers=2", "learning_rate=1e-4"]].concat());
    let ran = folder.run(&["diff", "a", "b"]);
    let lines: Vec<&str> = ran.out.lines().skip(1).collect();
    assert!(lines[0].starts_with("first difference between steps 1 and 5 (logged every 5): loss "), "{}", ran.out);
    // The chain has every update.
    assert_eq!(lines[1], "the chains diverge at update 2: learning rate", "{}", ran.out);
    assert!(lines[2].starts_with("config training.learning_rate: "), "{}", ran.out);
    assert!(lines[2].ends_with(" against 0.0001"), "{}", ran.out);
    assert_eq!(lines[3], "config data_workers: 1 against 2 (does not affect the weights)", "{}", ran.out);
    assert!(!ran.out.contains("output_dir"), "{}", ran.out);
    assert!(ran.out.lines().next().is_some_and(|first| first.ends_with(" first_step=1..5")), "{}", ran.out);
    let report = json(&folder.run(&["diff", "a", "b", "--json"]).out);
    assert_eq!(report["run"]["config"][0]["affects_weights"], true);
}

#[test]
fn refusals_have_their_exit_codes() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    put(&folder.join("a.safetensors"), &[float("w", &[1], &ONE)]);
    std::fs::create_dir(folder.join("empty")).expect("folder");
    let whole = std::fs::read(folder.join("a.safetensors")).expect("read");
    std::fs::write(folder.join("cut.safetensors"), &whole[..whole.len() - 1]).expect("written");
    std::fs::write(folder.join("text.safetensors"), "not a tensor in sight").expect("written");
    let cases = [
        ("none.safetensors", 2, "none.safetensors does not exist"),
        ("empty", 2, "empty holds no safetensors file"),
        ("cut.safetensors", 8, "cut.safetensors is malformed: the tensors need 4 bytes of data, but the file has 3"),
        ("text.safetensors", 8, "text.safetensors is malformed: its header would be"),
    ];
    for (name, expected_code, expected) in cases {
        for arguments in [["a.safetensors", name], [name, "a.safetensors"]] {
            let (code, out, err) = diff(folder, &arguments);
            assert_eq!((code, out.as_str()), (expected_code, ""), "{err}");
            assert!(err.starts_with("error: ") && err.contains(expected) && err.contains("hint: "), "{err}");
        }
    }
    assert_eq!(diff(folder, &["a.safetensors"]).0, 2);

    // Sizes that overflow but for a zero.
    for (name, dtype) in [("x", "F32"), ("y", "BF16")] {
        let header = format!(r#"{{"w":{{"dtype":"{dtype}","shape":[{0},{0},0],"data_offsets":[0,0]}}}}"#, u64::MAX);
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        std::fs::write(folder.join(name), bytes).expect("written");
    }
    assert_eq!(diff(folder, &["x", "y"]).0, 0);
}

#[test]
fn many_tensors_in_the_order_of_their_layers() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    let names: Vec<String> = (0..30).map(|layer| format!("layers.{layer}.w")).collect();
    for (file, value) in [("a.safetensors", &ONE), ("b.safetensors", &NEXT)] {
        put(&folder.join(file), &names.iter().map(|name| float(name, &[1], value)).collect::<Vec<_>>());
    }
    let (code, out, _) = diff(folder, &["a.safetensors", "b.safetensors"]);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!((code, lines.len()), (1, 22), "{out}");
    assert!(lines[0].ends_with("tensors=30 of 30"), "{out}");
    for (line, name) in lines[1..21].iter().zip(&names) {
        assert!(line.starts_with(&format!("{name}: max=")), "{line}");
    }
    assert_eq!(lines[21], "10 more tensors: `isobit diff --all` prints them");
    let (_, out, _) = diff(folder, &["a.safetensors", "b.safetensors", "--all"]);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 31, "{out}");
    for (line, name) in lines[1..].iter().zip(&names) {
        assert!(line.starts_with(&format!("{name}: max=")), "{line}");
    }
    let (_, out, _) = diff(folder, &["a.safetensors", "b.safetensors", "--json"]);
    assert_eq!(json(&out)["tensors"].as_array().map(Vec::len), Some(30));
}
