//! The record of a run: the same chain whatever computed it, and every changed byte of what a run
//! leaves is found and named.

use crate::model_folder::{Folder, Shape, names};
use isobit_proof::chain::Chain;
use isobit_proof::receipt::Receipt;
use std::path::{Path, PathBuf};

fn receipt(folder: &Folder, run: &str) -> Receipt {
    Receipt::read(&folder.path(run)).expect("a receipt")
}

/// Runs that save and evaluate in between.
pub(crate) const STEPS: [&str; 3] = ["max_steps=6", "save_steps=2", "eval_steps=3"];

pub(crate) fn trained(adapter: Option<&str>) -> Folder {
    let folder = Folder::new(Shape::TINY);
    if let Some(adapter) = adapter {
        let config = folder.text("config.toml");
        let end = config.find("[adapter]").expect("a section");
        folder.put("config.toml", format!("{}[adapter]\n{adapter}\n", &config[..end]));
    }
    folder.trained("run", &STEPS);
    folder
}

/// Every file below a folder, relative to it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for name in names(folder) {
        let path = folder.join(&name);
        if path.is_dir() {
            all.extend(files(&path).into_iter().map(|inner| Path::new(&name).join(inner)));
        } else {
            all.push(name.into());
        }
    }
    all
}

#[test]
fn equal_runs_have_equal_chains() {
    for adapter in [None, Some("type = \"full\"")] {
        let folder = trained(adapter);
        let (chain, made) = (folder.text("run/chain.jsonl"), receipt(&folder, "run").made);
        assert_eq!((made.updates, made.finished, chain.lines().count()), (6, true, 7));
        let others: [&[&str]; 5] = [
            &["micro_batch_size=1", "gradient_accumulation_steps=8"],
            &["threads=2", "gradient_checkpointing=none"],
            &["device=[\"cpu\",\"cpu\"]"],
            &["save_steps=5", "logging_steps=4", "save_dtype=bfloat16"],
            &["base_model=moved"],
        ];
        std::fs::rename(folder.path("model"), folder.path("moved")).expect("renamed");
        std::os::unix::fs::symlink("moved", folder.path("model")).expect("linked");
        for (number, other) in others.into_iter().enumerate() {
            let output = format!("other-{number}");
            folder.trained(&output, &[&STEPS[..], other].concat());
            assert!(folder.text(&format!("{output}/chain.jsonl")) == chain, "{other:?}");
            assert_eq!(receipt(&folder, &output).made, made, "{other:?}");
            let [whole, last] = [&output, &format!("{output}/final")].map(|place| receipt(&folder, place));
            assert_eq!(last, whole.of_result(), "{other:?}");
            // The digest also covers the segments and the files of the result: a base of another
            // name is named there.
            let is_same = whole.digest == receipt(&folder, "run").digest;
            assert_eq!(is_same, number < 3 || (number == 4 && adapter.is_some()), "{other:?}");
            folder.run(&["verify", &output]).says(0, &[]);
        }
        // Resumed from the middle, and from a checkpoint before the last.
        folder.trained("run", &[&STEPS[..], &["--resume-from=checkpoint-2"]].concat());
        assert!(folder.text("run/chain.jsonl") == chain);
        assert_eq!(receipt(&folder, "run").made, made);
        folder.run(&["verify", "run"]).says(0, &[]);
        // Another run has another chain, from its first line on.
        folder.trained("seed", &[&STEPS[..], &["seed=8"]].concat());
        let other = folder.text("seed/chain.jsonl");
        assert!(other.lines().zip(chain.lines()).all(|(a, b)| a != b));
    }
}

