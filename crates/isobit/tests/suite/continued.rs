//! `adapter.resume_from`: a run that starts from an adapter. What it starts from is part of what
//! the run is; runs that start from nothing are what they were.

use crate::model_folder::{Folder, Shape, config_json, names, weights};

/// The first update of a warm-up has a learning rate of zero, so a run of one ends with the adapter
/// it began with; a longer one goes on from there.
#[test]
fn a_run_goes_on_from_an_adapter() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("first", &["max_steps=3"]);
    let weights = |run: &str| std::fs::read(folder.path(run).join("final/adapter_model.safetensors")).expect("read");
    for (output, from) in [("still", "adapter.resume_from=first"), ("also", "lora_model_dir=first/final")] {
        folder.trained(output, &["max_steps=1", from]);
        assert_eq!(weights(output), weights("first"), "{output}");
    }
    let from = "adapter.resume_from=first";
    folder.trained("on", &["max_steps=4", from]);
    folder.trained("new", &["max_steps=4"]);
    assert_ne!(weights("on"), weights("new"));
    // What it names counts, in the difference of two runs and on their page.
    let diff = folder.run(&["diff", "new", "on"]);
    let said = "config adapter.resume_from: - against \"first\" (the contents count, not the path)";
    assert!(diff.code == 1 && diff.out.contains(said), "{}", diff.out);
    assert_eq!(folder.run(&["report", "new", "on", "-o", "page.html"]).code, 0);
    let page = folder.text("page.html").replace("<wbr>", "");
    for key in ["resume_from", "base_model", "path"] {
        assert!(page.contains(&format!("<span class=\"dot\">◐</span> {key}<")), "{key}");
    }
    // Killed and resumed, it is the same run.
    folder.trained("again", &["max_steps=4", from, "save_steps=2"]);
    assert_eq!(weights("again"), weights("on"));
    let other = folder.train("again", &["max_steps=4", "--resume", "adapter.resume_from=new"]);
    other.says(2, &["starting adapter"]);
    folder.train("again", &["max_steps=4", "--resume"]).says(2, &["starting adapter", "none"]);
}

/// Old checkpoints have no such field, and runs without a start still write none.
#[test]
fn other_runs_keep_their_identity() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("plain", &["max_steps=1", "save_steps=1"]);
    folder.trained("on", &["max_steps=1", "save_steps=1", "adapter.resume_from=plain"]);
    let state = |run: &str| folder.text(&format!("{run}/checkpoint-1/state.json"));
    assert!(!state("plain").contains("\"start\"") && state("on").contains("\"start\""));
    assert!(!folder.text("plain/config.resolved.toml").contains("resume_from"));
    assert!(folder.text("on/config.resolved.toml").contains("resume_from = \"plain\""));
}

#[test]
fn an_adapter_that_the_config_does_not_describe_is_refused() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("first", &["max_steps=1"]);
    let from = "adapter.resume_from=first";
    let refused = |more: &[&str], code: i32, parts: &[&str]| {
        folder.train("out", &[&["max_steps=1"], more].concat()).says(code, parts);
        assert!(!folder.has("out"), "{more:?}");
        // The plan has the same answer.
        let sets: Vec<&str> = more.iter().flat_map(|set| ["--set", set]).collect();
        folder.run(&[&["plan", "config.toml"], &sets[..]].concat()).says(code, parts);
    };
    refused(&[from, "lora_r=2"], 2, &["q_proj", "rank 4 and scale 2", "rank 2 and scale 4", "lora_r = 4"]);
    refused(&[from, "lora_alpha=16"], 2, &["lora_alpha = 8"]);
    refused(&[from, "lora_target_modules=[\"q_proj\"]"], 2, &["but the config says none"]);
    let config = folder.text("first/final/adapter_config.json").replace("\"r\": 4", "\"r\": 65");
    std::fs::create_dir(folder.path("wide")).expect("a folder");
    folder.put("wide/adapter_config.json", config);
    refused(
        &["adapter.resume_from=wide"],
        2,
        &["`r` is 65, and ranks are supported up to 64", "train with a rank of 1 to 64"],
    );
    refused(&["adapter.resume_from=nowhere"], 2, &["nowhere"]);
    refused(&["adapter.resume_from=some/adapter"], 2, &["hub"]);
    let path = folder.path("first/final/adapter_model.safetensors");
    let mut bytes = std::fs::read(&path).expect("read");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).expect("written");
    refused(&[from], 8, &["adapter_model.safetensors"]);
}

/// The folder of an adapter is complete: a run that continues it has another one.
#[test]
fn a_run_does_not_begin_in_a_folder_of_weights() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("first", &["max_steps=1"]);
    folder.run(&["export", "merge", "first", "--base", "model", "-o", "merged", "-q"]).says(0, &[]);
    let from = ["max_steps=1", "adapter.resume_from=first/final"];
    let weights = || ["first/final", "merged"].map(|name| names(&folder.path(name)));
    let before = weights();
    for (output, part) in
        [("first/final", "MANIFEST.json"), ("first/final/sub", "would be written into"), ("merged", "MANIFEST.json")]
    {
        folder.train(output, &from).says(2, &[part, "hint: "]);
    }
    std::fs::create_dir(folder.path("peft")).expect("a folder");
    folder.put("peft/adapter_config.json", "{}");
    folder.train("peft", &from).says(2, &["adapter_config.json"]);
    assert_eq!(weights(), before);
    folder.run(&["verify", "first"]).says(0, &[]);
}

/// As `generate` warns: the run goes on, since somebody may want that.
#[test]
fn an_adapter_of_other_weights_is_told() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("first", &["max_steps=1"]);
    let from = ["max_steps=1", "adapter.resume_from=first"];
    let warning = "`adapter.resume_from`: the adapter was trained on a different base";
    assert!(!folder.train("same", &from).err.contains(warning));
    let mut tensors = weights(folder.shape, 1);
    tensors[0].2[9] = 0.5;
    folder.put_model("model", &config_json(folder.shape), &tensors);
    folder.train("other", &from).says(0, &[warning]);
}
