//! Hostile files: every file that the program reads is changed, cut, emptied, or replaced by a
//! folder, a pipe, a link to itself, a device or 20 GB of nothing; then a command reads it. Any
//! documented exit code is fine, and only the output folder may change. A changed run folder is
//! refused or produces the bytes of the run.

use super::mutate::{Form, mutated};
use super::program::{self, Ended, RunPlace, words};
use super::random::Random;
use super::scene::{CHAT_TEMPLATE, SHAPES, Scene, copy, remove};
use super::{Report, Settings, run_folder};
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

const COUNT: usize = 3200;
/// Time limit of one command. The longest undisturbed one takes a fraction of a second.
const SECONDS: u64 = 20;
const OUTPUT: &str = "out";
const SPARSE_BYTES: u64 = 20 << 30;

type Line = &'static [&'static str];

const PLAN: Line = &["plan", "run.toml"];
const TRAIN: Line = &["train", "run.toml", "-q", "--set", "output_dir=out", "--set", "max_steps=2"];
const EVAL: Line = &["eval", "--model", "model", "--data", "pirate.jsonl", "--threads", "1"];
const EVAL_SHARDS: Line = &["eval", "--model", "sharded", "--data", "pirate.jsonl", "--threads", "1"];
const EVAL_CHAT: Line = &["eval", "--model", "chat", "--data", "chat.jsonl", "--threads", "1"];
const EVAL_ADAPTER: Line =
    &["eval", "--model", "model", "--adapter", "adapter", "--data", "pirate.jsonl", "--threads", "1"];
const EVAL_OURS: Line = &["eval", "--model", "model", "--adapter", "ours", "--data", "pirate.jsonl", "--threads", "1"];
const GENERATE: Line =
    &["generate", "--model", "model", "--prompt", "greet Anna:", "--max-tokens", "4", "--threads", "1"];
const GENERATE_ADAPTER: Line = &[
    "generate",
    "--model",
    "model",
    "--adapter",
    "adapter",
    "--prompt",
    "greet Anna:",
    "--max-tokens",
    "4",
    "--threads",
    "1",
];
const GENERATE_OURS: Line = &[
    "generate",
    "--model",
    "model",
    "--adapter",
    "ours",
    "--prompt",
    "greet Anna:",
    "--max-tokens",
    "4",
    "--threads",
    "1",
];
const GENERATE_CHAT: Line =
    &["generate", "--model", "chat", "--chat", "--prompt", "hi", "--max-tokens", "4", "--threads", "1"];
const CHECK: Line = &["data", "check", "--model", "model", "--data", "pirate.jsonl"];
const CHECK_CHAT: Line = &["data", "check", "--model", "chat", "--data", "chat.jsonl"];
const SHOW_CHAT: Line = &["data", "show", "--model", "chat", "--data", "chat.jsonl", "--tokens"];
const DIFF: Line = &["diff", "adapter", "ours"];
const DIFF_MODELS: Line = &["diff", "model", "sharded"];
const RESUME: Line = &["train", "run.toml", "--resume", "-q", "--set", "output_dir=out"];

/// A file, its form, and the commands that read it. `@` is the latest checkpoint.
struct Subject {
    file: &'static str,
    form: Form,
    commands: &'static [Line],
    /// A manifest lists it: any changed byte is detected.
    listed: bool,
}

const fn subject(file: &'static str, form: Form, commands: &'static [Line]) -> Subject {
    Subject { file, form, commands, listed: false }
}

const fn listed(file: &'static str, form: Form, commands: &'static [Line]) -> Subject {
    Subject { file, form, commands, listed: true }
}

