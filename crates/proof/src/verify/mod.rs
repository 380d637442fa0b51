//! Checks what a run left behind against its record, by reading alone: files, manifests, chain and
//! metrics; and the base model and the data, if they are given.
//!
//! Everything wrong is listed, each with the file it is in. What a crash of an unfinished run may
//! leave is a note.

mod folder;
mod inputs;
mod metrics;
mod receipt;
mod small_files;
mod state;
mod tensors;

pub use inputs::{check_base, check_data};
pub use tensors::check_frozen;

use crate::chain::Chain;
use crate::error::FileError;
use crate::hash::{FileRecord, Hash, Manifest};
use crate::json;
use crate::layout::{ADAPTER, ADAPTER_CONFIG, BESIDE_RESULT, Holds, METRICS, MODEL};
use crate::receipt::{Made, NAME as RECEIPT, Receipt, identity_digest};
use crate::statement::Reexecution;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub path: PathBuf,
    pub what: String,
}

/// What kind of folder was checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    Run,
    Final,
    /// Any with a manifest and without a receipt.
    #[default]
    Folder,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Final => "final",
            Self::Folder => "folder",
        }
    }
}

/// What was checked, and what was found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub kind: Kind,
    pub receipt: Option<Receipt>,
    /// Of a run folder, if it is intact.
    pub chain: Option<Chain>,
    /// Files whose bytes were compared.
    pub files: usize,
    pub updates: u64,
    pub checkpoints: usize,
    /// What a checked statement says was replayed.
    pub replayed: Option<Reexecution>,
    pub findings: Vec<Finding>,
    pub notes: Vec<String>,
}

