//! Forged runs: somebody changes what a run left, and makes every hash, manifest and receipt fit
//! again. `verify` finds what contradicts the chain, `prove` what another execution contradicts.

use crate::model_folder::{Folder, names};
use crate::receipt::{STEPS, trained};
use isobit_proof::hash::{FileRecord, Hash, Manifest};
use isobit_proof::line::{CHECK, NO_LINES, chained, checksum};
use isobit_proof::receipt::Receipt;
use serde_json::Value;
use std::path::Path;

/// Flips a bit near the end of a file.
pub(crate) fn poke(folder: &Folder, name: &str) {
    let mut bytes = std::fs::read(folder.path(name)).expect("read");
    let at = bytes.len() - 2;
    bytes[at] ^= 0x40;
    folder.put(name, bytes);
}

/// A manifest that fits the files of its folder.
pub(crate) fn remanifest(folder: &Path) {
    let old = Manifest::read(folder).expect("a manifest");
    let present: Vec<String> = names(folder).into_iter().filter(|name| name != Manifest::NAME).collect();
    let files = Manifest::of(folder, present.iter().map(String::as_str)).expect("made").files;
    Manifest { files, ..old }.write(folder).expect("written");
}

/// Makes everything fit again, with receipts edited alike.
pub(crate) fn refit(folder: &Folder, edit: impl Fn(&mut Receipt)) {
    let (run, last) = (folder.path("run"), folder.path("run/final"));
    let own = |name: &String| name != Manifest::NAME && name != "receipt.json";
    let files: Vec<String> = names(&last).into_iter().filter(own).collect();
    let result = Manifest::of(&last, files.iter().map(String::as_str)).expect("made").files;
    let seal = |mut receipt: Receipt, place: &Path| {
        receipt.result = Some(result.clone());
        edit(&mut receipt);
        receipt.digest = receipt.computed_digest();
        receipt.write(place).expect("written");
    };
    seal(Receipt::read(&last).expect("a receipt"), &last);
    remanifest(&last);
    let mut whole = Receipt::read(&run).expect("a receipt");
    let record = whole.folder.as_mut().expect("a record");
    for (name, hash) in &mut record.files {
        *hash = Hash::of_file(&run.join(name)).expect("read");
    }
    record.checkpoints.retain(|name, _| run.join(name).is_dir());
    for (name, hash) in &mut record.checkpoints {
        remanifest(&run.join(name));
        *hash = Hash::of_file(&run.join(name).join(Manifest::NAME)).expect("read");
    }
    seal(whole, &run);
}

/// A command must end with this code and say this.
#[track_caller]
pub(crate) fn says(folder: &Folder, arguments: &[&str], code: i32, part: &str) {
    let found = folder.run(arguments);
    let said = format!("{}{}", found.out, found.err);
    assert!(found.code == code && said.contains(part), "{arguments:?}: {}, `{part}` in {said}", found.code);
}

/// Puts a run back as it was.
pub(crate) fn copy(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir(to).expect("folder");
    for name in names(from) {
        let (source, target) = (from.join(&name), to.join(&name));
        if source.is_dir() {
            copy(&source, &target);
        } else {
            std::fs::copy(&source, &target).expect("copied");
        }
    }
}

/// An honest run, and a copy of it.
pub(crate) fn ground(adapter: Option<&str>) -> Folder {
    let folder = trained(adapter);
    copy(&folder.path("run"), &folder.path("honest"));
    folder
}

pub(crate) fn restore(folder: &Folder) {
    copy(&folder.path("honest"), &folder.path("run"));
}

/// A change to a receipt.
type Edit = fn(&mut Receipt);

