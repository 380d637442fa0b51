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

pub use check::{Asked, check, is_challenge};
pub use envelope::Envelope;
pub use key::{PrivateKey, PublicKey};
pub use segments::{Challenge, Segment, chosen, divided};

use crate::error::FileError;
use crate::hash::{FileRecord, Hash};
use crate::name::counted;
use crate::receipt::{self, Receipt};
use crate::regular;
use segments::detection;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The file of a run's statement.
pub const NAME: &str = "statement.json";
const TYPE: &str = "https://in-toto.io/Statement/v1";
const PREDICATE: &str = "https://slsa.dev/provenance/v1";
const BUILD_TYPE: &str = "urn:isobit:training:3";
/// Of any version.
const BUILD_TYPES: &str = "urn:isobit:training:";

/// Whether an envelope holds a statement of a training run, and not one of another tool.
pub fn is_of_training(envelope: &Envelope) -> bool {
    let payload = envelope.payload().and_then(|payload| serde_json::from_slice::<Value>(&payload).ok());
    let kind = payload.as_ref().and_then(|of| of["predicate"]["buildDefinition"]["buildType"].as_str());
    kind.is_some_and(|kind| kind.starts_with(BUILD_TYPES))
}

/// What was executed again.
#[derive(Clone, Debug, PartialEq)]
pub struct Reexecution {
    pub segments: Vec<Segment>,
    /// Those that were replayed and agree, by number.
    pub replayed: Vec<usize>,
    pub challenge: Challenge,
    /// For information.
    pub environment: BTreeMap<String, String>,
}

impl Reexecution {
    /// Updates that were replayed.
    pub fn updates(&self) -> u64 {
        self.replayed.iter().map(|at| self.segments[*at].updates()).sum()
    }

    /// Who chose what was replayed.
    pub fn chosen_by(&self) -> &'static str {
        match self.challenge {
            Challenge::Given(_) => "verifier",
            Challenge::None if self.replayed.len() == self.segments.len() => "all",
            Challenge::None => "self",
        }
    }

    /// The probability that one wrong segment would be among those replayed. None if the prover
    /// chose: who makes the receipt can make it again until its digest avoids a segment.
    pub fn detection(&self) -> Option<f64> {
        self.detection_of(1)
    }

    /// The same of `wrong` segments.
    fn detection_of(&self, wrong: usize) -> Option<f64> {
        let (all, count) = (self.segments.len(), self.replayed.len());
        (self.challenge != Challenge::None || count == all).then(|| detection(all, count, wrong))
    }

    /// In words.
    pub fn described(&self) -> String {
        let updates = counted(self.segments.iter().map(|segment| segment.updates()).sum(), "update");
        let segments = counted(self.segments.len() as u64, "segment");
        let (count, done) = (self.replayed.len(), self.updates());
        match (&self.challenge, self.detection()) {
            (Challenge::Given(text), Some(chance)) => {
                #[expect(clippy::float_arithmetic, reason = "a percentage, for people")]
                let percent = 100.0 * chance;
                format!(
                    "replayed {done} of {updates} in {count} of {segments} (chosen by the challenge {text}): same \
                     bits; a single wrong segment had a {percent:.1} % chance of being replayed"
                )
            }
            (_, Some(_)) => format!("replayed all of {segments} with {updates}: same bits"),
            (_, None) => format!(
                "replayed {done} of {updates} in {count} of {segments}: same bits; the prover chose them, which says \
                 nothing against a prover who wanted to avoid a segment: ask for others with `--challenge HEX`"
            ),
        }
    }
}

/// The files of a final folder with the hashes that a statement names them by: each is read once
/// for both, and BLAKE3 must be that of the receipt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subjects(BTreeMap<String, Subject>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Subject {
    sha256: Hash,
    blake3: Hash,
}

impl Subjects {
    pub fn read(receipt: &Receipt, folder: &Path) -> Result<Self, FileError> {
        let mut all = BTreeMap::new();
        for (name, record) in receipt.result.iter().flatten() {
            let path = folder.join(name);
            let subject = Subject::read(&path)?;
            if subject.blake3 != record.blake3 {
                let what = format!("the recorded hash is {}, but it has {}", record.blake3, subject.blake3);
                return Err(FileError::Altered { path, what });
            }
            all.insert(name.clone(), subject);
        }
        // The receipt in the final folder has one form.
        let text = receipt.of_result().to_text();
        let subject = Subject { sha256: Hash(Sha256::digest(&text).into()), blake3: Hash::of_bytes(text.as_bytes()) };
        all.insert(receipt::NAME.to_string(), subject);
        Ok(Self(all))
    }

