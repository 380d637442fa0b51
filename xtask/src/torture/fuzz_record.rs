//! The targets `chain`, `receipt` and `statement` of `fuzz`. Each changes one file of a record
//! whose other files are right. Links, digests and signatures cover every byte, so half of the
//! changed files are made to fit again: else nothing behind the first check would be reached.

use super::fuzz_targets::{Check, Corpus, Outcome, Reached, fresh, refused};
use super::mutate::{Form, mutated};
use super::random::Random;
use isobit_numerics::digest::Digest;
use isobit_proof::chain::{self, Chain, ChainFile, Evaluation, Origin, TensorDigests, Update};
use isobit_proof::hash::FileRecord;
use isobit_proof::layout::{FINAL, METRICS};
use isobit_proof::metrics_line::{Event, Record};
use isobit_proof::receipt::{self, Base, Best, DataFile, FolderRecord, Made, Receipt, config_digest};
use isobit_proof::statement::{self, Asked, Challenge, Envelope, PrivateKey, Reexecution, Subjects};
use isobit_proof::verify::{self, Report};
use isobit_proof::{FileError, Hash, Manifest};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Of a run of so many updates.
const UPDATES: u64 = 6;
/// The first test vector of RFC 8032, as OpenSSL writes it.
const KEY: &str = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g\n-----END PRIVATE KEY-----\n";
const RESULT: &str = "adapter_model.safetensors";

fn updates() -> Vec<Update> {
    let line = |step: u64| {
        let mut update = Update::new(step, Hash([step as u8; 32]), 7 * step);
        let digest = Digest([step, 2]);
        update.set_digests(&[TensorDigests { gradient: digest, value: digest, moments: [digest; 2] }; 2]);
        (update.loss, update.learning_rate) = (2.5_f64.to_bits(), 1e-3_f64.to_bits());
        let evaluation = Evaluation { loss: 2.0_f64.to_bits(), correct: 3, targets: 4, best: step == 3 };
        update.evaluation = step.is_multiple_of(3).then_some(evaluation);
        update
    };
    (1..=UPDATES).map(line).collect()
}

fn metrics() -> String {
    let record = |update: &Update| {
        let event = Event::Train { loss: 2.5, learning_rate: 1e-3, grad_norm: 0.0 };
        let tokens = (1..=update.step).map(|step| 7 * step).sum();
        Record { step: update.step, epoch: 0.5, tokens, event, timing: None }.to_line() + "\n"
    };
    updates().iter().map(record).collect()
}

/// What the run was made from; the end of its chain is still open.
fn made_from() -> Made {
    let config = BTreeMap::from([
        ("profile".to_string(), "\"x2\"".to_string()),
        ("training.rows_per_update".to_string(), "2".to_string()),
    ]);
    let record = FileRecord { size: 3, blake3: Hash([5; 32]) };
    let files = BTreeMap::from([("config.json".to_string(), record), ("model.safetensors".to_string(), record)]);
    let base = Base { files, tensors: BTreeMap::from([("a".to_string(), Hash([6; 32]))]) };
    let identity = [
        ("run", config_digest(&config).to_string()),
        ("base", base.digest().to_string()),
        ("profile", "x2".to_string()),
    ];
    Made {
        identity: identity.into_iter().map(|(name, value)| (name.to_string(), value)).collect(),
        config,
        base,
        tokenizer: BTreeMap::from([("tokenizer.json".to_string(), record)]),
        data: vec![DataFile {
            used_for: "train".to_string(),
            size: 9,
            blake3: Hash([7; 32]),
            line_count: 2,
            lines_per_digest: 1,
            lines: "0123456789abcdef".repeat(2),
        }],
        rows: Some(24),
        reordered: Vec::new(),
        updates: UPDATES,
        link: Hash([0; 32]),
        best: Some(Best { step: 3, loss: format!("{:016x}", 2.0_f64.to_bits()) }),
        finished: true,
    }
}

