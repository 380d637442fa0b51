//! What a newcomer tries: the answers name the thing to do next.

use crate::model_folder::{Folder, Shape};

/// `auto` is the device that `devices` marks, and every command says which one it uses.
#[test]
fn auto_is_the_device_that_the_list_marks() {
    let folder = Folder::new(Shape::TINY);
    let devices = folder.run(&["devices", "--json"]).json();
    let marked: Vec<_> = devices.iter().filter(|device| device["auto"] == true).collect();
    assert_eq!(marked.len(), 1, "{devices:?}");
    assert_eq!(marked[0]["ready"], true);
    let generate = ["generate", "--model", "model", "--prompt", "1+1=", "--max-tokens", "1", "--device", "auto"];
    let ran = folder.run(&[&generate[..], &["--json"]].concat());
    assert_eq!(ran.json()[0]["device"], marked[0]["device"]);
    let name = marked[0]["device"].as_str().expect("a name");
    folder.run(&generate).says(0, &[&format!("device: {name}")]);
    assert_eq!(folder.run(&[&generate[..], &["--quiet"]].concat()).err, "");
    let ran = folder.trained("run", &["device=auto", "max_steps=1", "--json"]);
    assert_eq!(ran.json()[0]["device"], marked[0]["device"]);
    let bench = ["bench", "step", "--config", "config.toml", "--set", "device=auto", "--steps", "1", "--json"];
    assert_eq!(folder.run(&bench).json()[0]["device"], marked[0]["device"]);
    folder.run(&["generate", "--model", "model", "--device", "gpu"]).says(2, &["auto, cpu, opencl:N"]);
}

#[test]
fn the_processor_has_memory_and_cores() {
    let devices = Folder::new(Shape::TINY).run(&["devices", "--json"]).json();
    assert!(devices[0]["memory_bytes"].as_u64() > Some(1 << 20), "{}", devices[0]);
    assert!(devices[0]["units"].as_u64() >= Some(1), "{}", devices[0]);
}

/// A run of a full fine-tune stands for its final weights; that of an adapter does not.
#[test]
fn a_run_is_a_model() {
    let folder = Folder::new(Shape::TINY);
    let config = folder.text("config.toml");
    let adapter = config.find("[adapter]").expect("a section");
    folder.put("full.toml", format!("{}[adapter]\ntype = \"full\"\n", &config[..adapter]));
    let ran = folder.run(&["train", "full.toml", "--set", "output_dir=full", "--set", "max_steps=1", "--threads", "1"]);
    ran.says(0, &["device: cpu, 1 thread, "]);
    for command in [
        &["eval", "--data", "data.jsonl"][..],
        &["generate", "--prompt", "1+1=", "--max-tokens", "2"],
        &["data", "check", "--data", "data.jsonl"],
    ] {
        let of = |model| folder.run(&[command, &["--model", model]].concat());
        let (run, last) = (of("full"), of("full/final"));
        assert_eq!((run.code, &run.out), (0, &last.out), "{command:?}: {}", run.err);
    }
    assert_eq!(folder.run(&["plan", "config.toml", "--set", "base_model=full"]).code, 0);
    folder.run(&["init", "full", "data.jsonl", "-o", "next.toml"]).says(0, &["wrote next.toml"]);
    assert!(folder.text("next.toml").contains("base_model = \"full/final\""), "{}", folder.text("next.toml"));

    folder.trained("lora", &["max_steps=1"]);
    let eval = ["eval", "--model", "lora", "--data", "data.jsonl"];
    folder.run(&eval).says(2, &["lora holds an adapter, not a model", "`--adapter`"]);
    let eval = |adapter| folder.run(&["eval", "--model", "model", "--data", "data.jsonl", "--adapter", adapter]);
    assert_eq!(eval("lora").out, eval("lora/final/adapter_model.safetensors").out);
    assert_eq!(eval("lora/final/adapter_model.safetensors").code, 0);
}