/// Bytes all over every covered file, by name.
#[test]
fn every_changed_byte_is_found() {
    let folder = trained(None);
    let verified = folder.run(&["verify", "run", "--model", "model", "--data", "data.jsonl"]);
    assert_eq!((verified.code, verified.err.as_str()), (0, ""), "{}", verified.out);
    assert!(verified.out.contains("6 updates, 4 checkpoints"), "{}", verified.out);
    let uncovered = ["LOCK"];
    for file in files(&folder.path("run")) {
        let name = file.display().to_string();
        if uncovered.contains(&name.as_str()) {
            continue;
        }
        let path = folder.path("run").join(&file);
        let whole = std::fs::read(&path).expect("read");
        for at in [0, whole.len() / 3, whole.len() / 2, whole.len() - 1] {
            let mut bad = whole.clone();
            bad[at] ^= 1;
            std::fs::write(&path, &bad).expect("written");
            let found = folder.run(&["verify", "run"]);
            assert_eq!(found.code, 8, "{name} at {at}: {}", found.out);
            assert!(found.out.contains(&format!("run/{name}: ")), "{name} at {at}: {}", found.out);
        }
        std::fs::remove_file(&path).expect("removed");
        let found = folder.run(&["verify", "run"]);
        assert!(found.code == 8 && found.out.contains(&name), "{name}: {}", found.out);
        std::fs::write(&path, &whole).expect("written");
    }
    for extra in ["run/notes.txt", "run/checkpoint-4/more", "run/final/more"] {
        folder.put(extra, "x");
        let found = folder.run(&["verify", "run"]);
        assert!(found.code == 8 && found.out.contains(extra), "{}", found.out);
        std::fs::remove_file(folder.path(extra)).expect("removed");
    }
    folder.run(&["verify", "run"]).says(0, &[]);
    folder.run(&["verify", "run/final", "--model", "model", "--data", "data.jsonl"]).says(0, &[]);
}

/// What a run has not finished writing is not called damaged.
#[test]
fn a_run_that_is_being_written_is_not_damaged() {
    let folder = trained(None);
    let process = format!("run is in use by process {}", std::process::id());
    let lock = isobit_proof::Lock::acquire(&folder.path("run")).expect("nobody holds it");
    let intact = folder.run(&["verify", "run"]);
    intact.says(0, &[]);
    assert!(intact.out.contains(&process) && intact.out.contains("verified: "), "{}", intact.out);
    let chain = folder.text("run/chain.jsonl");
    for half in [&chain[..10], ""] {
        folder.put("run/chain.jsonl", half);
        folder.run(&["verify", "run"]).says(2, &[&process, "verify one of its checkpoints"]);
    }
    folder.run(&["verify", "run/checkpoint-4"]).says(0, &[]);
    drop(lock);
    assert_eq!(folder.run(&["verify", "run"]).code, 8);

    std::fs::create_dir(folder.path("killed")).expect("created");
    for name in ["chain.jsonl", "metrics.jsonl", "config.resolved.toml"] {
        let text = if name == "chain.jsonl" { chain.clone() } else { folder.text(&format!("run/{name}")) };
        folder.put(&format!("killed/{name}"), text);
    }
    folder.run(&["verify", "killed"]).says(2, &["killed has saved nothing yet", "verify it after it has saved"]);
    std::fs::create_dir(folder.path("killed/final")).expect("created");
    assert_eq!(folder.run(&["verify", "killed"]).code, 8);
}

/// Flips a bit of `most` bytes of every covered file, spread evenly, and returns how many flips
/// were found in the file itself. All must be.
fn flipped(folder: &Folder, most: usize) -> usize {
    let run = folder.path("run");
    let mut count = 0;
    for file in files(&run).into_iter().filter(|file| file != Path::new("LOCK")) {
        let path = run.join(&file);
        let whole = std::fs::read(&path).expect("read");
        let step = whole.len().div_ceil(most).max(1);
        for at in (0..whole.len()).step_by(step) {
            let mut bad = whole.clone();
            bad[at] ^= 1 << (at % 8);
            std::fs::write(&path, &bad).expect("written");
            let found = isobit_proof::verify::verify(&run).expect("verified").findings;
            assert!(found.iter().any(|finding| finding.path == path), "{} at {at}: {found:?}", file.display());
            count += 1;
        }
        std::fs::write(&path, &whole).expect("written");
    }
    assert_eq!(isobit_proof::verify::verify(&run).expect("verified").findings, []);
    count
}

#[test]
fn no_flipped_bit_escapes() {
    assert!(flipped(&trained(None), 12) > 200);
}