/// Writes a run of which only chain, metrics and receipts are right, and returns its receipt.
fn write_run(folder: &Path) -> Result<Receipt, FileError> {
    let (last, mut made) = (folder.join(FINAL), made_from());
    std::fs::create_dir_all(&last).map_err(|error| FileError::from_io("write", &last, error))?;
    let names = ["a", "b"].map(str::to_string).to_vec();
    let mut chain = ChainFile::create(folder, &Origin::new(made.identity.clone(), names, &[]))?;
    updates().iter().try_for_each(|update| chain.append(update))?;
    made.link = chain.link();
    let write =
        |path: &Path, text: &str| std::fs::write(path, text).map_err(|error| FileError::from_io("write", path, error));
    write(&folder.join(METRICS), &metrics())?;
    write(&last.join(RESULT), "weights")?;
    let result = BTreeMap::from([(RESULT.to_string(), FileRecord::of(&last.join(RESULT))?)]);
    let record = FolderRecord {
        files: BTreeMap::new(),
        metrics: Hash([0; 32]),
        checkpoints: BTreeMap::from([("checkpoint-2".to_string(), Hash([8; 32]))]),
    };
    let environment = Some(BTreeMap::from([("device".to_string(), "cpu".to_string())]));
    let mut receipt = Receipt::new("0", made, 2, Some(result));
    (receipt.folder, receipt.environment) = (Some(record), environment);
    receipt.write(folder)?;
    receipt.of_result().write(&last)?;
    Manifest::of(&last, [RESULT, receipt::NAME])?.write(&last)?;
    Ok(receipt)
}

/// Something of a run that is written for it and removed.
fn from_a_run(of: impl FnOnce(&Path, Receipt) -> Result<Corpus, FileError>) -> Result<Corpus, String> {
    let folder = std::env::temp_dir().join(format!("isobit-fuzz-run-{}", std::process::id()));
    let made = write_run(&folder).and_then(|receipt| of(&folder, receipt)).map_err(|error| error.to_string());
    let _ = std::fs::remove_dir_all(&folder);
    made
}

fn prepared(place: &Path, name: &str) -> Result<(PathBuf, Receipt), String> {
    let folder = place.join(name);
    let receipt = write_run(&folder).map_err(|error| error.to_string())?;
    Ok((folder, receipt))
}

fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    std::fs::read(path).map_err(|error| FileError::from_io("read", path, error))
}

fn one_of(random: &mut Random, corpus: &Corpus) -> String {
    let good: &Vec<u8> = random.pick(corpus);
    String::from_utf8_lossy(good).into_owned()
}

fn changed(random: &mut Random, form: Form, text: &str) -> String {
    String::from_utf8_lossy(&mutated(random, form, text.as_bytes(), false)).into_owned()
}

pub(crate) fn chains() -> Result<Corpus, String> {
    from_a_run(|folder, _| Ok(vec![read(&folder.join(chain::NAME))?]))
}

pub(crate) fn chain_made(random: &mut Random, corpus: &Corpus) -> Vec<u8> {
    let good = one_of(random, corpus);
    let mut text = changed(random, Form::JsonLines, &good);
    if random.once_in(2) {
        text = relinked(&text);
    }
    text.into_bytes()
}

/// The lines as a run writes what they say, linked again. What is no line stays as it is.
fn relinked(text: &str) -> String {
    let origin = |value: Value| serde_json::to_string(&serde_json::from_value::<Origin>(value).ok()?).ok();
    let update = |value: Value| serde_json::to_string(&serde_json::from_value::<Update>(value).ok()?).ok();
    let (mut before, mut lines) = (Hash([0; 32]), String::new());
    for (number, line) in text.lines().enumerate() {
        let mut value: Value = serde_json::from_str(line).unwrap_or_default();
        value.as_object_mut().map(|fields| fields.remove("link"));
        let content = if number == 0 { origin(value) } else { update(value) };
        let content = content.unwrap_or_else(|| line.to_string());
        let content = content.strip_suffix('}').unwrap_or(&content);
        before = Hash::of_bytes(&[&before.0, content.as_bytes()].concat());
        lines.extend([content, ",\"link\":\"", &before.to_string(), "\"}\n"]);
    }
    lines
}