#[test]
fn questions_have_answers() {
    let folder = Folder::new(Shape::TINY);
    assert_eq!(folder.run(&["help"]).out, folder.run(&["--help"]).out);
    let help = folder.run(&["help", "bench", "step"]);
    assert_eq!((help.code, help.out), (0, folder.run(&["bench", "step", "--help"]).out));
    let generate = |more: &[&str]| folder.run(&[&["generate", "--model", "model", "--prompt", "1"], more].concat());
    generate(&["--temperature", "-1"]).says(2, &["--temperature -1 is out of range", "hint: give 0"]);
    generate(&["--top-p", "2"]).says(2, &["--top-p 2 is out of range", "hint: "]);
    folder.train("data.jsonl", &[]).says(7, &["output_dir data.jsonl is a file", "hint: name a folder"]);
    let init = ["init", "model", "data.jsonl", "-o", "nowhere/x.toml"];
    folder.run(&init).says(7, &["cannot write nowhere/x.toml: nowhere is not a folder", "hint: create the folder"]);
    folder.trained("run", &["max_steps=4", "save_steps=2"]);
    let arguments = ["train", "config.toml", "--set", "output_dir=run", "--resume-from", "checkpoint-99"];
    folder.run(&arguments).says(2, &["run has no checkpoint-99; it has checkpoint-2, checkpoint-4", "hint: "]);
    let config = folder.text("config.toml");
    folder.put(
        "long.toml",
        config.lines().filter(|line| !line.starts_with("max_seq_length")).collect::<Vec<_>>().join("\n"),
    );
    let long = ["train", "long.toml", "--set", "output_dir=long"];
    folder.run(&long).says(2, &["max_seq_length 1024 is beyond the model's 512", "max_seq_length = 512"]);
    for (key, said) in
        [("bf16=true", "not needed: "), ("load_in_8bit=true", "not yet: "), ("optim=adamw_torch", "AdamW")]
    {
        folder.train("x", &[key]).says(2, &["unknown key", said]);
    }
}

#[test]
fn typos_in_data_are_named() {
    let folder = Folder::new(Shape::TINY);
    folder.put("half.jsonl", "{\"prompt\":\"1+1=\"}\n");
    folder.put("typo.jsonl", "{\"promt\":\"1+1=\",\"completion\":\"2\"}\n");
    let check = |data| folder.run(&["data", "check", "--model", "model", "--data", data]);
    check("half.jsonl").says(3, &["half.jsonl:1: ", "`completion` is missing beside `prompt`"]);
    check("typo.jsonl").says(3, &["typo.jsonl:1: ", "is `promt` meant to be `prompt`?"]);
    let alone = ["data", "check", "--model", "model", "--data", "data.jsonl", "--prompt-field", "question"];
    folder.run(&alone).says(2, &["--completion-field"]);
}

#[test]
fn the_counts_of_a_check_add_up() {
    let folder = Folder::new(Shape::TINY);
    folder.put("mixed.jsonl", folder.text("data.jsonl") + "{\"prompt\":\"1+1=\"}\nnonsense\n");
    let ran = folder.run(&["data", "check", "--model", "model", "--data", "mixed.jsonl"]);
    assert_eq!(ran.code, 3);
    assert!(
        ran.out.contains("42 rows, ") && ran.out.contains("rows       40 of 42: 2 bad, 0 dropped\n"),
        "{}",
        ran.out
    );
    let short = ["data", "check", "--model", "model", "--data", "data.jsonl", "--max-seq-length", "2", "--json"];
    let report = &folder.run(&short).json()[0];
    let count = |key: &str| report[key].as_array().expect("a list").len();
    assert_eq!((count("truncated"), count("bad")), (40, 40), "{report}");
}

/// With few rows `init` holds none out: its config says how to evaluate, and so does the error.
#[test]
fn a_config_without_evaluation_says_what_to_add() {
    let folder = Folder::new(Shape { rows: 8, ..Shape::TINY });
    folder.run(&["init", "model", "data.jsonl", "-o", "run.toml"]).says(0, &[]);
    let config = folder.text("run.toml");
    assert!(config.contains("\n# [eval]\n# path = \"valid.jsonl\""), "{config}");
    folder.run(&["eval", "--config", "run.toml"]).says(2, &["nothing to evaluate on", "val_set_size = 0.05"]);
    folder.put("valid.jsonl", folder.text("data.jsonl"));
    folder.put("run.toml", config.replace("# [eval]", "[eval]").replace("# path = \"valid", "path = \"valid"));
    assert_eq!(folder.run(&["eval", "--config", "run.toml"]).code, 0);
}
