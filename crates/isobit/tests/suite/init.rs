//! `isobit init`, `completions` and `man`: what they write is what the rest of the program takes.

use crate::model_folder::{Folder, Shape};

#[test]
fn the_config_it_writes_trains() {
    let folder = Folder::new(Shape { rows: 60, ..Shape::TINY });
    let ran = folder.run(&["init", "model", "data.jsonl"]);
    ran.says(0, &["prompt+completion: 60 examples", "wrote run.toml"]);
    let text = folder.text("run.toml");
    for part in [
        "base_model = \"model\"",
        "path = \"data.jsonl\"",
        "max_seq_length = 64",
        "val_set_size = 0.05",
        "type = \"lora\"",
        "512 positions",
        "# folder of the model in Hugging Face layout",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(text.lines().all(|line| line.is_empty() || line.starts_with(['[', '#']) || line.contains(" # ")), "{text}");
    // The tiny model fits as it is computed fastest; the slowest way gives the same weights.
    ran.says(0, &["8 rows at a time, checkpointing none: the fastest that leaves a fifth of the memory free"]);
    for part in ["micro_batch_size = 8 ", "gradient_accumulation_steps = 1 ", "gradient_checkpointing = \"none\" "] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let other = [
        "training.micro_batch_size=1",
        "training.gradient_accumulation_steps=8",
        "training.gradient_checkpointing=full",
    ];
    let other: Vec<&str> = other.iter().flat_map(|set| ["--set", set]).collect();
    let slow =
        folder.run(&[&["train", "run.toml", "--set", "max_steps=2", "--set", "output_dir=slow"], &other[..]].concat());
    assert_eq!(slow.code, 0, "{}", slow.err);
    let ran = folder.run(&["train", "run.toml", "--set", "max_steps=2"]);
    ran.says(0, &["note: --set max_steps=2 overrides `num_epochs = 3", "finished after 2 updates"]);
    assert!(folder.has("out/data/final/adapter_model.safetensors"));
    folder.same("out/data", "slow");
}

/// The first settings that fit are written, in the order of their speed; where none does, the
/// smallest with a warning.
#[test]
fn the_config_fits_into_the_memory_there_is() {
    let folder = Folder::new(Shape::TINY);
    folder.put("data.jsonl", format!("{{\"prompt\":\"1\",\"completion\":\"{}\"}}\n", "+23".repeat(160)).repeat(8));
    let mut chosen = Vec::new();
    // What the process needs beside the run, and the fifth that is left free.
    let process = folder.run(&["plan", "config.toml", "--json"]).json()[0]["process_bytes"].as_f64().expect("bytes");
    let process = process / f64::from(1 << 30) / 0.8;
    for memory in [64.0, 0.03 + process, 0.01 + process, 0.006 + process, 0.0001] {
        let memory = &format!("{memory}");
        let ran = folder.run(&["init", "model", "data.jsonl", "--force", "--memory", memory]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        let text = folder.text("run.toml");
        let [rows, times, kept] =
            ["micro_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"].map(|key| {
                let line = text.lines().find(|line| line.starts_with(key)).expect("a key");
                line.split_whitespace().nth(2).expect("a value").to_string()
            });
        assert_eq!(rows.parse::<usize>().expect("rows") * times.parse::<usize>().expect("times"), 8);
        let fits = folder.run(&["plan", "run.toml", "--memory", memory]).code == 0;
        assert_eq!(fits, ran.err.contains("the fastest that leaves a fifth of the memory free"), "{}", ran.err);
        assert_eq!(fits, !ran.err.contains("warning: 1 row at a time, checkpointing full needs"), "{}", ran.err);
        chosen.push(format!("{rows} {kept}"));
    }
    // How much each needs depends on the cores, the order does not.
    let order: Vec<String> = ["none", "selective", "full"]
        .iter()
        .flat_map(|kept| ["8", "4", "2", "1"].map(|rows| format!("{rows} \"{kept}\"")))
        .collect();
    let places: Vec<usize> = chosen.iter().map(|one| order.iter().position(|of| of == one).expect("a split")).collect();
    assert!(places.is_sorted() && places[0] == 0 && places[1..4].iter().any(|place| *place > 0), "{chosen:?}");
    assert_eq!(places[4], order.len() - 1, "nothing fits");
    // The smallest split fits, but leaves less than a fifth free.
    let least = folder.run(&["plan", "run.toml", "--json"]).json()[0]["needed_bytes"].as_f64().expect("bytes");
    let memory = format!("{}B", (least / 0.9) as u64);
    let ran = folder.run(&["init", "model", "data.jsonl", "--force", "--memory", &memory]);
    ran.says(0, &["1 row at a time, checkpointing full: the smallest; it leaves less than a fifth of the memory free"]);
    assert_eq!(folder.run(&["plan", "run.toml", "--memory", &memory]).code, 0);
}

#[test]
fn other_data_and_other_names() {
    let folder = Folder::new(Shape::TINY);
    folder.put("own.jsonl", "{\"q\":\"1+1=\",\"a\":\"2\"}\n".repeat(3));
    folder.run(&["init", "model", "own.jsonl", "-o", "own.toml"]).says(3, &["`q`, `a`", "prompt_field"]);
    assert!(!folder.has("own.toml"));
    let fields = ["--prompt-field", "q", "--completion-field", "a"];
    let ran = folder.run(&[&["init", "model", "own.jsonl", "-o", "own.toml"], &fields[..]].concat());
    ran.says(0, &["named fields: 3 examples"]);
    // Too few rows to hold any out.
    assert!(!folder.text("own.toml").contains("\n[eval]"));
    folder.run(&["train", "own.toml", "--set", "max_steps=2"]).says(0, &["finished after 2 updates"]);
}

#[test]
fn what_is_there_stays() {
    let folder = Folder::new(Shape::TINY);
    let mine = "# mine\nbase_model = \"other\"\n";
    folder.put("run.toml", mine);
    folder.run(&["init", "model", "data.jsonl"]).says(2, &["run.toml already exists", "--force"]);
    assert_eq!(folder.text("run.toml"), mine);
    folder.run(&["init", "model", "data.jsonl", "--force"]).says(0, &[]);
    assert_ne!(folder.text("run.toml"), mine);
    for (model, data, code, part) in [
        ("nowhere", "data.jsonl", 2, "nowhere does not exist"),
        ("model", "nowhere.jsonl", 2, "nowhere.jsonl does not exist"),
        ("data.jsonl", "data.jsonl", 2, "not a folder"),
    ] {
        folder.run(&["init", model, data, "-o", "new.toml"]).says(code, &[part, "hint: "]);
        assert!(!folder.has("new.toml"));
    }
    folder.run(&["init", "model", "data.jsonl", "-o", "no/such/run.toml"]).says(7, &["no/such/run.toml"]);
}

/// Its own inputs too, and what only leads to a config.
#[test]
fn only_a_config_is_overwritten() {
    let folder = Folder::new(Shape::TINY);
    let text = ["data.jsonl", "model/config.json"].map(|name| folder.text(name));
    let forced = |output: &str| folder.run(&["init", "model", "data.jsonl", "--force", "-o", output]);
    for output in ["data.jsonl", "model/config.json", "model", "/dev/full"] {
        forced(output).says(2, &[output, "is not a config", "hint: "]);
    }
    assert_eq!(["data.jsonl", "model/config.json"].map(|name| folder.text(name)), text);
    #[cfg(unix)]
    {
        let config = folder.text("config.toml");
        std::os::unix::fs::symlink("config.toml", folder.path("link.toml")).expect("a link");
        forced("link.toml").says(2, &["link.toml is not a config"]);
        assert_eq!(folder.text("config.toml"), config);
    }
    folder.put("empty.toml", "");
    forced("empty.toml").says(0, &["wrote empty.toml"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_name_that_a_config_cannot_hold_is_refused() {
    use crate::model_folder::finished;
    use std::os::unix::ffi::OsStrExt;
    let folder = Folder::new(Shape::TINY);
    let name = std::ffi::OsStr::from_bytes(b"data\xff.jsonl");
    std::fs::copy(folder.path("data.jsonl"), folder.path(".").join(name)).expect("copied");
    let ran = finished(folder.command(&["init", "model"]).arg(name).output().expect("the program starts"));
    ran.says(2, &["is not UTF-8", "hint: "]);
    assert!(!folder.has("run.toml"));
}

#[test]
fn files_for_shells_and_man() {
    let folder = Folder::new(Shape::TINY);
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ran = folder.run(&["completions", shell]);
        assert!(ran.code == 0 && ran.out.contains("isobit") && ran.out.contains("max-seq-length"), "{shell}");
    }
    folder.run(&["completions", "abacus"]).says(2, &["abacus"]);
    let ran = folder.run(&["man"]);
    assert!(ran.code == 0 && ran.out.contains(".TH isobit") && ran.out.contains("train"), "{}", ran.out);
    assert_eq!(folder.run(&["man", "--folder", "share/man1"]).code, 0);
    for page in ["isobit.1", "isobit-train.1", "isobit-data-check.1"] {
        assert!(folder.text(&format!("share/man1/{page}")).contains(".SH NAME"), "{page}");
    }
    folder.run(&["man", "--folder", "data.jsonl"]).says(7, &["data.jsonl"]);
}