/// A chain that is accepted is written as it was read.
pub(crate) fn check_chain(place: &Path) -> Result<Check, String> {
    let (folder, _) = prepared(place, "fuzz-chain")?;
    let path = folder.join(chain::NAME);
    Ok(Box::new(move |bytes| {
        fresh(&path, bytes)?;
        let report = verify::verify(&folder);
        let found = match Chain::read(&folder) {
            Ok(found) => found,
            Err(error) => return refused(error),
        };
        let write = || -> Result<Vec<u8>, FileError> {
            let mut file = ChainFile::create(&folder, &found.origin)?;
            found.updates.iter().try_for_each(|update| file.append(update))?;
            read(&path)
        };
        let written = write().map_err(|error| error.to_string())?;
        if written != bytes[..bytes.len() - found.cut as usize] {
            return Err("what was read is written otherwise".to_string());
        }
        match report {
            Ok(report) if report.chain.as_ref() == Some(&found) => Ok(Reached::Accepted),
            Ok(_) => Err("`verify` read another chain".to_string()),
            Err(error) => Err(format!("`verify` stops at a chain that can be read: {error}")),
        }
    }))
}

/// Of a finished run, of one that goes on, and of version 1.
pub(crate) fn receipts() -> Result<Corpus, String> {
    from_a_run(|_, receipt| {
        let made = Made { finished: false, ..receipt.made.clone() };
        let mut unfinished = Receipt::new("0", made, 2, None);
        unfinished.folder.clone_from(&receipt.folder);
        let earlier = receipt.to_text().replacen("receipt/2", "receipt/1", 1);
        let earlier = earlier.replacen("  \"segment\": 2,\n", "", 1).replacen("    \"rows\": 24,\n", "", 1);
        Ok([receipt.to_text(), unfinished.to_text(), resealed(&earlier)].map(String::into_bytes).to_vec())
    })
}

pub(crate) fn receipt_made(random: &mut Random, corpus: &Corpus) -> Vec<u8> {
    let good = one_of(random, corpus);
    let mut text = changed(random, Form::Json, &good);
    if random.once_in(2) {
        text = resealed(&text);
    }
    text.into_bytes()
}

/// With the digest and the checksum of what it says, if it is a receipt.
fn resealed(text: &str) -> String {
    let mut value: Value = serde_json::from_str(text).unwrap_or_default();
    value.as_object_mut().map(|fields| fields.remove("check"));
    let Ok(mut receipt) = serde_json::from_value::<Receipt>(value) else { return text.to_string() };
    receipt.digest = receipt.computed_digest();
    receipt.to_text()
}

/// A receipt that is accepted is written as it was read, and has its own digest.
pub(crate) fn check_receipt(place: &Path) -> Result<Check, String> {
    let (folder, _) = prepared(place, "fuzz-receipt")?;
    let path = folder.join(receipt::NAME);
    Ok(Box::new(move |bytes| {
        fresh(&path, bytes)?;
        let report = verify::verify(&folder);
        let found = match Receipt::read(&folder) {
            Ok(found) => found,
            Err(error) => return refused(error),
        };
        if found.to_text().as_bytes() != bytes || found.digest != found.computed_digest() {
            return Err("what was read is written otherwise".to_string());
        }
        match report {
            Ok(report) if report.receipt.as_ref() == Some(&found) => Ok(Reached::Accepted),
            Ok(_) => Err("`verify` read another receipt".to_string()),
            Err(error) => Err(format!("`verify` stops at a receipt that can be read: {error}")),
        }
    }))
}

/// Payloads of statements: all segments, one of the prover's, and two that a challenge chose.
pub(crate) fn statements() -> Result<Corpus, String> {
    from_a_run(|folder, receipt| {
        let subjects = Subjects::read(&receipt, &folder.join(FINAL))?;
        let payload = |(count, challenge): (usize, Challenge)| {
            let segments = statement::divided(UPDATES, 2, &BTreeSet::from([2]));
            let replayed = statement::chosen(&challenge, receipt.digest, segments.len(), count);
            let environment = BTreeMap::from([("device".to_string(), "cpu".to_string())]);
            statement::statement(&receipt, &subjects, &Reexecution { segments, replayed, challenge, environment })
        };
        let given = Challenge::Given("c0ffee".to_string());
        Ok([(3, Challenge::None), (1, Challenge::None), (2, given)].map(payload).to_vec())
    })
}

