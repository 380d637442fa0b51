//! Statements about a run for others to check: an in-toto statement with SLSA provenance, in a DSSE
//! envelope, signed with an Ed25519 key if there is one (`docs/receipt-format.md`, "Statements").
//!
//! Subjects are the files of the final folder. Their SHA-256 stands beside BLAKE3, because every
//! standard library has it.

mod base64;
mod envelope;
mod key;
mod segments;

pub use envelope::Envelope;
pub use key::{PrivateKey, PublicKey};
pub use segments::{Challenge, Segment, chosen, detection, divided};

use crate::error::FileError;
use crate::hash::{FileRecord, Hash};
use crate::receipt::{self, Receipt};
use crate::regular;
use crate::verify::Report;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// The file of a run's statement.
pub const NAME: &str = "statement.json";
const TYPE: &str = "https://in-toto.io/Statement/v1";
const PREDICATE: &str = "https://slsa.dev/provenance/v1";
const BUILD_TYPE: &str = "urn:isobit:training:1";

/// What was executed again.
pub struct Reexecution {
    pub segments: Vec<Segment>,
    /// Those that were replayed and agree, by number.
    pub replayed: Vec<usize>,
    pub challenge: Challenge,
    /// For information.
    pub environment: BTreeMap<String, String>,
}

/// The payload of the statement about a finished run, whose final folder is `folder`.
pub fn statement(receipt: &Receipt, folder: &Path, done: &Reexecution) -> Result<Vec<u8>, FileError> {
    let mut names: Vec<&str> = receipt.result.iter().flat_map(BTreeMap::keys).map(String::as_str).collect();
    names.push(receipt::NAME);
    names.sort_unstable();
    let mut subjects = Vec::new();
    for name in names {
        let path = folder.join(name);
        let digest = json!({ "sha256": sha256(&path)?, "blake3": Hash::of_file(&path)? });
        subjects.push(json!({ "name": name, "digest": digest }));
    }
    let made = &receipt.made;
    let file = |kind: &str, name: &str, record: &FileRecord| json!({ "name": format!("{kind}/{name}"), "digest": { "blake3": record.blake3 } });
    let base = made.base.files.iter().map(|(name, record)| file("base", name, record));
    let tokenizer = made.tokenizer.iter().map(|(name, record)| file("tokenizer", name, record));
    let data = made.data.iter().enumerate().map(
        |(at, data)| json!({ "name": format!("data/{}-{at}", data.used_for), "digest": { "blake3": data.blake3 } }),
    );
    let statement = json!({
        "_type": TYPE,
        "subject": subjects,
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": { "config": made.config },
                "internalParameters": { "identity": made.identity },
                "resolvedDependencies": base.chain(tokenizer).chain(data).collect::<Vec<Value>>(),
            },
            "runDetails": {
                "builder": { "id": format!("urn:isobit:program:{}", receipt.program) },
                "metadata": { "invocationId": receipt.digest },
                "byproducts": [
                    { "name": "chain", "digest": { "blake3": made.link } },
                    { "name": "receipt", "digest": { "blake3": receipt.digest } },
                ],
            },
            "isobit_reexecution": reexecution(receipt, done),
        },
    });
    Ok(serde_json::to_vec(&statement).expect("strings and numbers have a JSON form"))
}

fn reexecution(receipt: &Receipt, done: &Reexecution) -> Value {
    let Reexecution { segments, replayed, challenge, environment } = done;
    let segment = |(at, segment): (usize, &Segment)| {
        json!({ "first": segment.first, "last": segment.last, "starts_after": segment.from,
            "reexecuted": replayed.contains(&at) })
    };
    let updates = |at: &usize| segments[*at].last - segments[*at].first + 1;
    let mut object = Map::new();
    let mut put = |key: &str, value: Value| object.insert(key.to_string(), value);
    put("updates", receipt.made.updates.into());
    put("reexecuted_updates", replayed.iter().map(updates).sum::<u64>().into());
    put("segments", segments.iter().enumerate().map(segment).collect());
    put(
        "challenge",
        match challenge {
            Challenge::Given(text) => json!({ "chosen_by": "verifier", "hex": text }),
            Challenge::None => json!({ "chosen_by": "self" }),
        },
    );
    let few = segments.len().div_ceil(10);
    put(
        "probability_of_detection",
        json!({
            "if_one_segment_is_wrong": detection(segments.len(), replayed.len(), 1),
            "if_a_tenth_is_wrong": detection(segments.len(), replayed.len(), few),
        }),
    );
    put("agrees", true.into());
    put("environment", json!(environment));
    object.into()
}

/// Checks a statement against the receipt of the run and the files of its final folder, and the
/// signature against a key, if one is given.
pub fn check(
    report: &mut Report,
    path: &Path,
    receipt: &Receipt,
    folder: &Path,
    key: Option<&PublicKey>,
) -> Result<(), FileError> {
    let Some(envelope) = report.take(path, Envelope::read(path))? else { return Ok(()) };
    report.files += 1;
    match key {
        Some(key) if !envelope.is_signed_by(key) => report.find(path, "it is not signed by the given key"),
        Some(key) => report.notes.push(format!("the statement is signed by key {}", key.id())),
        None if envelope.is_signed() => {
            report.notes.push("the signature of the statement is not checked: name a key with `--key`".to_string());
        }
        None => report.notes.push("the statement is not signed".to_string()),
    }
    let statement = envelope.payload().and_then(|payload| serde_json::from_slice::<Value>(&payload).ok());
    let Some(statement) = statement.filter(|statement| statement["_type"] == TYPE) else {
        report.find(path, "its payload is not an in-toto statement");
        return Ok(());
    };
    let details = &statement["predicate"]["runDetails"];
    if details["metadata"]["invocationId"].as_str() != Some(receipt.digest.to_string().as_str()) {
        report.find(path, "it is about another receipt");
        return Ok(());
    }
    if details["byproducts"][0]["digest"]["blake3"].as_str() != Some(receipt.made.link.to_string().as_str()) {
        report.find(path, "it is about another chain");
    }
    let subjects = statement["subject"].as_array().map_or(&[][..], Vec::as_slice);
    let mut names: Vec<&str> = receipt.result.iter().flat_map(BTreeMap::keys).map(String::as_str).collect();
    names.push(receipt::NAME);
    for name in names {
        let Some(subject) = subjects.iter().find(|subject| subject["name"] == name) else {
            report.find(path, format!("it does not name {name}"));
            continue;
        };
        let file = folder.join(name);
        let Some(found) = report.take(&file, sha256(&file))? else { continue };
        if subject["digest"]["sha256"].as_str() != Some(found.as_str()) {
            report.find(&file, "the statement has another SHA-256 of it");
        }
    }
    Ok(())
}

/// SHA-256 of a file, in hexadecimal digits.
fn sha256(path: &Path) -> Result<String, FileError> {
    let (mut file, _) = regular::open(path)?;
    let (mut hasher, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => hasher.update(&buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(FileError::from_io("read", path, error)),
        }
    }
    Ok(Hash(hasher.finalize().into()).to_string())
}
