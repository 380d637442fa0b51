//! `isobit verify`: checks a run folder or a final folder against its record, and the base model
//! and data if they are named. It only reads; nothing is computed again.

use crate::Failure;
use crate::model::located;
use crate::stderr::tell;
use isobit_proof::layout::{Holds, checkpoint_step};
use isobit_proof::name::{counted, harmless};
use isobit_proof::statement::{self, Asked, Challenge, PublicKey, Reexecution};
use isobit_proof::verify::{self, Finding, Kind, Report};
use isobit_proof::{FileError, Lock, receipt};
use isobit_training::checkpoint::{FINAL, RESOLVED};
use isobit_training::config::Adapter;
use isobit_training::{config, course};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Characters of a line: names in it come from files.
const SHOWN_MAX: usize = 4096;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// A run folder, or the final folder of a run
    run: PathBuf,
    /// Also check that this is the base model of the run
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// Also check that these are data files of the run
    #[arg(long, value_name = "FILE", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Also check this statement of `isobit prove` [default: statement.json in the folder, if it is
    /// there]
    #[arg(long, value_name = "FILE")]
    statement: Option<PathBuf>,
    /// The statement must be signed with this key, Ed25519 or ECDSA on P-256: a public key in PEM
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// The statement must answer this challenge, the digits that were given to `prove`, or replay
    /// everything
    #[arg(long, value_name = "HEX", value_parser = challenge)]
    challenge: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let before = Lock::in_use(&arguments.run);
    let report = match (checked(arguments), before.or_else(|| Lock::in_use(&arguments.run))) {
        (report, None) => report?,
        (Ok(mut report), Some(running)) if report.findings.is_empty() => {
            report.notes.push(format!("{running}: what it has written so far was checked"));
            report
        }
        // Half-written files cannot be told from damaged ones.
        (_, Some(running)) => {
            let message = format!("{running}, which changes its files while they are read");
            return Err(Failure::usage(message, "wait for that run, or verify one of its checkpoints"));
        }
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let printed = if arguments.json { print_json(&mut out, arguments, &report) } else { print_text(&mut out, &report) };
    printed.and_then(|()| out.flush()).map_err(|error| Failure::output(&error))?;
    if report.findings.is_empty() {
        return Ok(());
    }
    if let Some(hint) = way_out(arguments, &report).filter(|_| !arguments.json) {
        tell(&format!("hint: {hint}"));
    }
    Err(Failure::printed(8))
}

/// What to do about damaged files of the folder; nothing about other models, data and statements.
fn way_out(arguments: &Arguments, report: &Report) -> Option<&'static str> {
    let is_own = |Finding { path, .. }: &Finding| path.starts_with(&arguments.run) && !path.ends_with(statement::NAME);
    report.findings.iter().find(|finding| is_own(finding))?;
    Some(match report.kind {
        Kind::Run => {
            "put the files back from a copy; or `train --resume` writes final/ and the receipt again, and \
             `--resume-from checkpoint-N` goes back to a checkpoint that is intact"
        }
        Kind::Final | Kind::Folder => "copy the folder again from where it was made",
    })
}

/// A challenge, as it was typed.
pub(crate) fn challenge(text: &str) -> Result<String, String> {
    Some(text.to_lowercase())
        .filter(|text| statement::is_challenge(text))
        .ok_or("write 1 to 128 hexadecimal digits".to_string())
}

/// Checks a folder by what lies in it.
pub(crate) fn folder(path: &Path) -> Result<Report, Failure> {
    if path.is_file() {
        let message = format!("{} is a file", path.display());
        return Err(Failure::usage(message, "name a run folder, or the final folder of a run"));
    }
    let existed = path.exists();
    let report = verify::verify(path);
    if path.is_dir()
        && matches!(&report, Err(FileError::Missing { path: missing }) if *missing == path.join(receipt::NAME))
    {
        let message = format!("{} is neither a run folder nor a final folder", path.display());
        return Err(Failure::usage(message, "name the folder that `train` wrote, where receipt.json is"));
    }
    if existed && !path.exists() {
        let message = format!("{} was removed while it was read", path.display());
        return Err(Failure::usage(message, "a run prunes its checkpoints; name one that stays"));
    }
    let mut report = report?;
    if report.kind == Kind::Run {
        if has_saved_nothing(path) {
            let message = format!("{} has saved nothing yet: no checkpoint and no receipt", path.display());
            return Err(Failure::usage(message, "start the run again, and verify it after it has saved"));
        }
        check_config(&mut report, path);
    }
    Ok(report)
}

