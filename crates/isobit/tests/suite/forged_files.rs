//! Forged runs, file by file: names, pointers, manifests and numbers that a forger adds, hides or
//! bends, with every hash, manifest and receipt made to fit again (`forgery.rs` has the tools).

use crate::forgery::{change_table, flip_table, ground, refit, remanifest, restore, says};
use crate::model_folder::{Folder, names};
use isobit_proof::chain::{Chain, ChainFile};
use isobit_proof::hash::{Hash, Manifest};
use isobit_proof::receipt::{Best, Receipt};
use isobit_proof::safetensors::{Dtype, Entry, SafeTensors, write};
use serde_json::{Value, json};

const VERIFY: [&str; 2] = ["verify", "run"];

/// Forgeries that nothing was said about, or not what it should be.
#[derive(Default)]
struct Escaped(Vec<String>);

impl Escaped {
    /// `verify run` must name this, once everything fits again.
    fn unless(&mut self, folder: &Folder, what: &str, edit: impl Fn(&mut Receipt), parts: &[&str]) {
        refit(folder, edit);
        self.unless_said(folder, &VERIFY, what, parts);
        restore(folder);
    }

    fn unless_said(&mut self, folder: &Folder, arguments: &[&str], what: &str, parts: &[&str]) {
        let found = folder.run(arguments);
        let said = format!("{}{}", found.out, found.err);
        if found.code != 8 || !parts.iter().all(|part| said.contains(part)) {
            self.0.push(format!("{what}: {}, {parts:?} in {said}", found.code));
        }
    }
}

impl Drop for Escaped {
    fn drop(&mut self) {
        assert!(std::thread::panicking() || self.0.is_empty(), "{}", self.0.join("\n"));
    }
}

fn edit_json(folder: &Folder, name: &str, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_str(&folder.text(name)).expect("JSON");
    change(&mut value);
    folder.put(name, format!("{value:#}\n"));
}

/// Links an edited chain again and puts its links into the states.
fn rechain(folder: &Folder, edit: impl FnOnce(&mut Chain)) -> Chain {
    let run = folder.path("run");
    let mut chain = Chain::read(&run).expect("a chain");
    edit(&mut chain);
    let mut file = ChainFile::create(&run, &chain.origin).expect("created");
    for update in &chain.updates {
        file.append(update).expect("appended");
    }
    let chain = Chain::read(&run).expect("a chain");
    for step in [2_u64, 3, 4, 6] {
        let name = format!("run/checkpoint-{step}/state.json");
        if let (true, Some(link)) = (folder.has(&name), chain.link(step)) {
            edit_json(folder, &name, |state| {
                state["chain"] = link.to_string().into();
                state["identity"] = json!(chain.origin.identity);
            });
        }
    }
    chain
}

/// Names in the record of the folder, and the record itself.
#[test]
fn the_record_of_a_folder_is_about_the_files_of_a_run() {
    let folder = ground(None);
    let mut escaped = Escaped::default();
    folder.put("run/evil.sh", "rm -rf /\n");
    refit(&folder, |_| ());
    let receipt = Receipt::read(&folder.path("run")).expect("a receipt");
    Receipt::of_result(&receipt).write(&folder.path("run")).expect("written");
    escaped.unless_said(&folder, &VERIFY, "no record", &["receipt.json: it has no record of the folder"]);
    restore(&folder);
    let named = |name: &'static str| {
        move |receipt: &mut Receipt| {
            if let Some(record) = &mut receipt.folder {
                record.files.insert(name.to_string(), Hash::of_bytes(b"x"));
            }
        }
    };
    folder.put("run/evil.sh", "x");
    escaped.unless(&folder, "one more file", named("evil.sh"), &["evil.sh: it does not belong to the run"]);
    folder.put("outside", "x");
    let outside = "`../outside` is not a file that a run records";
    escaped.unless(&folder, "a file elsewhere", named("../outside"), &[outside]);
    std::fs::remove_file(folder.path("run/config.resolved.toml")).expect("removed");
    let hidden = |name: &'static str| {
        move |receipt: &mut Receipt| {
            if let Some(record) = &mut receipt.folder {
                record.files.remove(name);
            }
        }
    };
    // `refit` hashes what the record names.
    let mut receipt = Receipt::read(&folder.path("run")).expect("a receipt");
    hidden("config.resolved.toml")(&mut receipt);
    receipt.write(&folder.path("run")).expect("written");
    escaped.unless_said(&folder, &VERIFY, "no config", &["config.resolved.toml: it is missing"]);
    restore(&folder);
    escaped.unless(&folder, "hidden data", hidden("data.json"), &["data.json: the receipt does not name it"]);
    folder.put("run/config.resolved.toml", "seed = [\n");
    escaped.unless(&folder, "no config", |_| (), &["config.resolved.toml: "]);
    let text = folder.text("run/config.resolved.toml");
    folder.put("run/config.resolved.toml", text.replacen("seed = 7", "seed = 8", 1));
    escaped.unless(&folder, "another seed", |_| (), &["`seed` is 8, but the run's was 7"]);
}

