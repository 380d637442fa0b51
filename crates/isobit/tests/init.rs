//! `isobit init`, `completions` and `man`: what they write is what the rest of the program takes.

mod model_folder;

use model_folder::{Folder, Shape};

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
    let ran = folder.run(&["train", "run.toml", "--set", "max_steps=2"]);
    ran.says(0, &["note: --set max_steps=2 overrides `num_epochs = 3", "finished after 2 updates"]);
    assert!(folder.has("out/data/final/adapter_model.safetensors"));
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
    assert!(!folder.text("own.toml").contains("[eval]"));
    folder.run(&["train", "own.toml", "--set", "max_steps=2"]).says(0, &["finished after 2 updates"]);
}

#[test]
fn what_is_there_stays() {
    let folder = Folder::new(Shape::TINY);
    folder.put("run.toml", "mine");
    folder.run(&["init", "model", "data.jsonl"]).says(2, &["run.toml is there already", "--force"]);
    assert_eq!(folder.text("run.toml"), "mine");
    folder.run(&["init", "model", "data.jsonl", "--force"]).says(0, &[]);
    assert_ne!(folder.text("run.toml"), "mine");
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
