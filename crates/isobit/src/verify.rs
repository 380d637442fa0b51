//! `isobit verify`: checks a run folder or a final folder against its record, and the base model
//! and data if they are named. It only reads; nothing is computed again.

use crate::Failure;
use isobit_proof::statement::{self, PublicKey};
use isobit_proof::verify::{self, Finding, Report};
use isobit_training::checkpoint::{FINAL, RESOLVED};
use isobit_training::config;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

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
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let report = checked(arguments)?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let printed = if arguments.json { print_json(&mut out, arguments, &report) } else { print_text(&mut out, &report) };
    printed.and_then(|()| out.flush()).map_err(|error| Failure::output(&error))?;
    match report.findings.len() {
        0 => Ok(()),
        _ => Err(Failure::printed(8)),
    }
}

fn checked(arguments: &Arguments) -> Result<Report, Failure> {
    let mut report = verify::verify(&arguments.run)?;
    if report.kind == "run" {
        check_config(&mut report, &arguments.run);
    }
    let beside = arguments.run.join(statement::NAME);
    let statement = arguments.statement.clone().or(beside.is_file().then_some(beside));
    if arguments.key.is_some() && statement.is_none() {
        let message = format!("{} has no statement", arguments.run.display());
        return Err(Failure::usage(message, "`isobit prove` writes one; name it with `--statement`"));
    }
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
        verify::check_base(&mut report, &receipt, model)?;
    }
    if let Some(path) = &statement {
        let key = arguments.key.as_deref().map(PublicKey::read).transpose()?;
        let folder = if report.kind == "run" { arguments.run.join(FINAL) } else { arguments.run.clone() };
        let checked = statement::check(&mut report, path, &receipt, &folder, key.as_ref());
        checked?;
    }
    for file in &arguments.data {
        verify::check_data(&mut report, &receipt, file)?;
    }
    Ok(report)
}

/// The config is the one whose digest the chain begins with.
fn check_config(report: &mut Report, folder: &Path) {
    let Some(receipt) = &report.receipt else { return };
    let path = folder.join(RESOLVED);
    let what = match config::read(&path, &[]) {
        Ok(settled) if receipt.made.identity.get("run") == Some(&settled.run.digest()) => return,
        Ok(settled) => {
            let (ours, recorded) = (settled.run.influences(), &receipt.made.config);
            let key = ours.keys().chain(recorded.keys()).find(|key| ours.get(*key) != recorded.get(*key));
            let shown = |value: Option<&String>| value.map_or("not set".to_string(), Clone::clone);
            key.map_or("it is not the config of the run".to_string(), |key| {
                format!("`{key}` is {}, but the run's was {}", shown(ours.get(key)), shown(recorded.get(key)))
            })
        }
        // A missing or changed file has been found by its hash.
        Err(_) => return,
    };
    report.findings.push(Finding { path, what });
}

fn print_text(out: &mut impl Write, report: &Report) -> std::io::Result<()> {
    for note in &report.notes {
        writeln!(out, "note: {note}")?;
    }
    for Finding { path, what } in &report.findings {
        writeln!(out, "{}: {what}", path.display())?;
    }
    let count = |number: u64, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
    let mut words = vec![count(report.files as u64, "file")];
    if report.kind == "run" {
        words.push(count(report.updates, "update"));
        words.push(count(report.checkpoints as u64, "checkpoint"));
    }
    let words = words.join(", ");
    match report.findings.len() {
        0 => writeln!(out, "verified: {words}")?,
        findings => writeln!(out, "not as recorded: {} in {words}", count(findings as u64, "finding"))?,
    }
    if let (Some(receipt), true) = (&report.receipt, report.findings.is_empty()) {
        let state = if receipt.made.finished { "finished" } else { "unfinished" };
        writeln!(out, "receipt {} of {} ({state})", receipt.digest, count(receipt.made.updates, "update"))?;
    }
    Ok(())
}

fn print_json(out: &mut impl Write, arguments: &Arguments, report: &Report) -> std::io::Result<()> {
    let finding = |Finding { path, what }: &Finding| json!({ "file": path.display().to_string(), "what": what });
    let receipt = report.receipt.as_ref();
    let object = json!({
        "schema": "isobit.verify/1", "folder": arguments.run.display().to_string(), "kind": report.kind,
        "ok": report.findings.is_empty(), "files": report.files, "updates": report.updates,
        "checkpoints": report.checkpoints, "findings": report.findings.iter().map(finding).collect::<Vec<_>>(),
        "notes": report.notes, "receipt": receipt.map(|receipt| receipt.digest),
        "link": receipt.map(|receipt| receipt.made.link), "finished": receipt.map(|receipt| receipt.made.finished),
    });
    writeln!(out, "{object}")
}