const SUBJECTS: [Subject; 24] = [
    subject("model/config.json", Form::Json, &[PLAN, TRAIN, EVAL, GENERATE, CHECK]),
    subject("model/model.safetensors", Form::Safetensors, &[PLAN, TRAIN, EVAL, GENERATE, DIFF_MODELS]),
    subject("model/tokenizer.json", Form::Json, &[CHECK, TRAIN, EVAL, GENERATE]),
    subject("model/tokenizer_config.json", Form::Json, &[CHECK, TRAIN, GENERATE]),
    subject("model/generation_config.json", Form::Json, &[GENERATE, TRAIN]),
    subject("model/quantize_config.json", Form::Json, &[PLAN, TRAIN, EVAL]),
    subject("sharded/model.safetensors.index.json", Form::Json, &[EVAL_SHARDS, DIFF_MODELS]),
    subject("sharded/model-2-of-00002.safetensors", Form::Safetensors, &[EVAL_SHARDS, DIFF_MODELS]),
    subject("chat/tokenizer_config.json", Form::Json, &[CHECK_CHAT, EVAL_CHAT, GENERATE_CHAT]),
    subject("chat/chat_template.jinja", Form::Template, &[CHECK_CHAT, SHOW_CHAT, GENERATE_CHAT]),
    subject("chat.jsonl", Form::JsonLines, &[CHECK_CHAT, SHOW_CHAT, EVAL_CHAT]),
    subject("pirate.jsonl", Form::JsonLines, &[CHECK, TRAIN, EVAL]),
    subject("run.toml", Form::Toml, &[PLAN, TRAIN]),
    subject("adapter/adapter_config.json", Form::Json, &[EVAL_ADAPTER, GENERATE_ADAPTER, DIFF]),
    subject("adapter/adapter_model.safetensors", Form::Safetensors, &[EVAL_ADAPTER, GENERATE_ADAPTER, DIFF]),
    listed("ours/adapter_model.safetensors", Form::Safetensors, &[EVAL_OURS, GENERATE_OURS]),
    listed("ours/adapter_config.json", Form::Json, &[EVAL_OURS, GENERATE_OURS]),
    subject("out/latest.json", Form::Json, &[RESUME]),
    subject("out/metrics.jsonl", Form::JsonLines, &[RESUME]),
    subject("out/config.resolved.toml", Form::Toml, &[RESUME]),
    subject("out/@/MANIFEST.json", Form::Json, &[RESUME]),
    listed("out/@/state.json", Form::Json, &[RESUME]),
    listed("out/@/adapter_model.safetensors", Form::Safetensors, &[RESUME]),
    listed("out/@/optimizer.safetensors", Form::Safetensors, &[RESUME]),
];

