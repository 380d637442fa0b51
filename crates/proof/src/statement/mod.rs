//! Statements about a run for others to check: an in-toto statement with SLSA provenance, in a DSSE
//! envelope, signed with an Ed25519 or ECDSA key if there is one (`docs/receipt-format.md`,
//! "Statements").
//!
//! Subjects are the files of the final folder. Their SHA-256 stands beside BLAKE3, because every
//! standard library has it.

mod base64;
mod check;
mod envelope;
mod key;
mod segments;

pub use check::check;
pub use envelope::Envelope;
pub use key::{PrivateKey, PublicKey};
pub use segments::{Challenge, Segment, chosen, detection, divided};

use crate::error::FileError;
use crate::hash::{FileRecord, Hash};
use crate::receipt::{self, Receipt};
use crate::regular;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
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
    let statement = json!({
        "_type": TYPE,
        "subject": subjects,
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": definition(receipt),
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

/// What the run was made from.
fn definition(receipt: &Receipt) -> Value {
    let made = &receipt.made;
    let file = |kind: &str, name: &str, record: &FileRecord| json!({ "name": format!("{kind}/{name}"), "digest": { "blake3": record.blake3 } });
    let base = made.base.files.iter().map(|(name, record)| file("base", name, record));
    let tokenizer = made.tokenizer.iter().map(|(name, record)| file("tokenizer", name, record));
    let data = made.data.iter().enumerate().map(
        |(at, data)| json!({ "name": format!("data/{}-{at}", data.used_for), "digest": { "blake3": data.blake3 } }),
    );
    json!({
        "buildType": BUILD_TYPE,
        "externalParameters": { "config": made.config },
        "internalParameters": { "identity": made.identity },
        "resolvedDependencies": base.chain(tokenizer).chain(data).collect::<Vec<Value>>(),
    })
}

fn reexecution(receipt: &Receipt, done: &Reexecution) -> Value {
    let Reexecution { segments, replayed, challenge, environment } = done;
    let segment = |(at, segment): (usize, &Segment)| {
        json!({ "first": segment.first, "last": segment.last, "starts_after": segment.from,
            "reexecuted": replayed.contains(&at) })
    };
    let updates = |at: &usize| segments[*at].updates();
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

/// SHA-256 of a file, in hexadecimal digits.
fn sha256(path: &Path) -> Result<String, FileError> {
    let mut hasher = Sha256::new();
    regular::read_in_pieces(path, |piece| hasher.update(piece))?;
    Ok(Hash(hasher.finalize().into()).to_string())
}