/// Consistent lies: what was changed together with the checksums that cover it.
#[test]
fn an_edited_record_is_found_where_it_was_edited() {
    let folder = trained(None);
    let says = |parts: &[&str]| {
        let found = folder.run(&["verify", "run"]);
        assert_eq!(found.code, 8, "{}", found.out);
        for part in parts {
            assert!(found.out.contains(part), "`{part}` in {}", found.out);
        }
    };
    // A receipt of another end, with its own digest and checksum right.
    let text = folder.text("run/receipt.json");
    let mut edited = receipt(&folder, "run");
    edited.made.updates = 5;
    edited.digest = edited.computed_digest();
    edited.write(&folder.path("run")).expect("written");
    says(&["receipt.json: its link of update 5 is not that of the chain"]);
    folder.put("run/receipt.json", &text);
    let mut edited = receipt(&folder, "run");
    edited.made.config.insert("seed".to_string(), "9".to_string());
    edited.digest = edited.computed_digest();
    edited.write(&folder.path("run")).expect("written");
    says(&["run/final/receipt.json: it is not the receipt of this run"]);
    folder.put("run/receipt.json", &text);

    // Two lines of the metrics change places.
    let metrics = folder.text("run/metrics.jsonl");
    let mut lines: Vec<&str> = metrics.lines().collect();
    lines.swap(1, 2);
    folder.put("run/metrics.jsonl", lines.join("\n") + "\n");
    says(&["metrics.jsonl: line 2: "]);
    folder.put("run/metrics.jsonl", &metrics);

    // Weights with a manifest that fits them.
    let path = folder.path("run/checkpoint-4/adapter_model.safetensors");
    let mut bytes = std::fs::read(&path).expect("read");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).expect("written");
    let checkpoint = folder.path("run/checkpoint-4");
    let old = isobit_proof::Manifest::read(&checkpoint).expect("a manifest");
    let new = isobit_proof::Manifest::of(&checkpoint, old.files.keys().map(String::as_str)).expect("made");
    isobit_proof::Manifest { run: old.run, base: old.base, ..new }.write(&checkpoint).expect("written");
    says(&["run/checkpoint-4/MANIFEST.json: the receipt's hash of it is"]);
    // A replay names the update, the tensor and the element.
    let found = folder.run(&["replay", "run", "--steps", "3..6", "-q"]);
    assert_eq!(found.code, 1, "{}{}", found.out, found.err);
    assert!(found.out.contains("update 4: the chain agrees, but checkpoint-4 holds other numbers"), "{}", found.out);
    assert!(found.out.contains("replayed from checkpoint-2: updates 3 to 6 agree with the chain"), "{}", found.out);
    assert!(found.out.contains("recorded, ") && found.out.contains("(0x"), "{}", found.out);
    // From the changed checkpoint on, its weights are not those of the chain.
    let found = folder.run(&["replay", "run", "--steps", "5..6", "-q"]);
    let named = found.out.contains("checkpoint-4, where the replay begins: its weights are not");
    assert!(found.code == 1 && named, "{}{}", found.out, found.err);
    // With its hash in the receipt changed too, its digests are not those of the chain.
    let mut edited = receipt(&folder, "run");
    let hash = isobit_proof::Hash::of_file(&checkpoint.join("MANIFEST.json")).expect("read");
    edited.folder.as_mut().expect("a record").checkpoints.insert("checkpoint-4".to_string(), hash);
    edited.write(&folder.path("run")).expect("written");
    says(&["checkpoint-4/adapter_model.safetensors: its weights are not those of update 4 in the chain"]);
}

/// What `verify` advises for damaged files of a run brings them back.
#[test]
fn the_advice_of_verify_works() {
    let folder = trained(None);
    let whole = std::fs::read(folder.path("run/receipt.json")).expect("read");
    let cases = [
        ("final/adapter_model.safetensors", "--resume"),
        ("receipt.json", "--resume"),
        ("checkpoint-6/optimizer.safetensors", "--resume-from=checkpoint-4"),
    ];
    for (name, resume) in cases {
        crate::forgery::poke(&folder, &format!("run/{name}"));
        let found = folder.run(&["verify", "run"]);
        let advice = "hint: put the files back from a copy; or `train --resume` writes final/ and the receipt again";
        assert!(found.code == 8 && found.err.contains(advice), "{name}: {}{}", found.out, found.err);
        folder.trained("run", &[&STEPS[..], &[resume]].concat());
        folder.run(&["verify", "run"]).says(0, &[]);
        assert!(std::fs::read(folder.path("run/receipt.json")).expect("read") == whole, "{name}");
    }
    // No file of the run is to blame for other data.
    let found = folder.run(&["verify", "run", "--data", "config.toml"]);
    assert!(found.code == 8 && !found.err.contains("hint: "), "{}{}", found.out, found.err);
    crate::forgery::poke(&folder, "run/final/adapter_model.safetensors");
    let found = folder.run(&["verify", "run/final"]);
    assert!(found.code == 8 && found.err.contains("hint: copy the folder again"), "{}", found.err);
}