/// Whether a run ended before it first saved.
fn has_saved_nothing(folder: &Path) -> bool {
    let Ok(mut entries) = std::fs::read_dir(folder) else { return false };
    let is_saved = |name: &std::ffi::OsStr| {
        name == receipt::NAME || name == FINAL || name.to_str().and_then(checkpoint_step).is_some()
    };
    !entries.any(|entry| entry.map_or(true, |entry| is_saved(&entry.file_name())))
}

/// The statement to check, if there is one.
fn statement_of(arguments: &Arguments) -> Result<Option<PathBuf>, Failure> {
    let beside = arguments.run.join(statement::NAME);
    let statement = arguments.statement.clone().or(beside.symlink_metadata().is_ok().then_some(beside));
    if let Some(named) = arguments.statement.as_ref().filter(|named| !named.exists()) {
        let message = format!("{} does not exist", named.display());
        return Err(Failure::usage(message, "check the path; `isobit prove` writes statements"));
    }
    if statement.is_none() && (arguments.key.is_some() || arguments.challenge.is_some()) {
        let message = format!("{} has no statement", arguments.run.display());
        return Err(Failure::usage(message, "`isobit prove` writes one; name it with `--statement`"));
    }
    Ok(statement)
}

/// Something that is not a key is a mistake of the command line, not damage.
pub(crate) fn key<T>(read: Result<T, FileError>) -> Result<T, Failure> {
    read.map_err(|error| match error {
        FileError::Malformed { path, what } => Failure::usage(
            format!("{}: {what}", path.display()),
            "`openssl genpkey -algorithm ed25519` makes a key, `openssl pkey -pubout` its public key",
        ),
        other => other.into(),
    })
}

fn checked(arguments: &Arguments) -> Result<Report, Failure> {
    let mut report = folder(&arguments.run)?;
    let statement = statement_of(arguments)?;
    let signer = arguments.key.as_deref().map(|path| key(PublicKey::read(path))).transpose()?;
    if arguments.model.is_none() && arguments.data.is_empty() && statement.is_none() {
        return Ok(report);
    }
    let Some(receipt) = report.receipt.clone() else {
        if report.findings.is_empty() {
            let message = format!("{} has no receipt to compare a model or data with", arguments.run.display());
            return Err(Failure::usage(message, "name a run folder, or its final folder"));
        }
        return Ok(report);
    };
    if let Some(model) = &arguments.model {
        if !model.is_dir() {
            let message = format!("{} is not a folder", model.display());
            return Err(Failure::usage(message, "name the folder of the base model"));
        }
        let model = located(model);
        verify::check_base(&mut report, &receipt, &model)?;
        match report.kind {
            Kind::Run => verify::check_frozen(&mut report, &arguments.run, &model)?,
            _ if Holds::by_config(&receipt.made.config) == Holds::Model => {
                let what = "tensors that were not trained are not compared with the base: a final folder alone does \
                            not say which they are; verify the run folder";
                report.notes.push(what.to_string());
            }
            _ => (),
        }
    }
    if let Some(path) = &statement {
        let folder = if report.kind == Kind::Run { arguments.run.join(FINAL) } else { arguments.run.clone() };
        let is_named = arguments.statement.is_some() || arguments.key.is_some() || arguments.challenge.is_some();
        let asked = Asked { key: signer.as_ref(), challenge: arguments.challenge.as_deref(), is_named };
        statement::check(&mut report, path, &receipt, &folder, asked)?;
    }
    for file in &arguments.data {
        verify::check_data(&mut report, &receipt, file)?;
    }
    Ok(report)
}

/// What a run is made of, as far as this program knows it.
fn check_identity(report: &mut Report, path: &Path, run: &config::Run, identity: &BTreeMap<String, String>) {
    if identity.get("numerics").is_none_or(|version| version != isobit_numerics::VERSION) {
        let what = format!(
            "the run has another numerics version than this program (`{}`), which cannot replay it",
            isobit_numerics::VERSION
        );
        report.notes.push(what);
    }
    let starts = matches!(&run.adapter, Adapter::Lora(lora) if lora.resume_from.is_some());
    if starts != identity.contains_key("start") {
        let what = if starts {
            "it names a starting adapter, but the receipt has none"
        } else {
            "it names no starting adapter, but the receipt has one"
        };
        report.findings.push(Finding { path: path.to_path_buf(), what: what.to_string() });
    }
}