/// The receipt claims another config, base, tokenizer or data than the run had.
#[test]
fn claimed_inputs_are_compared_with_the_identity_and_with_the_files() {
    let folder = ground(None);
    let verify = ["verify", "run"];
    let with_model = ["verify", "run", "--model", "model"];
    let prove = ["prove", "run", "-q"];
    let edits: [(Edit, &[&str], i32, &str); 7] = [
        (|of| drop(of.made.config.insert("seed".into(), "8".into())), &verify, 8, "its config is not the one"),
        (|of| drop(of.made.config.insert("more".into(), "8".into())), &verify, 8, "its config is not the one"),
        (
            |of| of.made.base.files.get_mut("model.safetensors").expect("there").blake3 = Hash([0; 32]),
            &verify,
            8,
            "its base files are not those",
        ),
        (
            |of| of.made.data[0].blake3 = Hash([0; 32]),
            &verify,
            8,
            "its files are not the training data that the receipt names",
        ),
        (|of| _ = of.made.tokenizer.remove("tokenizer.json"), &prove, 1, "tokenizer file `tokenizer.json`"),
        (|of| _ = of.made.tokenizer.remove("tokenizer.json"), &with_model, 8, "the receipt does not name it"),
        (
            |of| *of.made.base.tensors.values_mut().next().expect("one") = Hash([0; 32]),
            &with_model,
            8,
            "is not the tensor that the run was trained on",
        ),
    ];
    for (edit, command, code, part) in edits {
        refit(&folder, edit);
        says(&folder, command, code, part);
        restore(&folder);
    }
    refit(&folder, |_| ());
    says(&folder, &verify, 0, "verified");
    refit(&folder, |of| *of.made.base.tensors.values_mut().next().expect("one") = Hash([0; 32]));
    says(&folder, &prove, 1, "base tensor ");
}

/// Weights and state that are not those of the chain, in the final folder and in checkpoints.
#[test]
fn stored_tensors_are_compared_with_the_chain() {
    let folder = ground(None);
    let honest = Receipt::read(&folder.path("honest")).expect("a receipt").digest;
    let (last, saved) = ("run/final/adapter_model.safetensors", "run/checkpoint-6/adapter_model.safetensors");
    let verify = ["verify", "run"];
    poke(&folder, last);
    refit(&folder, |_| ());
    says(&folder, &verify, 8, "is not that of checkpoint-6");
    // By itself a final folder is consistent; its digest is another one.
    let alone = folder.run(&["verify", "run/final"]);
    assert!(alone.code == 0 && !alone.out.contains(&honest.to_string()), "{}", alone.out);
    poke(&folder, saved);
    refit(&folder, |_| ());
    says(&folder, &verify, 8, "checkpoint-6/adapter_model.safetensors: its weights are not those of update 6");
    std::fs::remove_dir_all(folder.path("run/checkpoint-6")).expect("removed");
    refit(&folder, |_| ());
    says(&folder, &verify, 8, "run/final: its weights are not those of update 6 in the chain");
    restore(&folder);
    poke(&folder, "run/checkpoint-4/optimizer.safetensors");
    refit(&folder, |_| ());
    says(&folder, &verify, 8, "checkpoint-4/optimizer.safetensors: its optimizer state is not that of update 4");
    // Counters of a checkpoint.
    restore(&folder);
    let state = folder.text("run/checkpoint-4/state.json");
    folder.put("run/checkpoint-4/state.json", state.replacen("\"tokens_seen\": ", "\"tokens_seen\": 1", 1));
    refit(&folder, |_| ());
    says(&folder, &verify, 8, "checkpoint-4/state.json: its `tokens_seen` does not follow from the chain");
}

/// Neither a replay nor a resumed run begins with numbers that are not those of the chain.
#[test]
fn a_forged_checkpoint_is_not_a_start() {
    let folder = ground(None);
    for (file, what) in [("optimizer", "optimizer state is not that"), ("adapter_model", "weights are not those")] {
        restore(&folder);
        poke(&folder, &format!("run/checkpoint-4/{file}.safetensors"));
        refit(&folder, |_| ());
        let start = format!("checkpoint-4, where the replay begins: its {what} of the chain");
        says(&folder, &["replay", "run", "--steps", "5..6", "-q", "--against", "none"], 1, &start);
        let chain = folder.text("run/chain.jsonl");
        let resumed = folder.train("run", &[&STEPS[..], &["--resume-from=checkpoint-4"]].concat());
        resumed.says(8, &[&format!("its {what} of update 4 in the chain")]);
        assert_eq!(folder.text("run/chain.jsonl"), chain, "nothing is changed");
    }
}

