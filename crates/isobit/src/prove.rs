//! `isobit prove`: replays a finished run, or segments that a challenge chooses, and writes a
//! statement about it that others can check.

use crate::Failure;
use crate::prove_output::Output;
use crate::replay::{self, How, Subject};
use crate::stderr::tell;
use crate::verify::{self, challenge, key};
use isobit_proof::layout::DATA;
use isobit_proof::receipt::Receipt;
use isobit_proof::statement::{self, Challenge, Envelope, PrivateKey, Reexecution, Segment, Subjects};
use isobit_proof::verify::Kind;
use isobit_training::checkpoint::{self, FINAL};
use isobit_training::data_record;
use isobit_training::prepare::RunError;
use isobit_training::record::differing_inputs;
use isobit_training::replay::{Event, Replayed};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// A folder of a finished run
    run: PathBuf,
    /// Replay this many segments instead of all; a segment is the updates between two checkpoints
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    segments: Option<u32>,
    /// What chooses the segments: digits that the verifier gives once it has the receipt. Without
    /// it the statement says that they are self-chosen
    #[arg(long, value_name = "HEX", value_parser = challenge, requires = "segments")]
    challenge: Option<String>,
    /// Sign with this key, Ed25519 or ECDSA on P-256: PEM, as `openssl genpkey` writes it
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Where to write the statement [default: statement.json in the run folder]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    how: How,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Print no progress
    #[arg(short, long)]
    quiet: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let key = arguments.key.as_deref().map(|path| key(PrivateKey::read(path))).transpose()?;
    let receipt = verified(&arguments.run)?;
    let output = Output::open(&arguments.run, arguments.output.as_deref(), key.is_some())?;
    // What is signed are the hashes that are compared from here on, whatever happens to the files.
    let subjects = Subjects::read(&receipt, &arguments.run.join(FINAL))?;
    let (subject, mut explained) = Subject::open(&arguments.run, &arguments.how)?;
    if explained.is_empty() {
        explained = differing_inputs(&subject.prepared, &receipt, subject.threads)?;
    }
    if !explained.is_empty() {
        let object = object(&receipt, &explained);
        return differs(arguments, &object, &explained);
    }
    let done = match reexecuted(arguments, &subject, &receipt)? {
        Ok(done) => done,
        Err((found, steps)) => {
            let mut object = object(&receipt, &[]);
            object["ok"] = false.into();
            replay::add_found(&mut object, &found);
            print(arguments, &object, &replay::text(&found, &steps))?;
            return replay::ending(&found);
        }
    };
    if let Some(what) = other_result(&subject, &receipt, &subjects, &output)? {
        let lines = [what];
        return differs(arguments, &object(&receipt, &lines), &lines);
    }
    let payload = statement::statement(&receipt, &subjects, &done);
    let path = output.write(&Envelope::new(&payload, key.as_ref()))?;
    print(arguments, &proved_object(&receipt, &done, &path), &text(&done, &path, key.as_ref()))
}

/// The receipt of a finished run, if everything is as recorded.
fn verified(run: &Path) -> Result<Receipt, Failure> {
    let report = verify::folder(run)?;
    if let Some(finding) = report.findings.first() {
        let message = format!("{}: {}", finding.path.display(), finding.what);
        let hint = "`isobit verify` lists everything that is not as recorded".to_string();
        return Err(Failure { code: 8, message, hint: Some(hint) });
    }
    let Some(receipt) = report.receipt.filter(|receipt| receipt.made.finished && report.kind == Kind::Run) else {
        let message = format!("{} holds no finished run with a receipt", run.display());
        return Err(Failure::usage(message, "name the folder of a finished run; `train --resume` finishes one"));
    };
    if receipt.segment.is_none() {
        let message = format!("the receipt of {} is of version 1, which does not cover the result", run.display());
        return Err(Failure::usage(message, "`train --resume` with the config of the run writes it anew"));
    }
    Ok(receipt)
}

/// Writes the final folder again, as the run gives it, and compares it byte for byte. Returns what
/// differs.
fn other_result(
    subject: &Subject,
    receipt: &Receipt,
    subjects: &Subjects,
    output: &Output,
) -> Result<Option<String>, Failure> {
    let run = &subject.prepared.run.output_dir;
    let place = output.temporary()?;
    let rebuilt = match subject.rebuild(place.path())? {
        Ok(rebuilt) => rebuilt,
        Err(found) => {
            let last = subject.chain.updates.len() as u64;
            return Ok(Some(replay::text(&found, &(found.from + 1..=last)).join("\n")));
        }
    };
    if let Some((name, what)) = subjects.difference(place.path(), &rebuilt.names)? {
        return Ok(Some(format!("{}: {what}", run.join(FINAL).join(name).display())));
    }
    if rebuilt.reordered != receipt.made.reordered {
        return Ok(Some("the receipt names other tensors whose layout in files differs".to_string()));
    }
    let same = data_record::is_of(run, &subject.prepared.report)?;
    Ok((!same).then(|| format!("{}: it is not what the data of the run give", run.join(DATA).display())))
}