/// Metrics and chain are read before anything is cut or moved.
#[test]
fn a_refused_resume_changes_nothing() {
    let folder = trained(None);
    let resume = [&STEPS[..], &["--resume-from=checkpoint-2"]].concat();
    let state = || {
        let all = files(&folder.path("run")).into_iter().filter(|name| !name.ends_with(isobit_proof::Lock::NAME));
        all.map(|name| (std::fs::read(folder.path("run").join(&name)).expect("read"), name)).collect::<Vec<_>>()
    };
    for (name, line) in [("chain.jsonl", 2), ("metrics.jsonl", 1)] {
        let text = folder.text(&format!("run/{name}"));
        let mut lines: Vec<&str> = text.lines().collect();
        lines.remove(line);
        folder.put(&format!("run/{name}"), lines.join("\n") + "\n");
        let before = state();
        folder.train("run", &resume).says(8, &[name, "does not match its record", "--resume-from checkpoint-N"]);
        assert!(state() == before, "{name}");
        folder.put(&format!("run/{name}"), &text);
    }
    let chain = folder.text("run/chain.jsonl");
    std::fs::remove_file(folder.path("run/chain.jsonl")).expect("removed");
    let before = state();
    folder.train("run", &resume).says(8, &["chain.jsonl is missing", "put it back from a copy"]);
    assert!(state() == before);
    folder.put("run/chain.jsonl", &chain);
    folder.train("run", &resume).says(0, &[]);
    assert_eq!(folder.text("run/chain.jsonl"), chain);
    assert_eq!(folder.run(&["verify", "run"]).code, 0);
}

/// No command puts a file where `verify` would find it; a config may lie in the folder of its run.
#[test]
fn nothing_is_written_into_a_run() {
    let folder = trained(None);
    let init = |output: &'static str| ["init", "model", "data.jsonl", "--force", "-o", output];
    for output in ["run/config.resolved.toml", "run/other.toml", "run/tensorboard/config.toml", "run/final/a.toml"] {
        folder.run(&init(output)).says(2, &["would be written into", "hint: "]);
    }
    for inside in ["run/final", "run/pages"] {
        folder.run(&["man", "--folder", inside]).says(2, &["would be written into", "hint: "]);
    }
    folder.run(&["verify", "run"]).says(0, &[]);
    folder.run(&init("run/config.toml")).says(0, &[]);
    folder.run(&["verify", "run"]).says(0, &[]);
    // Only names that runs write are what a crash may have left.
    std::fs::create_dir(folder.path("run/.checkpoint-8.partial")).expect("a folder");
    folder.run(&["verify", "run"]).says(0, &[]);
    std::fs::create_dir(folder.path("run/.other.partial")).expect("a folder");
    let found = folder.run(&["verify", "run"]);
    assert!(found.code == 8 && found.out.contains(".other.partial: it does not belong"), "{}", found.out);
}

#[test]
fn other_inputs_are_named() {
    let folder = trained(None);
    folder.put("changed.jsonl", folder.text("data.jsonl").replacen("7+3=", "7+4=", 1));
    let text = folder.text("data.jsonl");
    let line = text.lines().position(|line| line.contains("7+3=")).expect("a row") + 1;
    let found = folder.run(&["verify", "run", "--data", "changed.jsonl"]);
    assert!(found.code == 8 && found.out.contains(&format!("changed.jsonl: line {line} is not")), "{}", found.out);
    let found = folder.run(&["replay", "run", "--steps", "1..2", "--data", "changed.jsonl"]);
    assert!(
        found.code == 1 && found.out.contains(&format!("changed.jsonl: line {line} is not")),
        "{}{}",
        found.out,
        found.err
    );
    let found = folder.run(&["replay", "run", "--steps", "1..2", "--set", "seed=8"]);
    assert!(found.code == 1 && found.out.contains("config `seed` is 8, the run's was 7"), "{}{}", found.out, found.err);
    let found = folder.run(&["prove", "run", "--set", "seed=8"]);
    assert!(found.code == 1 && found.out.contains("config `seed` is 8, the run's was 7"), "{}{}", found.out, found.err);
    let found = folder.run(&["prove", "run", "--set", "seed=8", "--json"]);
    let [object] = &found.json()[..] else { panic!("{}", found.out) };
    assert_eq!((found.code, &object["ok"], &object["difference"]), (1, &false.into(), &serde_json::Value::Null));
    assert!(object["inputs"][0].as_str().is_some_and(|line| line.contains("`seed` is 8")), "{object}");
    let path = folder.path("model/model.safetensors");
    let mut bytes = std::fs::read(&path).expect("read");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).expect("written");
    let found = folder.run(&["verify", "run/final", "--model", "model"]);
    assert!(found.code == 8 && found.out.contains("is not the tensor that the run was trained on"), "{}", found.out);
}