/// Everything in the final folder that is not a trained tensor.
#[test]
fn a_proof_writes_the_final_folder_again() {
    let folder = ground(None);
    // In every folder: `verify` compares them with one another.
    for place in ["final", "checkpoint-2", "checkpoint-3", "checkpoint-4", "checkpoint-6"] {
        let config = format!("run/{place}/adapter_config.json");
        let text = folder.text(&config);
        folder.put(&config, text.replacen("\"lora_alpha\": ", "\"lora_alpha\": 9", 1));
    }
    refit(&folder, |_| ());
    says(&folder, &["verify", "run"], 0, "verified");
    let one = ["prove", "run", "-q", "--segments", "1", "--challenge", "01"];
    says(&folder, &["prove", "run", "-q"], 1, "final/adapter_config.json: the run gives other bytes");
    says(&folder, &one, 1, "final/adapter_config.json: the run gives other bytes");
    assert!(!folder.has("run/statement.json"));
    restore(&folder);
    folder.put("run/final/modeling_x.py", "import os\n");
    refit(&folder, |_| ());
    says(&folder, &one, 8, "final/modeling_x.py: it does not belong to an adapter");
    restore(&folder);
    folder.put("run/data.json", folder.text("run/data.json").replacen("\"tokens\": ", "\"tokens\": 9", 1));
    refit(&folder, |_| ());
    says(&folder, &one, 1, "run/data.json: it is not what the data of the run give");
    restore(&folder);
    says(&folder, &one, 0, "every file of the result");
    assert!(names(&folder.path("run")).iter().all(|name| !name.ends_with(".partial")), "nothing is left");

    let folder = ground(Some("type = \"last_blocks\"\nlast_blocks = 1"));
    flip_table(&folder);
    refit(&folder, |_| ());
    says(&folder, &one, 1, "final/model.safetensors: the run gives other bytes");
}

/// Changes the file of a whole model, given its table's entry in the header and the length of that.
pub(crate) fn change_table(folder: &Folder, change: impl FnOnce(&Value, usize, &mut [u8])) {
    let path = folder.path("run/final/model.safetensors");
    let mut bytes = std::fs::read(&path).expect("read");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight")) as usize;
    let entries: Value = serde_json::from_slice(&bytes[8..8 + header]).expect("JSON");
    change(&entries["model.embed_tokens.weight"], header, &mut bytes);
    std::fs::write(&path, bytes).expect("written");
}

/// Flips a bit of the table.
pub(crate) fn flip_table(folder: &Folder) {
    change_table(folder, |table, header, bytes| {
        let at = table["data_offsets"][0].as_u64().expect("a number") as usize;
        bytes[8 + header + at] ^= 0x40;
    });
}

/// A chain whose links are right, with a digest that no execution gives.
#[test]
fn an_update_that_does_not_follow_is_found_by_a_replay() {
    let folder = ground(None);
    let (mut before, mut lines, mut links) = (Hash([0; 32]), String::new(), Vec::new());
    for (step, line) in folder.text("run/chain.jsonl").lines().enumerate() {
        let mut body = line.split(",\"link\"").next().expect("a link").to_string();
        if step == 4 {
            let at = body.find("\"gradient\":\"").expect("a gradient") + 12;
            let other = if &body[at..=at] == "0" { "1" } else { "0" };
            body.replace_range(at..=at, other);
        }
        before = Hash::of_bytes(&[&before.0, body.as_bytes()].concat());
        lines.extend([body.as_str(), ",\"link\":\"", &before.to_string(), "\"}\n"]);
        links.push(before);
    }
    folder.put("run/chain.jsonl", lines);
    for step in [2, 3, 4, 6] {
        let name = format!("run/checkpoint-{step}/state.json");
        let mut state: Value = serde_json::from_str(&folder.text(&name)).expect("JSON");
        state["chain"] = links[step].to_string().into();
        folder.put(&name, state.to_string());
    }
    refit(&folder, |receipt| receipt.made.link = links[6]);
    says(&folder, &["verify", "run"], 0, "verified");
    let found = folder.run(&["prove", "run", "--json"]);
    let [object] = &found.json()[..] else { panic!("{}", found.out) };
    assert_eq!((found.code, &object["schema"], &object["ok"]), (1, &"isobit.prove/1".into(), &false.into()));
    assert_eq!((&object["difference"]["step"], &object["difference"]["item"]), (&4.into(), &"gradient".into()));
}