/// Optional files of a model folder, and their contents if present.
const ABSENT: [(&str, &str); 3] = [
    ("model/generation_config.json", r#"{"eos_token_id": [320, 322], "temperature": 0.7, "top_p": 0.9}"#),
    ("model/quantize_config.json", r#"{"bits": 4, "group_size": 128, "desc_act": false, "sym": true}"#),
    ("chat/chat_template.jinja", CHAT_TEMPLATE),
];

/// Shared by all threads.
struct Original {
    /// The undisturbed run, and the one to resume.
    whole: PathBuf,
    stopped: PathBuf,
    checkpoint: String,
    files: BTreeMap<String, Vec<u8>>,
}

pub(crate) fn run(settings: &Settings) -> Result<Report, String> {
    let original = original(settings)?;
    let count = settings.count(COUNT);
    let findings = settings.cases(
        "files",
        |folder| {
            let place = RunPlace { scene: folder.join("scene"), logs: folder.to_path_buf() };
            remove(&place.scene)?;
            for (name, bytes) in &original.files {
                put(&place.scene.join(name), bytes)?;
            }
            Ok(place)
        },
        |case| case < count,
        |place, case| attacked(settings, &original, place, case),
    )?;
    Ok(Report { done: format!("{count} hostile files"), findings })
}

fn original(settings: &Settings) -> Result<Original, String> {
    let scene = Scene::new(settings)?;
    scene.variants()?;
    let shape = SHAPES.iter().find(|shape| shape.name == "best").ok_or("no such shape")?;
    let (whole, _) = scene.whole(shape)?;
    let (stopped, step) = scene.stopped(shape)?;
    let mut files = BTreeMap::new();
    for folder in ["model", "sharded", "chat"] {
        collect(&scene.folder.join(folder), folder, &mut files)?;
    }
    for name in ["pirate.jsonl", "chat.jsonl"] {
        files.insert(name.to_string(), run_folder::read(&scene.folder.join(name))?);
    }
    files.insert("run.toml".to_string(), shape.config().into_bytes());
    collect(&whole.join("final"), "ours", &mut files)?;
    collect(&whole.join("final"), "adapter", &mut files)?;
    files.remove("adapter/MANIFEST.json");
    Ok(Original { whole, stopped, checkpoint: format!("checkpoint-{step}"), files })
}

fn collect(folder: &Path, name: &str, files: &mut BTreeMap<String, Vec<u8>>) -> Result<(), String> {
    for file in run_folder::names(folder)? {
        files.insert(format!("{name}/{file}"), run_folder::read(&folder.join(&file))?);
    }
    Ok(())
}

fn put(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    std::fs::write(path, bytes).map_err(failed)
}

/// Changes one file, runs one command, checks everything and restores it.
fn attacked(settings: &Settings, original: &Original, place: &RunPlace, case: usize) -> Result<Vec<String>, String> {
    let mut random = Random::of(settings.seed, "files", case);
    let subject = &SUBJECTS[case % SUBJECTS.len()];
    let name = subject.file.replace('@', &original.checkpoint);
    let path = place.scene.join(&name);
    let output = place.scene.join(OUTPUT);
    let resumed = name.starts_with(OUTPUT);
    remove(&output)?;
    if resumed {
        copy(&original.stopped, &output)?;
    }
    let old = match original.files.get(&name) {
        Some(bytes) => bytes.clone(),
        None if path.exists() => run_folder::read(&path)?,
        None => ABSENT
            .iter()
            .find(|(absent, _)| *absent == name)
            .map(|(_, text)| text.as_bytes().to_vec())
            .unwrap_or_default(),
    };
    let change = changed(&mut random, subject.form, &old, &path)?;
    let command = *random.pick(subject.commands);
    let ended = program::run(&settings.program, &words(command), place, SECONDS)?;

    let mut found: Vec<String> = ended.complaint().into_iter().collect();
    let listed_change = subject.listed && change.bytes.as_ref() != Some(&old);
    found.extend(silent(&ended, listed_change, resumed, original, &output)?);
    let mut wrong = found.clone();
    if settings.case.is_none() || !wrong.is_empty() {
        wrong.extend(touched(original, place, &name, &change)?);
    }
    if settings.case.is_none() {
        restore(original, place, &name)?;
    }
    let told = |what: String| format!("{name} {}, `isobit {}`: {what}", change.how, command.join(" "));
    Ok(wrong.into_iter().map(told).collect())
}

/// Success that should have been a failure: changed bytes under a manifest, or a different run at
/// the end.
fn silent(
    ended: &Ended,
    listed_change: bool,
    resumed: bool,
    original: &Original,
    output: &Path,
) -> Result<Option<String>, String> {
    if ended.code != Some(0) {
        return Ok(None);
    }
    if listed_change {
        return Ok(Some("a file that a manifest lists was changed, and nobody noticed".to_string()));
    }
    if !resumed {
        return Ok(None);
    }
    Ok(run_folder::difference(&original.whole, output)?.map(|what| format!("finished as a different run: {what}")))
}

struct Change {
    how: String,
    /// The new contents, if it is a regular file.
    bytes: Option<Vec<u8>>,
}

/// Replaces a file with something else.
fn changed(random: &mut Random, form: Form, old: &[u8], path: &Path) -> Result<Change, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    if !random.once_in(8) {
        let large = random.once_in(4);
        let bytes = mutated(random, form, old, large);
        put(path, &bytes)?;
        return Ok(Change { how: format!("changed ({} bytes)", bytes.len()), bytes: Some(bytes) });
    }
    remove(path)?;
    let mut bytes = None;
    let how = match random.below(8) {
        0 => {
            put(path, b"")?;
            bytes = Some(Vec::new());
            "empty"
        }
        1 => {
            std::fs::create_dir(path).map_err(failed)?;
            "a folder"
        }
        2 => {
            let name = std::ffi::CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
            // SAFETY: the name ends with a zero and lives until the call returns.
            if unsafe { libc::mkfifo(name.as_ptr(), 0o600) } != 0 {
                return Err(failed(std::io::Error::last_os_error()));
            }
            "a pipe"
        }
        3 => {
            symlink(path, path).map_err(failed)?;
            "a link to itself"
        }
        4 => {
            symlink("/dev/zero", path).map_err(failed)?;
            "a link to /dev/zero"
        }
        5 => {
            symlink("nowhere", path).map_err(failed)?;
            "a link to nothing"
        }
        6 => {
            std::fs::File::create(path).and_then(|file| file.set_len(SPARSE_BYTES)).map_err(failed)?;
            "20 GB of zeros"
        }
        _ => "missing",
    };
    Ok(Change { how: how.to_string(), bytes })
}

/// Inputs that changed, and files that were not requested.
fn touched(original: &Original, place: &RunPlace, changed: &str, change: &Change) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    for (name, bytes) in original.files.iter().filter(|(name, _)| *name != changed) {
        if std::fs::read(place.scene.join(name)).ok().as_ref() != Some(bytes) {
            found.push(format!("{name} was changed"));
        }
    }
    let stands = change.bytes.as_ref().filter(|_| !changed.starts_with(OUTPUT));
    if stands.is_some_and(|bytes| std::fs::read(place.scene.join(changed)).ok().as_ref() != Some(bytes)) {
        found.push(format!("{changed} was changed"));
    }
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        for entry in run_folder::names(&place.scene.join(&folder))? {
            let name = format!("{folder}{entry}");
            let is_folder = place.scene.join(&name).symlink_metadata().is_ok_and(|found| found.is_dir());
            if name == OUTPUT || name == changed {
                continue;
            }
            if is_folder {
                folders.push(format!("{name}/"));
            } else if !original.files.contains_key(&name) {
                found.push(format!("{name} was made"));
            }
        }
    }
    Ok(found)
}

/// Restores everything as it was before the case.
fn restore(original: &Original, place: &RunPlace, changed: &str) -> Result<(), String> {
    let path = place.scene.join(changed);
    if !changed.starts_with(OUTPUT) {
        remove(&path)?;
        if let Some(bytes) = original.files.get(changed) {
            put(&path, bytes)?;
        }
    }
    for (name, bytes) in &original.files {
        if std::fs::read(place.scene.join(name)).ok().as_ref() != Some(bytes) {
            put(&place.scene.join(name), bytes)?;
        }
    }
    Ok(())
}
