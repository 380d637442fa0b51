//! Checks a statement: its signature, and every field. What it may say freely is what was replayed,
//! for which challenge, and where; from this, the receipt and the files it is made again, and must
//! be the same.
//!
//! It does not replay: who signed says that the replay agreed.

use super::envelope::Envelope;
use super::key::PublicKey;
use super::segments::{Challenge, Segment, chosen, divided};
use super::{BUILD_TYPE, PREDICATE, Reexecution, Subjects, TYPE, content};
use crate::error::FileError;
use crate::json::UniqueValue;
use crate::layout::checkpoint_step;
use crate::name::{harmless, quoted};
use crate::receipt::Receipt;
use crate::verify::Report;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What a verifier asks of a statement besides that it is true.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked<'a> {
    /// It is signed by this key.
    pub key: Option<&'a PublicKey>,
    /// It answers this challenge.
    pub challenge: Option<&'a str>,
    /// It was asked for, and does not just lie in the folder.
    pub is_named: bool,
}

/// Checks a statement against the receipt of the run and the files of its final folder.
pub fn check(
    report: &mut Report,
    path: &Path,
    receipt: &Receipt,
    folder: &Path,
    asked: Asked<'_>,
) -> Result<(), FileError> {
    let Some(envelope) = report.damage_as_finding(path, Envelope::read(path))? else { return Ok(()) };
    report.files += 1;
    if !asked.is_named && is_of_earlier_end(&envelope, receipt) {
        let what = "statement.json is about an earlier end of the run: `isobit prove` makes a new one";
        report.notes.push(what.to_string());
        return Ok(());
    }
    check_signature(report, path, &envelope, asked.key);
    let read = read_statement(&envelope, receipt);
    let read =
        read.and_then(|statement| Ok((said(&statement["predicate"]["isobit_reexecution"], receipt)?, statement)));
    let ((done, as_now), statement) = match read {
        Ok(read) => read,
        Err(what) => {
            report.add_finding(path, what);
            return Ok(());
        }
    };
    if !as_now {
        let what = "replays of the statement began after other checkpoints than those that are there now";
        report.notes.push(what.to_string());
    }
    check_challenge(report, path, &done, asked.challenge);
    if check_content(report, path, &statement, (receipt, folder, &done))? {
        report.replayed = Some(done);
    }
    Ok(())
}

/// The signature, or a note on what was not checked of it.
fn check_signature(report: &mut Report, path: &Path, envelope: &Envelope, key: Option<&PublicKey>) {
    match key {
        Some(key) if !envelope.is_signed_by(key) => report.add_finding(path, "it is not signed by the given key"),
        Some(key) => report.notes.push(format!("the statement is signed by key {}", key.id())),
        None if envelope.is_signed() => {
            report.notes.push("the signature of the statement is not checked: name a key with `--key`".to_string());
        }
        None => report.notes.push("the statement is not signed".to_string()),
    }
}

/// Whether it is about this run, with another receipt: a run that goes on, or that writes its
/// result in another type, gets one.
fn is_of_earlier_end(envelope: &Envelope, receipt: &Receipt) -> bool {
    let payload = envelope.payload();
    let statement = payload.and_then(|payload| serde_json::from_slice::<UniqueValue>(&payload).ok());
    let Some(UniqueValue(statement)) = statement else { return false };
    let predicate = &statement["predicate"];
    let identity = &predicate["buildDefinition"]["internalParameters"]["identity"];
    let about = predicate["runDetails"]["metadata"]["invocationId"].as_str();
    *identity == json!(receipt.made.identity) && about.is_some_and(|digest| digest != receipt.digest.to_string())
}

/// The statement of this version about this receipt.
fn read_statement(envelope: &Envelope, receipt: &Receipt) -> Result<Value, String> {
    let payload = envelope.payload();
    let statement = payload.and_then(|payload| serde_json::from_slice::<UniqueValue>(&payload).ok());
    let is_one = |statement: &Value| statement["_type"] == TYPE && statement["predicateType"] == PREDICATE;
    let Some(statement) = statement.map(|UniqueValue(statement)| statement).filter(is_one) else {
        return Err("its payload is not an in-toto statement with SLSA provenance".to_string());
    };
    let predicate = &statement["predicate"];
    if predicate["buildDefinition"]["buildType"] != BUILD_TYPE {
        return Err(format!("it is of another version than `{BUILD_TYPE}`: prove the run again"));
    }
    if predicate["runDetails"]["metadata"]["invocationId"].as_str() != Some(&receipt.digest.to_string()) {
        return Err("it is about another receipt".to_string());
    }
    Ok(statement)
}