/// Numbers that people read, and lines that are missing or there twice.
#[test]
fn metrics_are_made_again_from_the_chain() {
    let folder = ground(None);
    let text = folder.text("run/metrics.jsonl");
    let value = |field: &str| {
        let at = text.find(&format!("\"{field}\":")).unwrap_or_else(|| panic!("{field}")) + field.len() + 3;
        let end = text[at..].find([',', '}']).expect("an end") + at;
        (format!("\"{field}\":{}", &text[at..end]), format!("\"{field}\":0.125"))
    };
    let fields = ["loss", "learning_rate", "grad_norm", "epoch", "eval_loss", "eval_accuracy", "eval_tokens"];
    let mut forgeries: Vec<(String, String)> = Vec::new();
    for field in fields {
        let (from, to) = value(field);
        forgeries.push((text.replacen(&from, &to, 1), format!("`{field}` of step ")));
    }
    let is_evaluation = |line: &&str| line.contains("eval_loss");
    let evaluation = text.lines().find(is_evaluation).expect("an evaluation");
    let without: String = text.split_inclusive('\n').filter(|line| !is_evaluation(line)).collect();
    forgeries.push((without, "the evaluation of step 3 is missing".to_string()));
    let twice = text.replacen(evaluation, &format!("{evaluation}\n{evaluation}"), 1);
    forgeries.push((twice, "is there twice".to_string()));
    forgeries.push((text.replacen("\"step\":2,", "\"step\":2,\"note\":1,", 1), "`note` of step 2".to_string()));
    forgeries.push((text.replacen("\"loss\":", "\"loss\":0.1,\"loss\":", 1), "not a line of metrics".to_string()));
    forgeries.push((text.replacen("\"seconds\":", "\"hours\":0.1,\"seconds\":", 1), "its timing".to_string()));
    for (forged, part) in forgeries {
        assert_ne!(forged, text, "{part}");
        let (mut digest, mut lines, mut digests) = (NO_LINES, String::new(), std::collections::BTreeMap::new());
        for line in forged.lines() {
            let body = line.split(CHECK).next().expect("a line");
            let line = format!("{body}{CHECK}{}\"}}", checksum(body));
            digest = chained(digest, &line);
            digests.insert(step_of(&line), digest);
            lines.extend([line.as_str(), "\n"]);
        }
        folder.put("run/metrics.jsonl", lines);
        for step in [2, 3, 4, 6] {
            let name = format!("run/checkpoint-{step}/state.json");
            let mut state: Value = serde_json::from_str(&folder.text(&name)).expect("JSON");
            state["metrics"] = digests[&(step as u64)].to_string().into();
            folder.put(&name, state.to_string());
        }
        refit(&folder, |receipt| {
            if let Some(record) = &mut receipt.folder {
                record.metrics = digest;
            }
        });
        says(&folder, &["verify", "run"], 8, &part);
        restore(&folder);
    }
}

fn step_of(line: &str) -> u64 {
    let rest = line.split("\"step\":").nth(1).expect("a step");
    rest.split(',').next().and_then(|step| step.parse().ok()).expect("a number")
}

/// What a kill leaves is no forgery: notes.
#[test]
fn a_killed_run_verifies_with_notes() {
    let folder = ground(None);
    let run = folder.path("run");
    std::fs::remove_dir_all(folder.path("run/final")).expect("removed");
    // Resumed after update 2 and killed after update 3, before the receipt was written again.
    let cut = |text: String, keep: &dyn Fn(&str) -> bool| -> String {
        text.split_inclusive('\n').filter(|line| keep(line)).collect()
    };
    folder.put("run/chain.jsonl", cut(folder.text("run/chain.jsonl"), &|line| step_of(line) <= 3));
    folder.put("run/metrics.jsonl", cut(folder.text("run/metrics.jsonl"), &|line| step_of(line) <= 3));
    let state: Value = serde_json::from_str(&folder.text("run/checkpoint-2/state.json")).expect("JSON");
    let mut receipt = Receipt::read(&run).expect("a receipt");
    (receipt.made.updates, receipt.made.best, receipt.made.finished, receipt.result) = (2, None, false, None);
    receipt.made.link = Hash::parse(state["chain"].as_str().expect("a link")).expect("a hash");
    let record = receipt.folder.as_mut().expect("a record");
    record.metrics = Hash::parse(state["metrics"].as_str().expect("a digest")).expect("a hash");
    record.checkpoints.retain(|name, _| name == "checkpoint-2");
    record.files.remove("best.json");
    receipt.digest = receipt.computed_digest();
    receipt.write(&run).expect("written");
    let config = folder.text("run/config.resolved.toml");
    folder.put("run/config.resolved.toml", config.replacen("threads = ", "threads = 1", 1));
    let found = folder.run(&["verify", "run"]);
    assert_eq!(found.code, 0, "{}{}", found.out, found.err);
    for note in ["config.resolved.toml changed after", "checkpoint-6 is of an update that the resumed run has not"] {
        assert!(found.out.contains(note), "{note}: {}", found.out);
    }
    // A config of another run is a finding all the same, and so is something that is none.
    folder.put("run/config.resolved.toml", config.replacen("seed = 7", "seed = 8", 1));
    says(&folder, &["verify", "run"], 8, "config.resolved.toml: `seed` is 8, but the run's was 7");
}