/// An envelope around a changed payload, signed; or one that was changed after it was signed. Of
/// every third payload only the environment is another, which may say anything.
pub(crate) fn statement_made(random: &mut Random, corpus: &Corpus) -> Vec<u8> {
    let key = PrivateKey::parse(KEY).expect("a key");
    let good = one_of(random, corpus);
    if random.once_in(2) {
        let payload = if random.once_in(3) { elsewhere(random, &good) } else { changed(random, Form::Json, &good) };
        return Envelope::new(payload.as_bytes(), Some(&key)).to_text().into_bytes();
    }
    let envelope = Envelope::new(good.as_bytes(), Some(&key)).to_text();
    mutated(random, Form::Json, envelope.as_bytes(), false)
}

/// A payload whose replay was somewhere else.
fn elsewhere(random: &mut Random, payload: &str) -> String {
    let mut statement: Value = serde_json::from_str(payload).unwrap_or_default();
    let place = *random.pick(&["cpu", "", "\u{202e}\"\\", "hip:9"]);
    statement["predicate"]["isobit_reexecution"]["environment"]["device"] = place.into();
    statement.to_string()
}

/// A statement that is accepted says of the run what was proved: only what was replayed is free.
pub(crate) fn check_statement(place: &Path) -> Result<Check, String> {
    let (folder, receipt) = prepared(place, "fuzz-statement")?;
    let key = PrivateKey::parse(KEY).ok_or("a key")?.public();
    let good = statements()?;
    let about_the_run = without_replay(&good[0]).ok_or("a statement")?;
    let (path, last) = (folder.join(statement::NAME), folder.join(FINAL));
    Ok(Box::new(move |bytes| {
        fresh(&path, bytes)?;
        let mut report = Report::default();
        let asked = Asked { key: Some(&key), challenge: None, is_named: true };
        statement::check(&mut report, &path, &receipt, &last, asked).map_err(|error| error.to_string())?;
        if let Some(finding) = report.findings.first() {
            return refused(&finding.what);
        }
        let envelope = Envelope::read(&path).map_err(|error| error.to_string())?;
        envelope.write(&path).map_err(|error| error.to_string())?;
        if Envelope::read(&path).ok().as_ref() != Some(&envelope) {
            return Err("what was read is written otherwise".to_string());
        }
        accepted_if(envelope.payload().and_then(|payload| without_replay(&payload)) == Some(about_the_run.clone()))
    }))
}

fn accepted_if(holds: bool) -> Outcome {
    if holds { Ok(Reached::Accepted) } else { Err("it says something else of the run".to_string()) }
}

/// A payload without what was replayed.
fn without_replay(payload: &[u8]) -> Option<Value> {
    let mut statement: Value = serde_json::from_slice(payload).ok()?;
    *statement.pointer_mut("/predicate/isobit_reexecution")? = json!(null);
    Some(statement)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is right is accepted, and so is a good share of the inputs: one that is refused at once
    /// exercises nothing behind the refusal.
    #[test]
    fn a_good_share_of_the_inputs_is_accepted() {
        type Parts =
            (fn() -> Result<Corpus, String>, fn(&mut Random, &Corpus) -> Vec<u8>, fn(&Path) -> Result<Check, String>);
        let targets: [(&str, Parts); 3] = [
            ("chain", (chains, chain_made, check_chain)),
            ("receipt", (receipts, receipt_made, check_receipt)),
            ("statement", (statements, statement_made, check_statement)),
        ];
        for (name, (corpus, make, prepare)) in targets {
            let place = std::env::temp_dir().join(format!("isobit-fuzz-{name}-{}", std::process::id()));
            let (mut check, corpus) = (prepare(&place).expect("prepared"), corpus().expect("made"));
            if name != "statement" {
                for good in &corpus {
                    let found = check(good).expect("no finding");
                    assert!(matches!(found, Reached::Accepted), "{name}: {found:?}");
                }
            }
            let mut one = |case| check(&make(&mut Random::of(1, name, case), &corpus)).expect("no finding");
            let accepted = (0..400).filter(|case| matches!(one(*case), Reached::Accepted)).count();
            std::fs::remove_dir_all(&place).expect("removed");
            assert!((10..350).contains(&accepted), "{name}: {accepted}");
        }
    }
}