/// The challenge that it answers against the one that a verifier gave.
fn check_challenge(report: &mut Report, path: &Path, done: &Reexecution, wanted: Option<&str>) {
    match (wanted, &done.challenge) {
        (None, Challenge::None) => (),
        (None, Challenge::Given(_)) => {
            let what = "the challenge of the statement is not compared: name the one that you gave with `--challenge`";
            report.notes.push(what.to_string());
        }
        (Some(wanted), Challenge::Given(given)) if wanted == given => (),
        (Some(wanted), _) if done.replayed.len() < done.segments.len() => {
            report.add_finding(path, format!("it does not answer the challenge {}", harmless(wanted, 128)));
        }
        (Some(_), _) => {
            let what = "the statement was not made for the challenge, but replays everything, as any would ask";
            report.notes.push(what.to_string());
        }
    }
}

/// Every field, made again from the receipt, the files and what it says was replayed. False if
/// there is nothing to make it from.
fn check_content(
    report: &mut Report,
    path: &Path,
    statement: &Value,
    (receipt, folder, done): (&Receipt, &Path, &Reexecution),
) -> Result<bool, FileError> {
    let subjects = match Subjects::read(receipt, folder) {
        // Which file it is has been found already.
        Err(error) if error.is_damage() || matches!(error, FileError::Missing { .. }) => {
            report.add_finding(path, format!("its files are not as recorded: {error}"));
            return Ok(false);
        }
        subjects => subjects?,
    };
    // Decimals are read as the statement's are: a parser may be off in the last place.
    let expected = content(receipt, &subjects, done).to_string();
    let expected = serde_json::from_str(&expected).unwrap_or(Value::Null);
    if let Some(place) = difference(statement, &expected, "") {
        let place = quoted(place.trim_start_matches('.'));
        report.add_finding(path, format!("its {place} is not what the receipt, the files and the replay give"));
    }
    Ok(true)
}

/// What a statement says was replayed, if that can be true: the segments are those of the receipt,
/// and the challenge chooses the ones that were replayed. And whether replays would begin where it
/// says today: a run may prune its checkpoints, and make them again.
fn said(found: &Value, receipt: &Receipt) -> Result<(Reexecution, bool), &'static str> {
    let segment = receipt.segment.ok_or("the receipt is of version 1, which fixes no segments")?;
    let listed = found["segments"].as_array().ok_or("it does not say what was replayed")?;
    // Before anything is made for each of them: the numbers of a receipt may be huge.
    if receipt.made.updates.div_ceil(segment.max(1)) != listed.len() as u64 {
        return Err("its segments are not those of the receipt");
    }
    let froms: Option<Vec<u64>> = listed.iter().map(|segment| segment["starts_after"].as_u64()).collect();
    // Beside a run folder the checkpoints are known; a final folder alone does not name them.
    let saved: Option<BTreeSet<u64>> = receipt
        .folder
        .as_ref()
        .map(|folder| folder.checkpoints.keys().filter_map(|name| checkpoint_step(name)).collect());
    let mut segments = divided(receipt.made.updates, segment, saved.as_ref().unwrap_or(&BTreeSet::new()));
    let froms = froms.ok_or("a segment does not say where its replay begins")?;
    let as_now = saved.is_none() || segments.iter().map(|segment| segment.from).eq(froms.iter().copied());
    for (segment, from) in segments.iter_mut().zip(froms) {
        if from >= segment.first {
            return Err("a segment begins after its first update");
        }
        *segment = Segment { from, ..*segment };
    }
    let replayed: Vec<usize> = (0..listed.len()).filter(|at| listed[*at]["reexecuted"] == true).collect();
    if replayed.is_empty() {
        return Err("it says that nothing was replayed");
    }
    let challenge = match &found["challenge"]["hex"] {
        Value::Null => Challenge::None,
        hex => Challenge::Given(hex.as_str().filter(|hex| is_challenge(hex)).ok_or("its challenge is none")?.into()),
    };
    if replayed != chosen(&challenge, receipt.digest, segments.len(), replayed.len()) {
        return Err("the challenge does not choose the segments that it lists as replayed");
    }
    let environment: Option<BTreeMap<String, String>> = serde_json::from_value(found["environment"].clone()).ok();
    let environment = environment.ok_or("its environment is not a list of texts")?;
    Ok((Reexecution { segments, replayed, challenge, environment }, as_now))
}

/// Hexadecimal digits in lower case.
pub fn is_challenge(text: &str) -> bool {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    (1..=128).contains(&text.len()) && text.bytes().all(is_digit)
}

/// The place of the first difference between two values.
fn difference(found: &Value, expected: &Value, place: &str) -> Option<String> {
    match (found, expected) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            keys.into_iter().find_map(|key| {
                let place = format!("{place}.{key}");
                match (a.get(key), b.get(key)) {
                    (Some(a), Some(b)) => difference(a, b, &place),
                    _ => Some(place),
                }
            })
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            let pairs = a.iter().zip(b).enumerate();
            pairs.into_iter().find_map(|(at, (a, b))| difference(a, b, &format!("{place}.{at}")))
        }
        _ => (found != expected).then(|| place.to_string()),
    }
}