    /// The first file of a folder that is missing, not among these, or of other bytes: what is
    /// wrong with it. The receipt and the manifest are not looked for.
    pub fn difference(&self, folder: &Path, names: &[String]) -> Result<Option<(String, &'static str)>, FileError> {
        let ours = self.0.keys().filter(|name| *name != receipt::NAME);
        for name in ours.clone().chain(names).collect::<BTreeSet<_>>() {
            let what = match self.0.get(name).filter(|_| names.contains(name)) {
                None if names.contains(name) => "it is missing",
                None => "the run does not give such a file",
                Some(subject) if Subject::read(&folder.join(name))? != *subject => "the run gives other bytes",
                Some(_) => continue,
            };
            return Ok(Some((name.clone(), what)));
        }
        Ok(None)
    }

    fn to_json(&self) -> Value {
        let subject = |(name, of): (&String, &Subject)| json!({ "name": name, "digest": { "sha256": of.sha256, "blake3": of.blake3 } });
        self.0.iter().map(subject).collect()
    }
}

impl Subject {
    fn read(path: &Path) -> Result<Self, FileError> {
        let (mut sha256, mut blake3) = (Sha256::new(), blake3::Hasher::new());
        regular::read_in_pieces(path, |piece| {
            sha256.update(piece);
            blake3.update(piece);
        })?;
        Ok(Self { sha256: Hash(sha256.finalize().into()), blake3: Hash(*blake3.finalize().as_bytes()) })
    }
}

/// The payload of the statement about a finished run.
pub fn statement(receipt: &Receipt, subjects: &Subjects, done: &Reexecution) -> Vec<u8> {
    serde_json::to_vec(&content(receipt, subjects, done)).expect("strings and numbers have a JSON form")
}

/// Every field of the statement: who checks one makes it again and compares.
fn content(receipt: &Receipt, subjects: &Subjects, done: &Reexecution) -> Value {
    json!({
        "_type": TYPE,
        "subject": subjects.to_json(),
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": definition(receipt),
            "runDetails": {
                "builder": { "id": format!("urn:isobit:program:{}", receipt.program) },
                "metadata": { "invocationId": receipt.digest },
                "byproducts": [
                    { "name": "chain", "digest": { "blake3": receipt.made.link } },
                    { "name": "receipt", "digest": { "sha256": receipt.digest } },
                ],
            },
            "isobit_reexecution": reexecution(receipt, done),
        },
    })
}

/// What the run was made from.
fn definition(receipt: &Receipt) -> Value {
    let made = &receipt.made;
    let named = |name: String, blake3: String| json!({ "name": name, "digest": { "blake3": blake3 } });
    let file = |kind: &str, name: &str, record: &FileRecord| named(format!("{kind}/{name}"), record.blake3.to_string());
    let base = made.base.files.iter().map(|(name, record)| file("base", name, record));
    let tokenizer = made.tokenizer.iter().map(|(name, record)| file("tokenizer", name, record));
    let data = made.data.iter().enumerate();
    let data = data.map(|(at, data)| named(format!("data/{}-{at}", data.used_for), data.blake3.to_string()));
    let start = made.identity.get("start").map(|digest| named("start/adapter".to_string(), digest.clone()));
    json!({
        "buildType": BUILD_TYPE,
        "externalParameters": { "config": made.config },
        "internalParameters": { "identity": made.identity },
        "resolvedDependencies": base.chain(tokenizer).chain(data).chain(start).collect::<Vec<Value>>(),
    })
}

fn reexecution(receipt: &Receipt, done: &Reexecution) -> Value {
    let Reexecution { segments, replayed, challenge, environment } = done;
    let segment = |(at, segment): (usize, &Segment)| {
        json!({ "first": segment.first, "last": segment.last, "starts_after": segment.from,
            "reexecuted": replayed.contains(&at) })
    };
    let challenge = match challenge {
        Challenge::Given(text) => json!({ "chosen_by": done.chosen_by(), "hex": text }),
        Challenge::None => json!({ "chosen_by": done.chosen_by() }),
    };
    let mut object = json!({
        "updates": receipt.made.updates,
        "reexecuted_updates": done.updates(),
        "segments": segments.iter().enumerate().map(segment).collect::<Vec<Value>>(),
        "challenge": challenge,
        "agrees": true,
        "environment": environment,
    });
    let a_tenth = segments.len().div_ceil(10);
    if let (Some(one), Some(tenth)) = (done.detection(), done.detection_of(a_tenth)) {
        object["probability_of_detection"] = json!({ "if_one_segment_is_wrong": one, "if_a_tenth_is_wrong": tenth });
    }
    object
}