#[test]
fn a_replay_agrees_on_other_threads_splits_and_devices() {
    let folder = trained(None);
    for how in [
        &["--threads", "2"][..],
        &["--split", "1x8"],
        &["--device", "cpu,cpu"],
        &["--set", "gradient_checkpointing=none"],
    ] {
        let found = folder.run(&[&["replay", "run", "--steps", "3..5", "--json"], how].concat());
        assert_eq!(found.code, 0, "{how:?}: {}{}", found.out, found.err);
        let object = &found.json()[0];
        assert_eq!((&object["from"], &object["agreeing"], &object["ok"]), (&2.into(), &3.into(), &true.into()));
    }
    folder.run(&["replay", "run", "--steps", "5..9"]).says(2, &["has 6 updates"]);
    folder
        .run(&["replay", "run", "--steps", "1..2", "--split", "3x3"])
        .says(2, &["is 9 rows, an update of the run has 8"]);
    assert_eq!(Chain::read(&folder.path("run")).expect("a chain").updates.len(), 6, "nothing is written");
}

/// What differed first, and everything that could explain it; for run folders and for receipts.
#[test]
fn two_records_say_what_differed_first_and_why() {
    let folder = trained(None);
    let says = |other: &str, parts: &[&str]| {
        let receipts = ["run", other].map(|run| format!("{run}/receipt.json"));
        for arguments in [["diff", "run", other], ["diff", &receipts[0], &receipts[1]]] {
            let found = folder.run(&arguments);
            assert_eq!(found.code, 1, "{}{}", found.out, found.err);
            for part in parts {
                assert!(found.out.contains(part), "`{part}` in {}", found.out);
            }
        }
    };
    folder.trained("seed", &[&STEPS[..], &["seed=8"]].concat());
    says("seed", &["the chains diverge at update 1: rows", "seed", "7 against 8"]);
    let found = folder.run(&["diff", "run/receipt.json", "seed/receipt.json"]);
    assert!(found.out.starts_with("the chains diverge at update 1"), "{}", found.out);
    folder.run(&["diff", "run/receipt.json", "run/receipt.json"]).says(0, &[]);
    // One row.
    let text = folder.text("data.jsonl");
    let line = text.lines().position(|line| line.contains("7+3=")).expect("a row") + 1;
    folder.put("data.jsonl", text.replacen("7+3=", "7+4=", 1));
    folder.trained("row", &STEPS);
    folder.put("data.jsonl", &text);
    says("row", &["the chains diverge at update ", &format!("data file 1 (train): line {line} is the first")]);
    // One weight of the base.
    let path = folder.path("model/model.safetensors");
    let mut bytes = std::fs::read(&path).expect("read");
    let at = bytes.len() - 2;
    bytes[at] ^= 0x40;
    std::fs::write(&path, bytes).expect("written");
    folder.trained("base", &STEPS);
    says("base", &["the chains diverge at update 1: ", "base tensor `", "base file `model.safetensors`: differs"]);
    // An adapter against the checkpoint that it is from, and against another one.
    let same = folder.run(&["diff", "run/final", "run/checkpoint-6"]);
    assert!(same.code == 0 && same.out.contains("max=0 nonzero=0"), "{}{}", same.out, same.err);
    assert!(
        same.out.contains("B is a checkpoint, compared without optimizer.safetensors and state.json"),
        "{}",
        same.out
    );
    folder.run(&["diff", "run/checkpoint-4", "run/final"]).says(1, &[]);
}

/// What a run starts from is the base: nobody puts a checkpoint in its place.
#[test]
fn there_is_no_checkpoint_before_the_first_update() {
    let folder = trained(None);
    let (from, to) = (folder.path("run/checkpoint-2"), folder.path("run/checkpoint-0"));
    std::fs::create_dir(&to).expect("made");
    for name in files(&from) {
        std::fs::copy(from.join(&name), to.join(&name)).expect("copied");
    }
    let found = folder.run(&["verify", "run"]);
    assert!(found.code == 8 && found.out.contains("checkpoint-0: it does not belong to the run"), "{}", found.out);
    let replayed = folder.run(&["replay", "run", "--steps", "1..2"]);
    assert!(replayed.code == 0 && replayed.err.contains("from the base"), "{}{}", replayed.out, replayed.err);
    folder.run(&["prove", "run", "-q"]).says(8, &["checkpoint-0: it does not belong to the run"]);
    folder.run(&["train", "config.toml", "--resume-from", "checkpoint-0"]).says(2, &["is not a checkpoint of"]);
}