/// The config is the one whose digest the chain begins with, and the chain takes the course that it
/// gives.
fn check_config(report: &mut Report, folder: &Path) {
    let Some(receipt) = report.receipt.clone() else { return };
    let path = folder.join(RESOLVED);
    let (made, has_finding) = (&receipt.made, report.findings.iter().any(|finding| finding.path == path));
    let what = match config::read(&path, &[]) {
        Ok(settled)
            if made.identity.get("run") == Some(&settled.run.digest()) && made.config == settled.run.influences() =>
        {
            check_identity(report, &path, &settled.run, &made.identity);
            // Receipts of version 1 do not say how many rows there are.
            let (Some(chain), Some(rows)) = (&report.chain, made.rows) else { return };
            if let Some(what) = course::departure(&settled.run, rows, chain, made.finished) {
                report.findings.push(Finding { path: folder.join(isobit_proof::chain::NAME), what });
            }
            return;
        }
        Ok(settled) => {
            let (ours, recorded) = (settled.run.influences(), &made.config);
            let key = ours.keys().chain(recorded.keys()).find(|key| ours.get(*key) != recorded.get(*key));
            let shown = |value: Option<&String>| value.map_or("not set".to_string(), Clone::clone);
            key.map_or("it is not the config of the run".to_string(), |key| {
                format!("`{key}` is {}, but the run's was {}", shown(ours.get(key)), shown(recorded.get(key)))
            })
        }
        // What cannot be read may have been found by its hash.
        Err(_) if has_finding => return,
        Err(error) => error.to_string(),
    };
    report.findings.push(Finding { path, what });
}

fn print_text(out: &mut impl Write, report: &Report) -> std::io::Result<()> {
    for note in &report.notes {
        writeln!(out, "note: {}", harmless(note, SHOWN_MAX))?;
    }
    for Finding { path, what } in &report.findings {
        let line = format!("{}: {what}", path.display());
        writeln!(out, "{}", harmless(&line, SHOWN_MAX))?;
    }
    if let Some(done) = &report.replayed {
        writeln!(out, "the statement says: {}", done.described())?;
    }
    let mut words = vec![counted(report.files as u64, "file")];
    if report.kind == Kind::Run {
        words.push(counted(report.updates, "update"));
        words.push(counted(report.checkpoints as u64, "checkpoint"));
    }
    let words = words.join(", ");
    match report.findings.len() {
        0 => writeln!(out, "verified: {words}")?,
        findings => writeln!(out, "not as recorded: {} in {words}", counted(findings as u64, "finding"))?,
    }
    if let (Some(receipt), true) = (&report.receipt, report.findings.is_empty()) {
        let state = if receipt.made.finished { "finished" } else { "unfinished" };
        writeln!(out, "receipt {} of {} ({state})", receipt.digest, counted(receipt.made.updates, "update"))?;
    }
    Ok(())
}

fn print_json(out: &mut impl Write, arguments: &Arguments, report: &Report) -> std::io::Result<()> {
    let finding = |Finding { path, what }: &Finding| json!({ "file": path.display().to_string(), "what": what });
    let receipt = report.receipt.as_ref();
    let object = json!({
        "schema": "isobit.verify/1", "folder": arguments.run.display().to_string(), "kind": report.kind.name(),
        "ok": report.findings.is_empty(), "files": report.files, "updates": report.updates,
        "checkpoints": report.checkpoints, "findings": report.findings.iter().map(finding).collect::<Vec<_>>(),
        "notes": report.notes, "receipt": receipt.map(|receipt| receipt.digest),
        "statement": report.replayed.as_ref().map(statement_object),
        "link": receipt.map(|receipt| receipt.made.link), "finished": receipt.map(|receipt| receipt.made.finished),
    });
    writeln!(out, "{object}")
}

/// What a statement says was replayed.
fn statement_object(done: &Reexecution) -> Value {
    let challenge = match &done.challenge {
        Challenge::Given(text) => Some(text),
        Challenge::None => None,
    };
    json!({ "segments": done.segments.len(), "replayed": done.replayed.len(), "updates": done.updates(),
        "chosen_by": done.chosen_by(), "challenge": challenge, "detection": done.detection() })
}