/// `latest.json`, `best.json`, and folders that are named like checkpoints.
#[test]
fn pointers_and_names_of_checkpoints_follow_from_the_chain() {
    let folder = ground(None);
    let mut escaped = Escaped::default();
    let pointer =
        |step: u64| json!({"schema": "isobit.pointer/1", "checkpoint": format!("checkpoint-{step}"), "step": step});
    folder.put("run/latest.json", pointer(4).to_string());
    escaped.unless(&folder, "an earlier latest", |_| (), &["latest.json: its `checkpoint` is not"]);
    edit_json(&folder, "run/best.json", |best| best["checkpoint"] = Value::Null);
    escaped.unless(&folder, "no best", |_| (), &["best.json: its `checkpoint` is not"]);
    edit_json(&folder, "run/best.json", |best| best["note"] = "state of the art".into());
    escaped.unless(&folder, "a note on the best", |_| (), &["best.json: its `note` is not"]);
    for name in ["checkpoint-04", "checkpoint-best", "checkpoint-checkpoint-4"] {
        crate::forgery::copy(&folder.path("honest/checkpoint-4"), &folder.path(&format!("run/{name}")));
        let add = |receipt: &mut Receipt| {
            if let Some(record) = &mut receipt.folder {
                let hash = Hash::of_file(&folder.path(&format!("run/{name}/MANIFEST.json"))).expect("read");
                record.checkpoints.insert(name.to_string(), hash);
            }
        };
        escaped.unless(&folder, name, add, &[&format!("{name}: it does not belong to the run")]);
    }
    folder.put("run/checkpoint-4/modeling.py", "import os\n");
    escaped.unless(&folder, "a file more", |_| (), &["checkpoint-4/modeling.py: it does not belong to a checkpoint"]);
    edit_json(&folder, "run/checkpoint-4/adapter_config.json", |config| config["lora_alpha"] = 1024.into());
    let other = "checkpoint-4/adapter_config.json: it is not that of the final folder";
    escaped.unless(&folder, "another scale", |_| (), &[other]);
    crate::forgery::copy(&folder.path("honest/checkpoint-2"), &folder.path("run/checkpoint-4"));
    escaped.unless(&folder, "an earlier checkpoint", |_| (), &["checkpoint-4/state.json: it has step `2`"]);
}