impl Report {
    /// A finding is named once, however many checks come upon it.
    pub(crate) fn add_finding(&mut self, path: &Path, what: impl Into<String>) {
        let finding = Finding { path: path.to_path_buf(), what: what.into() };
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    /// What was read, or None if it is damaged, which is a finding. Any other failure stops.
    pub(crate) fn damage_as_finding<T>(
        &mut self,
        path: &Path,
        result: Result<T, FileError>,
    ) -> Result<Option<T>, FileError> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(FileError::Missing { .. }) => {
                self.add_finding(path, "it is missing");
                Ok(None)
            }
            Err(FileError::Malformed { path, what }) => {
                self.add_finding(&path, format!("it is malformed: {what}"));
                Ok(None)
            }
            Err(FileError::Altered { path, what }) => {
                self.add_finding(&path, what);
                Ok(None)
            }
            Err(FileError::NotRegular { path, found }) => {
                self.add_finding(&path, format!("it is {found}, not a regular file"));
                Ok(None)
            }
            Err(FileError::TooLarge { path, bytes, limit }) => {
                self.add_finding(&path, format!("it has {bytes} bytes or more; the limit is {limit}"));
                Ok(None)
            }
            Err(error) if error.is_damage() => {
                self.add_finding(path, error.to_string());
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// Checks a run folder, a final folder, or any folder with a manifest.
pub fn verify(path: &Path) -> Result<Report, FileError> {
    let found = std::fs::metadata(path).map_err(|error| FileError::from_io("read", path, error))?;
    if !found.is_dir() {
        return Err(FileError::malformed(path, "it is a file; name a run folder or a final folder"));
    }
    let has = |name: &str| path.join(name).symlink_metadata().is_ok();
    if has(Manifest::NAME) {
        return final_folder(path);
    }
    if has(RECEIPT) || has(crate::chain::NAME) || has(METRICS) {
        return folder::run(path);
    }
    Err(FileError::Missing { path: path.join(RECEIPT) })
}

/// A folder with a manifest, and possibly a receipt.
fn final_folder(path: &Path) -> Result<Report, FileError> {
    let mut report = Report::default();
    let Some(manifest) = manifest(&mut report, path, &BESIDE_RESULT)? else { return Ok(report) };
    if !manifest.files.contains_key(RECEIPT) {
        report.notes.push("there is no receipt in it: files are compared with the manifest alone".to_string());
        return Ok(report);
    }
    report.kind = Kind::Final;
    let read = Receipt::read(path);
    let Some(receipt) = report.damage_as_finding(&path.join(RECEIPT), read)? else { return Ok(report) };
    receipt::check(&mut report, &path.join(RECEIPT), &receipt);
    if receipt.folder.is_some() || receipt.environment.is_some() {
        let what = "it has parts that the receipt of a final folder does not have";
        report.add_finding(&path.join(RECEIPT), what);
    }
    check_result(&mut report, path, &manifest, &receipt);
    report.updates = receipt.made.updates;
    report.receipt = Some(receipt);
    Ok(report)
}

/// The manifest of a folder, if it is intact. Every file that differs from it is a finding, but for
/// those that may lie beside.
fn manifest(report: &mut Report, folder: &Path, beside: &[&str]) -> Result<Option<Manifest>, FileError> {
    let path = folder.join(Manifest::NAME);
    let Some(manifest) = report.damage_as_finding(&path, Manifest::read(folder))? else { return Ok(None) };
    // The earlier form lists files only, and is not written any more.
    let text = json::read_text(&path)?;
    if manifest.run.is_some() && text != manifest.to_text() {
        report.add_finding(&path, "it is not written as Isobit writes it");
    }
    for name in manifest.listed_or_present(folder)? {
        if beside.contains(&name.as_str()) && !manifest.files.contains_key(&name) {
            continue;
        }
        let path = folder.join(&name);
        if let Some(what) = manifest.wrong_size(folder, &name)? {
            report.add_finding(&path, what);
            continue;
        }
        report.files += 1;
        let wrong = manifest.wrong_content(folder, &name);
        if let Some(what) = report.damage_as_finding(&path, wrong)?.flatten() {
            report.add_finding(&path, what);
        }
    }
    Ok(Some(manifest))
}

/// A manifest names the run and the base of its receipt: commands warn by it about another base.
fn check_origin(report: &mut Report, folder: &Path, manifest: &Manifest, made: &Made) {
    let base = made.identity.get("base").and_then(|digits| Hash::parse(digits));
    let expected = (Some(identity_digest(&made.identity)), base, made.identity.get("load_in_4bit"));
    if (manifest.run, manifest.base, manifest.load_in_4bit.as_ref()) != expected {
        report.add_finding(&folder.join(Manifest::NAME), "its run or its base is not that of the receipt");
    }
}

/// That a folder has these files and no others.
fn check_names<'a>(
    report: &mut Report,
    folder: &Path,
    found: impl Iterator<Item = &'a String>,
    (expected, whose): (&[&str], &str),
) {
    let found: BTreeSet<&str> = found.map(String::as_str).collect();
    for name in found.iter().filter(|name| !expected.contains(name)) {
        report.add_finding(&folder.join(name), format!("it does not belong to {whose}"));
    }
    for name in expected.iter().filter(|name| !found.contains(*name)) {
        report.add_finding(&folder.join(name), "it is missing");
    }
}

/// The weights of a whole model have one place: other programs might load an adapter that lies
/// beside, or several files in place of the one.
fn check_model_names(report: &mut Report, folder: &Path, result: &BTreeMap<String, FileRecord>) {
    let is_single = result.contains_key(MODEL);
    let is_of_several = |name: &str| name != MODEL && name.contains(".safetensors");
    let is_beside = |name: &&String| name.starts_with("adapter_") || (is_single && is_of_several(name));
    for name in result.keys().filter(is_beside) {
        report.add_finding(&folder.join(name), "it does not belong to the model");
    }
}

/// The files of a final folder are those that the receipt names: of an adapter two, and of a model
/// the tokenizer as it is in the base.
fn check_result(report: &mut Report, folder: &Path, manifest: &Manifest, receipt: &Receipt) {
    let Some(result) = &receipt.result else {
        report.add_finding(&folder.join(RECEIPT), "it names no files of the final folder");
        return;
    };
    check_origin(report, folder, manifest, &receipt.made);
    let holds = Holds::by_config(&receipt.made.config);
    match holds {
        Holds::Adapter => check_names(report, folder, result.keys(), (&[ADAPTER, ADAPTER_CONFIG], "an adapter")),
        Holds::Model => check_model_names(report, folder, result),
    }
    let is_copied = |name: &str| holds == Holds::Model && receipt.made.tokenizer.contains_key(name);
    let copied = result.iter().filter(|(name, _)| is_copied(name));
    for (name, _) in copied.filter(|(name, record)| receipt.made.tokenizer.get(*name) != Some(record)) {
        report.add_finding(&folder.join(name), "it is not that of the base, by the receipt");
    }
    let names: BTreeSet<&String> = result.keys().chain(manifest.files.keys()).collect();
    for name in names.into_iter().filter(|name| *name != RECEIPT) {
        if result.get(name) != manifest.files.get(name) {
            report.add_finding(&folder.join(name), "the manifest and the receipt record different contents of it");
        }
    }
}