/// Prints the object or the lines.
fn print(arguments: &Arguments, object: &Value, lines: &[String]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let printed = if arguments.json {
        writeln!(out, "{object}")
    } else {
        lines.iter().try_for_each(|line| writeln!(out, "{line}"))
    };
    printed.map_err(|error| Failure::output(&error))
}

/// Nothing is proved: prints why.
fn differs(arguments: &Arguments, object: &Value, lines: &[String]) -> Result<(), Failure> {
    print(arguments, object, lines)?;
    Err(Failure::difference())
}

/// What was replayed and agrees, or the first replay that differs, with its updates.
type Reexecuted = Result<Reexecution, (Replayed, RangeInclusive<u64>)>;

/// Replays what is to be replayed; a difference ends it.
fn reexecuted(arguments: &Arguments, subject: &Subject, receipt: &Receipt) -> Result<Reexecuted, Failure> {
    let saved = checkpoint::steps(&arguments.run).map_err(RunError::from)?;
    let (updates, every) = (receipt.made.updates, receipt.segment.unwrap_or(receipt.made.updates));
    let mut segments = statement::divided(updates, every, &saved.into_iter().collect());
    let challenge = arguments.challenge.clone().map_or(Challenge::None, Challenge::Given);
    let count = arguments.segments.map_or(segments.len(), |count| count as usize);
    let replayed = statement::chosen(&challenge, receipt.digest, segments.len(), count);
    let quiet = arguments.quiet || arguments.json;
    let far: Vec<&Segment> = segments.iter().filter(|of| of.from + 1 < of.first && !quiet).collect();
    for same in far.chunk_by(|a, b| a.from == b.from) {
        let (from, first, last) = (same[0].from, same[0].first, same[same.len() - 1].last);
        let start = if from == 0 { "the base".to_string() } else { format!("checkpoint-{from}") };
        tell(&format!("note: {} can be replayed only from {start}", replay::updates(first, last)));
    }
    for steps in joined(&segments, &replayed) {
        let is_first = |segment: &&mut Segment| segment.first == *steps.start();
        let mut watch = |event: Event| match event {
            Event::Agrees(step) if !quiet => tell(&format!("update {step}: the same bits")),
            Event::Skipped(why) => tell(&format!("note: not used: {why}")),
            _ => (),
        };
        let result = subject.replay(steps.clone(), true, &mut watch)?;
        if !result.agrees() {
            return Ok(Err((result, steps)));
        }
        // A checkpoint may be of no use; it has been named.
        segments.iter_mut().filter(is_first).for_each(|segment| segment.from = segment.from.min(result.from));
    }
    let environment = BTreeMap::from([
        ("device".to_string(), subject.device()),
        ("program".to_string(), env!("CARGO_PKG_VERSION").to_string()),
        ("system".to_string(), format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
    ]);
    Ok(Ok(Reexecution { segments, replayed, challenge, environment }))
}

/// Segments are replayed in one go where the later one has no checkpoint of its own to start from.
fn joined(segments: &[Segment], chosen: &[usize]) -> Vec<RangeInclusive<u64>> {
    let mut all: Vec<RangeInclusive<u64>> = Vec::new();
    for Segment { first, last, from } in chosen.iter().map(|at| segments[*at]) {
        match all.last_mut() {
            Some(before) if from <= *before.end() => *before = *before.start()..=last,
            _ => all.push(first..=last),
        }
    }
    all
}

fn text(done: &Reexecution, path: &Path, key: Option<&PrivateKey>) -> Vec<String> {
    let signed = key.map_or("not signed".to_string(), |key| format!("signed by key {}", key.public().id()));
    vec![
        done.described(),
        "every file of the result is the same".to_string(),
        format!("statement in {}, {signed}", path.display()),
    ]
}

/// What every answer has: `ok`, and what differs from the record if it is false.
fn object(receipt: &Receipt, inputs: &[String]) -> Value {
    let mut object = json!({ "schema": "isobit.prove/1", "ok": inputs.is_empty(), "receipt": receipt.digest,
        "updates": receipt.made.updates, "inputs": inputs });
    replay::add_found(&mut object, &Replayed::default());
    object
}

fn proved_object(receipt: &Receipt, done: &Reexecution, path: &Path) -> Value {
    let Reexecution { segments, replayed, .. } = done;
    let mut object = object(receipt, &[]);
    object["statement"] = path.display().to_string().into();
    object["segments"] = segments.len().into();
    object["replayed"] = replayed.iter().map(|at| json!([segments[*at].first, segments[*at].last])).collect();
    object["detection"] = done.detection().into();
    object["chosen_by"] = done.chosen_by().into();
    object
}
