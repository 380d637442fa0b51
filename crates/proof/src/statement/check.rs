//! Checks a statement: its signature, that it is about the receipt and the files beside it, and
//! that what it says was replayed is what its challenge chooses.
//!
//! It does not replay: who signed says that the replay agreed.

use super::envelope::Envelope;
use super::key::PublicKey;
use super::segments::{Challenge, Segment, chosen};
use super::{PREDICATE, TYPE, definition, sha256};
use crate::error::FileError;
use crate::json::UniqueValue;
use crate::receipt::{self, Receipt};
use crate::verify::Report;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Checks a statement against the receipt of the run and the files of its final folder, and the
/// signature against a key, if one is given.
pub fn check(
    report: &mut Report,
    path: &Path,
    receipt: &Receipt,
    folder: &Path,
    key: Option<&PublicKey>,
) -> Result<(), FileError> {
    let Some(envelope) = report.damage_as_finding(path, Envelope::read(path))? else { return Ok(()) };
    report.files += 1;
    match key {
        Some(key) if !envelope.is_signed_by(key) => report.add_finding(path, "it is not signed by the given key"),
        Some(key) => report.notes.push(format!("the statement is signed by key {}", key.id())),
        None if envelope.is_signed() => {
            report.notes.push("the signature of the statement is not checked: name a key with `--key`".to_string());
        }
        None => report.notes.push("the statement is not signed".to_string()),
    }
    let statement = envelope.payload().and_then(|payload| serde_json::from_slice::<UniqueValue>(&payload).ok());
    let statement = statement.map(|UniqueValue(statement)| statement);
    let is_one = |statement: &Value| statement["_type"] == TYPE && statement["predicateType"] == PREDICATE;
    let Some(statement) = statement.filter(is_one) else {
        report.add_finding(path, "its payload is not an in-toto statement with SLSA provenance");
        return Ok(());
    };
    let predicate = &statement["predicate"];
    let details = &predicate["runDetails"];
    if details["metadata"]["invocationId"].as_str() != Some(receipt.digest.to_string().as_str()) {
        report.add_finding(path, "it is about another receipt");
        return Ok(());
    }
    let byproducts = details["byproducts"].as_array().map_or(&[][..], Vec::as_slice);
    let chains = byproducts.iter().filter(|one| one["name"] == "chain").map(|one| &one["digest"]["blake3"]);
    if !chains.eq([receipt.made.link.to_string().as_str()]) {
        report.add_finding(path, "it is about another chain");
    }
    if predicate["buildDefinition"] != definition(receipt) {
        report.add_finding(path, "its inputs are not those of the receipt");
    }
    if let Some(what) = wrong_choice(&predicate["isobit_reexecution"], receipt) {
        report.add_finding(path, what);
    }
    check_subjects(report, path, &statement["subject"], receipt, folder)
}

/// Names and SHA-256 of the files of the final folder.
fn check_subjects(
    report: &mut Report,
    path: &Path,
    subjects: &Value,
    receipt: &Receipt,
    folder: &Path,
) -> Result<(), FileError> {
    let subjects = subjects.as_array().map_or(&[][..], Vec::as_slice);
    let mut names: BTreeSet<&str> = receipt.result.iter().flat_map(BTreeMap::keys).map(String::as_str).collect();
    names.insert(receipt::NAME);
    let mut named = BTreeSet::new();
    for subject in subjects {
        let name = subject["name"].as_str().unwrap_or_default();
        if !names.contains(name) {
            report.add_finding(path, format!("it names {name:?}, which is no file of the run"));
        } else if !named.insert(name) {
            report.add_finding(path, format!("it names {name} twice"));
        }
    }
    for name in names {
        let Some(subject) = subjects.iter().find(|subject| subject["name"] == name) else {
            report.add_finding(path, format!("it does not name {name}"));
            continue;
        };
        let file = folder.join(name);
        let Some(found) = report.damage_as_finding(&file, sha256(&file))? else { continue };
        if subject["digest"]["sha256"].as_str() != Some(found.as_str()) {
            report.add_finding(&file, "the statement has another SHA-256 of it");
        }
    }
    Ok(())
}

/// What is wrong with the segments it lists: they cover the run without gaps, and a given challenge
/// chooses exactly those that were replayed.
fn wrong_choice(said: &Value, receipt: &Receipt) -> Option<&'static str> {
    let Some(listed) = said["segments"].as_array() else { return Some("it does not say what was replayed") };
    let (mut segments, mut done) = (Vec::new(), 0_u64);
    for segment in listed {
        let [first, last, from] = ["first", "last", "starts_after"].map(|key| segment[key].as_u64());
        match (first, last) {
            (Some(first), Some(last)) if done.checked_add(1) == Some(first) && last >= first => {
                segments.push(Segment { first, last, from: from.unwrap_or(0) });
                done = last;
            }
            _ => return Some("its segments do not follow one another"),
        }
    }
    if done != receipt.made.updates || said["updates"].as_u64() != Some(done) {
        return Some("its segments are not the updates of the run");
    }
    let is_replayed = |segment: &Value| segment["reexecuted"] == true;
    let replayed: Vec<usize> = (0..listed.len()).filter(|at| is_replayed(&listed[*at])).collect();
    let updates: u64 = replayed.iter().map(|at| segments[*at].updates()).sum();
    if said["reexecuted_updates"].as_u64() != Some(updates) {
        return Some("its count of replayed updates is not that of its segments");
    }
    let challenge = match said["challenge"]["hex"].as_str() {
        Some(text) => Challenge::Given(text.to_string()),
        None => Challenge::None,
    };
    let expected = chosen(&challenge, receipt.made.link, segments.len(), replayed.len());
    (replayed != expected).then_some("the challenge does not choose the segments that it lists as replayed")
}