/// What is changed, and how.
type Edit<T> = (&'static str, fn(&mut T));

/// The manifest says which base an adapter needs; `generate` warns by it.
#[test]
fn manifests_and_receipts_agree_on_run_and_base() {
    let folder = ground(None);
    let mut escaped = Escaped::default();
    let edits: [Edit<Manifest>; 4] = [
        ("another base", |of| of.base = Some(Hash([0; 32]))),
        ("no base", |of| of.base = None),
        ("another run", |of| of.run = Some(Hash([0; 32]))),
        ("a quantised base", |of| of.load_in_4bit = Some("int4".to_string())),
    ];
    for (what, edit) in edits {
        for place in ["run/final", "run/checkpoint-4"] {
            let path = folder.path(place);
            let mut manifest = Manifest::read(&path).expect("a manifest");
            edit(&mut manifest);
            manifest.write(&path).expect("written");
            let part = format!("{place}/MANIFEST.json: its run or its base is not that of the receipt");
            if place == "run/final" {
                escaped.unless_said(&folder, &["verify", "run/final"], what, &[&part]);
            }
            escaped.unless(&folder, what, |_| (), &[&part]);
        }
    }
    // What stands in the receipt of the final folder is what stands in that of the run.
    let edits: [Edit<Receipt>; 2] = [
        ("another program", |of| of.program = "9.9.9".to_string()),
        ("an environment", |of| of.environment = Some([("audited_by".to_string(), "NIST".to_string())].into())),
    ];
    for (what, edit) in edits {
        let path = folder.path("run/final");
        let mut receipt = Receipt::read(&path).expect("a receipt");
        edit(&mut receipt);
        receipt.write(&path).expect("written");
        remanifest(&path);
        escaped.unless_said(&folder, &VERIFY, what, &["final/receipt.json: it is not the receipt of this run"]);
        if what == "an environment" {
            let part = "final/receipt.json: it has parts that the receipt of a final folder does not have";
            escaped.unless_said(&folder, &["verify", "run/final"], what, &[part]);
        }
        restore(&folder);
    }
}

/// What equal runs share has names and values of one form.
#[test]
fn what_a_run_was_made_from_has_known_names() {
    let folder = ground(None);
    let mut escaped = Escaped::default();
    rechain(&folder, |chain| _ = chain.origin.identity.insert("audited_by".into(), "NIST".into()));
    let chain = Chain::read(&folder.path("run")).expect("a chain");
    let add = |receipt: &mut Receipt| {
        receipt.made.identity.insert("audited_by".into(), "NIST".into());
        receipt.made.link = chain.head();
    };
    escaped.unless(&folder, "an identity of more", add, &["receipt.json: ", "`audited_by`"]);
    // Two keys in one: the same digest, and a reader that looks for the second finds none.
    let fold = |receipt: &mut Receipt| {
        let config = &mut receipt.made.config;
        let best = config.remove("training.load_best_model_at_end").expect("a key");
        let before = config.get_mut("training.learning_rate").expect("a key");
        *before = format!("{before}\ntraining.load_best_model_at_end = {best}");
    };
    escaped.unless(&folder, "a hidden key", fold, &["receipt.json: "]);
    let used: fn(&mut Receipt) = |receipt| receipt.made.data[0].used_for = "audited".to_string();
    escaped.unless(&folder, "another use of the data", used, &["receipt.json: ", "`audited`"]);
    let none: fn(&mut Receipt) = |receipt| receipt.segment = Some(0);
    escaped.unless(&folder, "segments of nothing", none, &["receipt.json: "]);
    // The lines of a data file, which the hash of the file does not cover.
    let with_data = ["verify", "run", "--data", "data.jsonl"];
    refit(&folder, |receipt| receipt.made.data[0].size += 1);
    escaped.unless_said(&folder, &with_data, "one byte more", &["data.jsonl: the receipt has its hash"]);
    restore(&folder);
    let changes: [Edit<Receipt>; 3] = [
        ("one line more", |receipt| receipt.made.data[0].line_count += 1),
        ("endless groups", |receipt| receipt.made.data[0].lines_per_digest = u64::MAX),
        ("no groups", |receipt| receipt.made.data[0].lines_per_digest = 0),
    ];
    for (what, change) in changes {
        escaped.unless(&folder, what, change, &["a data file has not as many digests as its lines give"]);
    }
    folder.put("other.jsonl", folder.text("data.jsonl") + "{}\n");
    let found = folder.run(&["verify", "run", "--data", "other.jsonl"]);
    assert_eq!(found.code, 8, "{}{}", found.out, found.err);
}

/// Writes the tensors of a file again as float64, each value plus one.
fn widened(folder: &Folder, name: &str, dtype: Dtype) {
    let file = SafeTensors::open(&folder.path(name)).expect("tensors");
    let all: Vec<(String, Vec<usize>, Vec<u8>)> = file
        .tensors()
        .map(|tensor| {
            let values = tensor.to_f32().expect("numbers");
            let bytes = match dtype {
                Dtype::F64 => values.iter().flat_map(|value| (f64::from(*value).to_bits() ^ 1).to_le_bytes()).collect(),
                _ => values.iter().flat_map(|_| 0x3f80_u16.to_le_bytes()).collect(),
            };
            (tensor.name.to_string(), tensor.shape.to_vec(), bytes)
        })
        .collect();
    drop(file);
    let entries: Vec<Entry<'_>> = all
        .iter()
        .map(|(name, shape, bytes)| Entry {
            name: name.as_str(),
            dtype,
            shape: shape.as_slice(),
            bytes: bytes.as_slice(),
        })
        .collect();
    write(&folder.path(name), &std::collections::BTreeMap::new(), &entries).expect("written");
}

/// Numbers of a type that the run does not write, and tensors that are said to have another layout.
#[test]
fn tensors_have_the_types_and_layouts_of_a_run() {
    let folder = ground(None);
    let mut escaped = Escaped::default();
    widened(&folder, "run/final/adapter_model.safetensors", Dtype::F64);
    escaped.unless(&folder, "final of float64", |_| (), &["final", "which a run does not write"]);
    for dtype in [Dtype::F64, Dtype::Bf16] {
        widened(&folder, "run/checkpoint-4/adapter_model.safetensors", dtype);
        let part = "which a run does not write";
        escaped.unless(&folder, "a checkpoint of another type", |_| (), &["adapter_model.safetensors: `", part]);
        widened(&folder, "run/checkpoint-4/optimizer.safetensors", dtype);
        escaped.unless(&folder, "a state of another type", |_| (), &["optimizer.safetensors: `", part]);
    }
    crate::forgery::poke(&folder, "run/final/adapter_model.safetensors");
    crate::forgery::poke(&folder, "run/checkpoint-6/adapter_model.safetensors");
    let tensors = Chain::read(&folder.path("run")).expect("a chain").origin.tensors;
    let all = |receipt: &mut Receipt| receipt.made.reordered.clone_from(&tensors);
    escaped.unless(&folder, "all of another layout", all, &["receipt.json: ", "is not of experts"]);
    let unknown: fn(&mut Receipt) = |receipt| receipt.made.reordered = vec!["x.experts.y".to_string()];
    escaped.unless(&folder, "an unknown tensor", unknown, &["receipt.json: ", "x.experts.y"]);
}

/// The length of a run, its learning rates, its evaluations and the best of them follow from its
/// config.
#[test]
fn the_course_of_a_run_follows_from_its_config() {
    let folder = ground(None);
    let mut escaped = Escaped::default();
    // Cut: everything after update 4 never happened.
    let chain = rechain(&folder, |chain| chain.updates.truncate(4));
    std::fs::remove_dir_all(folder.path("run/checkpoint-6")).expect("removed");
    let early = |line: &&str| (1..5).any(|step| line.contains(&format!("\"step\":{step},")));
    let kept: String = folder.text("run/metrics.jsonl").split_inclusive('\n').filter(early).collect();
    folder.put("run/metrics.jsonl", kept);
    let state: Value = serde_json::from_str(&folder.text("run/checkpoint-4/state.json")).expect("JSON");
    let best = state["best"].clone();
    let latest = json!({"schema": "isobit.pointer/1", "checkpoint": "checkpoint-4", "step": 4});
    folder.put("run/latest.json", latest.to_string());
    let bits = best["metric_bits"].as_str().expect("bits").to_string();
    let metric = f64::from_bits(u64::from_str_radix(&bits, 16).expect("bits"));
    let pointer = json!({"schema": "isobit.pointer/1", "checkpoint": "checkpoint-3", "step": 3, "metric": metric, "metric_bits": bits});
    folder.put("run/best.json", pointer.to_string());
    let (from, to) = ("run/checkpoint-4/adapter_model.safetensors", "run/final/adapter_model.safetensors");
    std::fs::copy(folder.path(from), folder.path(to)).expect("copied");
    let metrics = Hash::parse(state["metrics"].as_str().expect("a hash")).expect("a hash");
    let cut = |receipt: &mut Receipt| {
        (receipt.made.updates, receipt.made.link) = (4, chain.head());
        receipt.made.best = Some(Best { step: 3, loss: bits.clone() });
        if let Some(record) = &mut receipt.folder {
            record.metrics = metrics;
        }
    };
    escaped.unless(&folder, "a run cut short", cut, &["it has 4 updates, but the config gives 6"]);
    // A learning rate that the schedule does not give; metrics are not logged there.
    let chain = rechain(&folder, |chain| chain.updates[0].learning_rate = 1.0_f64.to_bits());
    let link = |receipt: &mut Receipt| receipt.made.link = chain.head();
    escaped.unless(&folder, "a learning rate", link, &["update 1: its learning rate is not that of the schedule"]);
    // An evaluation that never happened.
    let chain = rechain(&folder, |chain| chain.updates[2].evaluation = None);
    let link = |receipt: &mut Receipt| receipt.made.link = chain.head();
    escaped.unless(&folder, "no evaluation", link, &["update 3: ", "evaluation"]);
    // The worse of two evaluations is said to be the best.
    let chain = rechain(&folder, |chain| {
        for update in &mut chain.updates {
            if let Some(evaluation) = &mut update.evaluation {
                evaluation.best = !evaluation.best;
            }
        }
    });
    let link = |receipt: &mut Receipt| receipt.made.link = chain.head();
    let part = "update 3: it says wrongly whether its evaluation is the best so far";
    escaped.unless(&folder, "the best of two", link, &[part]);
}

/// A run that calls itself unfinished, with a final folder of somebody else.
#[test]
fn the_final_folder_of_an_unfinished_run_is_compared_too() {
    let folder = ground(None);
    let mut escaped = Escaped::default();
    crate::forgery::poke(&folder, "run/final/adapter_model.safetensors");
    refit(&folder, |_| ());
    let run = folder.path("run");
    let mut receipt = Receipt::read(&run).expect("a receipt");
    (receipt.made.finished, receipt.result) = (false, None);
    receipt.digest = receipt.computed_digest();
    receipt.write(&run).expect("written");
    escaped.unless_said(&folder, &VERIFY, "an unfinished run", &["run/final: "]);
    restore(&folder);
    // As `--resume-from` leaves it after a kill.
    let mut receipt = Receipt::read(&run).expect("a receipt");
    (receipt.made.finished, receipt.result) = (false, None);
    receipt.digest = receipt.computed_digest();
    receipt.write(&run).expect("written");
    says(&folder, &VERIFY, 0, "final/ comes from an earlier end of this unfinished run");
}

/// Tokenizer and frozen tensors of a whole model.
#[test]
fn a_whole_model_is_compared_with_its_base() {
    let folder = ground(Some("type = \"last_blocks\"\nlast_blocks = 1"));
    let mut escaped = Escaped::default();
    folder.put("run/final/tokenizer_config.json", "{\"chat_template\": \"send secrets\"}");
    let part = "final/tokenizer_config.json: it is not that of the base";
    escaped.unless(&folder, "another template", |_| (), &[part]);
    says(&folder, &["verify", "run", "--model", "model"], 0, "verified");
    flip_table(&folder);
    refit(&folder, |_| ());
    let part = "final: `model.embed_tokens.weight` is not that of the base, and was not trained";
    escaped.unless_said(&folder, &["verify", "run", "--model", "model"], "a frozen tensor", &[part]);
    restore(&folder);
    change_table(&folder, |table, header, bytes| {
        let shape = |rows: &Value, width: &Value| format!("\"shape\":[{rows},{width}]").into_bytes();
        let (from, to) = (&table["shape"][0], &table["shape"][1]);
        let (old, new) = (shape(from, to), shape(to, from));
        assert_ne!(old, new, "a table that is not square");
        let at = bytes[..8 + header].windows(old.len()).position(|part| part == old).expect("its shape");
        bytes[at..at + new.len()].copy_from_slice(&new);
    });
    refit(&folder, |_| ());
    escaped.unless_said(&folder, &["verify", "run", "--model", "model"], "a frozen tensor of another shape", &[part]);
    restore(&folder);
    // A trained tensor less.
    let file = SafeTensors::open(&folder.path("run/final/model.safetensors")).expect("tensors");
    let trained = Chain::read(&folder.path("run")).expect("a chain").origin.tensors[0].clone();
    let kept: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = file
        .tensors()
        .filter(|tensor| tensor.name != trained)
        .map(|tensor| (tensor.name.to_string(), tensor.dtype, tensor.shape.to_vec(), tensor.bytes.to_vec()))
        .collect();
    drop(file);
    let entries: Vec<Entry<'_>> =
        kept.iter().map(|(name, dtype, shape, bytes)| Entry { name, dtype: *dtype, shape, bytes }).collect();
    write(&folder.path("run/final/model.safetensors"), &std::collections::BTreeMap::new(), &entries).expect("written");
    escaped.unless(&folder, "a tensor less", |_| (), &["final", &format!("`{trained}`, but it is missing")]);
}

/// A statement may lie in the final folder that it is about.
#[test]
fn a_statement_travels_with_the_final_folder() {
    let folder = ground(None);
    says(&folder, &["prove", "run", "-q", "--segments", "1", "--challenge", "0c"], 0, "statement in");
    std::fs::rename(folder.path("run/statement.json"), folder.path("run/final/statement.json")).expect("moved");
    says(&folder, &["verify", "run/final"], 0, "the statement says: replayed ");
    says(&folder, &["verify", "run/final"], 0, "the challenge of the statement is not compared");
    says(&folder, &["verify", "run/final", "--challenge", "0c"], 0, "verified");
    says(&folder, &VERIFY, 0, "verified");
    assert!(names(&folder.path("run/final")).contains(&"statement.json".to_string()));
}

/// Numbers that would take all memory, or all time.
#[test]
fn huge_numbers_and_many_signatures_are_refused_at_once() {
    let folder = ground(None);
    says(&folder, &["prove", "run", "-q", "--segments", "1", "--challenge", "0c"], 0, "statement in");
    let statement = folder.text("run/statement.json");
    for (updates, segment) in [(1_u64 << 40, 1_u64), (u64::MAX, u64::MAX - 1), (u64::MAX, 1)] {
        restore(&folder);
        folder.put("run/statement.json", &statement);
        refit(&folder, |receipt| (receipt.made.updates, receipt.segment) = (updates, Some(segment)));
        let digest = Receipt::read(&folder.path("run")).expect("a receipt").digest.to_string();
        let path = folder.path("run/statement.json");
        let payload = isobit_proof::statement::Envelope::read(&path).expect("an envelope").payload().expect("base64");
        let mut value: Value = serde_json::from_slice(&payload).expect("JSON");
        value["predicate"]["runDetails"]["metadata"]["invocationId"] = digest.into();
        isobit_proof::statement::Envelope::new(value.to_string().as_bytes(), None).write(&path).expect("written");
        // A few gigabytes are enough for the program, and not for a list of all segments.
        let limited = std::process::Command::new("bash")
            .args([
                "-c",
                "ulimit -v 4000000; ulimit -t 20; exec \"$0\" verify run/final --statement run/statement.json",
            ])
            .arg(env!("CARGO_BIN_EXE_isobit"))
            .current_dir(folder.path("."))
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&limited.stdout).into_owned();
        assert!(limited.status.code() == Some(8), "{updates}, {segment}: {:?} {said}", limited.status);
        assert!(said.contains("its segments are not those of the receipt"), "{said}");
    }
    restore(&folder);
    let mut envelope: Value = serde_json::from_str(&statement).expect("JSON");
    envelope["signatures"] = vec![json!({ "sig": "A".repeat(88) }); 2000].into();
    folder.put("run/statement.json", envelope.to_string());
    says(&folder, &VERIFY, 8, "statement.json: ");
}