/// A run that is resumed from an earlier checkpoint with other lines of metrics writes the later
/// ones again, which hold a digest of these lines.
#[test]
fn checkpoints_ahead_of_a_resume_are_written_again() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &["max_steps=6", "save_steps=2", "logging_steps=1"]);
    let other = ["max_steps=6", "save_steps=3", "logging_steps=5"];
    folder.trained("run", &[&other[..], &["--resume-from=checkpoint-2"]].concat());
    assert_eq!(names(&folder.path("run")).iter().filter(|name| name.starts_with("checkpoint-")).count(), 4);
    folder.run(&["verify", "run"]).says(0, &[]);
    folder.trained("run", &[&other[..], &["--resume-from=checkpoint-4"]].concat());
    folder.run(&["verify", "run"]).says(0, &[]);
}

/// Final weights that were replaced together with manifest and receipts.
#[test]
fn replaced_final_weights_are_found() {
    let folder = trained(None);
    let last = folder.path("run/final");
    let path = last.join("adapter_model.safetensors");
    let mut bytes = std::fs::read(&path).expect("read");
    let at = bytes.len() - 4;
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).expect("written");
    let old = isobit_proof::Manifest::read(&last).expect("a manifest");
    let names = |manifest: &isobit_proof::Manifest| manifest.files.keys().cloned().collect::<Vec<_>>();
    let files = names(&old).into_iter().filter(|name| name != "receipt.json").collect::<Vec<_>>();
    let result = isobit_proof::Manifest::of(&last, files.iter().map(String::as_str)).expect("made").files;
    for place in ["run", "run/final"] {
        let mut edited = receipt(&folder, place);
        edited.result = Some(result.clone());
        edited.digest = edited.computed_digest();
        edited.write(&folder.path(place)).expect("written");
    }
    let new = isobit_proof::Manifest::of(&last, names(&old).iter().map(String::as_str)).expect("made");
    isobit_proof::Manifest { run: old.run, base: old.base, ..new }.write(&last).expect("written");
    let found = folder.run(&["verify", "run"]);
    assert!(found.code == 8 && found.out.contains("is not that of checkpoint-6"), "{}", found.out);
    let found = folder.run(&["replay", "run", "--steps", "5..6", "-q"]);
    assert!(
        found.code == 1 && found.out.contains("update 6: the chain agrees, but final holds other"),
        "{}",
        found.out
    );
}

/// A checkpoint of a version without chains still resumes; the run then leaves no receipt.
#[test]
fn runs_of_earlier_versions_go_on_without_a_receipt() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &["max_steps=4", "save_steps=2"]);
    let state = folder.path("run/checkpoint-2/state.json");
    let mut value: serde_json::Value = serde_json::from_str(&folder.text("run/checkpoint-2/state.json")).expect("JSON");
    value.as_object_mut().expect("an object").remove("chain");
    std::fs::write(&state, serde_json::to_string_pretty(&value).expect("JSON") + "\n").expect("written");
    let checkpoint = folder.path("run/checkpoint-2");
    let old = isobit_proof::Manifest::read(&checkpoint).expect("a manifest");
    let new = isobit_proof::Manifest::of(&checkpoint, old.files.keys().map(String::as_str)).expect("made");
    isobit_proof::Manifest { run: old.run, base: old.base, ..new }.write(&checkpoint).expect("written");
    std::fs::remove_dir_all(folder.path("run/checkpoint-4")).expect("removed");
    let from = ["max_steps=4", "save_steps=2", "--resume-from=checkpoint-2"];
    folder.train("run", &[&from[..], &["--fixed"]].concat()).says(2, &["would leave none"]);
    let ran = folder.trained("run", &from);
    assert!(ran.err.contains("without receipts"), "{}", ran.err);
    assert!(!folder.has("run/chain.jsonl") && !folder.has("run/receipt.json") && !folder.has("run/final/receipt.json"));
}