/// Bytes after the end of a finished chain, and a statement that is no file.
#[test]
fn what_is_appended_to_a_finished_run_is_found() {
    let folder = ground(None);
    let chain = folder.text("run/chain.jsonl");
    folder.put("run/chain.jsonl", format!("{chain}more"));
    says(&folder, &["verify", "run"], 8, "chain.jsonl: 4 bytes follow its last line");
    restore(&folder);
    let manifest = folder.text("run/final/MANIFEST.json");
    folder.put("run/final/MANIFEST.json", manifest.trim_end());
    says(&folder, &["verify", "run"], 8, "final/MANIFEST.json: it is not written as Isobit writes it");
    std::fs::remove_file(folder.path("run/final/MANIFEST.json")).expect("removed");
    poke(&folder, "run/final/adapter_model.safetensors");
    let generate = ["generate", "--model", "model", "--adapter", "run/final", "--prompt", "1+1="];
    says(&folder, &generate, 8, "MANIFEST.json");
    restore(&folder);
    std::fs::create_dir(folder.path("run/statement.json")).expect("folder");
    says(&folder, &["verify", "run"], 8, "statement.json");
}

/// `prove` replaces nothing but a statement, and says so before it computes.
#[test]
fn a_statement_replaces_only_statements() {
    use crate::statement::{KEY, PUBLIC};
    let folder = ground(None);
    folder.put("key.pem", KEY);
    folder.put("public.pem", PUBLIC);
    folder.put("precious.txt", "precious");
    let to = |output: &'static str| ["prove", "run", "-q", "--segments", "1", "--key", "key.pem", "-o", output];
    let files = ["key.pem", "precious.txt", "run/receipt.json", "run/final/adapter_model.safetensors"];
    let before = files.map(|file| std::fs::read(folder.path(file)).expect("read"));
    for file in files {
        says(&folder, &to(file), 2, "exists, and is not a statement");
    }
    std::os::unix::fs::symlink("precious.txt", folder.path("link.json")).expect("linked");
    says(&folder, &to("link.json"), 2, "is not a statement");
    says(&folder, &to("run/final/other.json"), 2, "is inside the run");
    says(&folder, &to("nowhere/x.json"), 7, "cannot write nowhere/x.json");
    assert_eq!(before, files.map(|file| std::fs::read(folder.path(file)).expect("read")));
    let piped = folder.run(&to("/dev/stdout"));
    assert!(piped.code == 0 && piped.out.contains("\"payloadType\""), "{}{}", piped.out, piped.err);
    says(&folder, &["prove", "run", "-q", "--segments", "2", "--challenge", "0a", "--key", "key.pem"], 0, "signed by");
    says(&folder, &["prove", "run", "-q"], 2, "is a signed statement; this one would not be signed");
    // What was replayed, and for which challenge.
    says(
        &folder,
        &["verify", "run", "--challenge", "0A", "--key", "public.pem"],
        0,
        "by the challenge 0a): same bits; a single wrong",
    );
    says(&folder, &["verify", "run", "--challenge", "0b"], 8, "it does not answer the challenge 0b");
    let found = folder.run(&["verify", "run", "--json"]).json();
    assert_eq!((&found[0]["statement"]["replayed"], &found[0]["statement"]["segments"]), (&2.into(), &3.into()));
    // Another division into segments is another receipt.
    refit(&folder, |receipt| receipt.segment = Some(1));
    says(&folder, &["verify", "run", "--key", "public.pem"], 8, "it is about another receipt");
}

/// Without the number of its rows a run would escape the checks of its course.
#[test]
fn a_receipt_says_how_many_rows_there_are() {
    let folder = ground(None);
    refit(&folder, |receipt| receipt.made.rows = None);
    says(&folder, &["verify", "run"], 8, "receipt.json: it is malformed: `isobit.receipt/2` has `segment` and");
    says(&folder, &["verify", "run/final"], 8, "`isobit.receipt/2` has `segment` and `made.rows`");
    says(&folder, &["prove", "run", "-q"], 8, "has `segment` and `made.rows`");
}

/// Names that lead out of the model's folder are not followed.
#[test]
fn a_receipt_names_files_of_a_folder() {
    let folder = ground(None);
    let record = FileRecord { size: 1, blake3: Hash([0; 32]) };
    refit(&folder, |receipt| _ = receipt.made.base.files.insert("../../etc/hostname".into(), record));
    says(&folder, &["verify", "run", "--model", "model"], 8, "is not a file of a folder");
}
