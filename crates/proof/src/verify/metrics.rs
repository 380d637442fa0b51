//! `metrics.jsonl` against the chain: every line is checked by itself, and its numbers follow from
//! those of the updates. So a changed or moved line is named, not only the file.
#![expect(clippy::float_arithmetic, reason = "the means that a run writes, computed again")]

use super::Report;
use crate::chain::{Chain, Update};
use crate::error::FileError;
use crate::hash::Hash;
use crate::json::{self, UniqueValue};
use crate::layout::METRICS;
use crate::line::{NO_LINES, chained, checked, checksum, shared, timing};
use crate::metrics_line::{Event, Record, Timing};
use crate::name::{counted, quoted};
use crate::receipt::Made;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// BOUND: bytes of a line.
const LINE_BYTES_MAX: usize = 1 << 16;

/// What is known of each line.
pub(super) struct Lines(Vec<LineOf>);

struct LineOf {
    step: u64,
    /// Of the lines up to here.
    digest: Hash,
    is_evaluation: bool,
}

impl Lines {
    /// The digest of the lines up to a step.
    pub(super) fn digest(&self, step: u64) -> Hash {
        self.0.iter().rev().find(|line| line.step <= step).map_or(NO_LINES, |line| line.digest)
    }

    /// The step of the last training line up to a step.
    pub(super) fn logged(&self, step: u64) -> u64 {
        self.0.iter().rev().find(|line| line.step <= step && !line.is_evaluation).map_or(0, |line| line.step)
    }
}

/// What the lines follow from; the chain is none if it is damaged.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) chain: Option<&'a Chain>,
    pub(super) made: Option<&'a Made>,
}

/// Checks the lines up to the last update of the chain.
pub(super) fn check(report: &mut Report, folder: &Path, source: Source<'_>) -> Result<Lines, FileError> {
    let path = folder.join(METRICS);
    let Some(text) = report.damage_as_finding(&path, json::read_text(&path))? else { return Ok(Lines(Vec::new())) };
    report.files += 1;
    let is_finished = source.made.is_some_and(|made| made.finished);
    let done = source.chain.map_or(u64::MAX, |chain| chain.updates.len() as u64);
    let (mut digests, mut digest) = (Vec::new(), NO_LINES);
    let mut follower = Follower { source, tokens: Some((0, 0)), logged: 0, evaluated: 0, last: 0 };
    for (index, line) in text.split_inclusive('\n').enumerate() {
        // A line cut short by a crash is ignored, as it is by a resumed run; so is one that was
        // written just before its update.
        let Some(line) = line.strip_suffix('\n') else {
            let what = "it ends in the middle of a line";
            if is_finished {
                report.add_finding(&path, what);
            } else {
                report.notes.push(format!("{METRICS}: {what}"));
            }
            break;
        };
        match follower.follow(line) {
            Ok(step) => {
                digest = chained(digest, line);
                digests.push(LineOf { step, digest, is_evaluation: follower.evaluated == step });
            }
            Err(Wrong { step: Some(step), .. }) if !is_finished && step == done.saturating_add(1) => {
                report.notes.push(format!("{METRICS} has lines of update {step}, which the chain does not have yet"));
                break;
            }
            Err(Wrong { what, .. }) => {
                // What follows depends on the line.
                report.add_finding(&path, format!("line {}: {what}", index + 1));
                return Ok(Lines(digests));
            }
        }
    }
    if let (true, Some(step)) = (is_finished, follower.next_evaluation()) {
        report.add_finding(&path, format!("the evaluation of step {step} is missing"));
    }
    Ok(Lines(digests))
}

/// What is wrong with a line, and its step if that is known.
struct Wrong {
    step: Option<u64>,
    what: String,
}

impl From<&str> for Wrong {
    fn from(what: &str) -> Self {
        Self { step: None, what: what.to_string() }
    }
}

impl From<String> for Wrong {
    fn from(what: String) -> Self {
        Self { step: None, what }
    }
}

/// Goes through the lines in their order.
struct Follower<'a> {
    source: Source<'a>,
    /// Updates whose tokens are counted, and their sum; none once it is too large.
    tokens: Option<(usize, u64)>,
    /// Steps of the last training line, of the last evaluation, and of the last line.
    logged: u64,
    evaluated: u64,
    last: u64,
}

impl Follower<'_> {
    /// The step of a line if nothing is wrong with it.
    fn follow(&mut self, line: &str) -> Result<u64, Wrong> {
        const STRANGE: &str = "it is not a line of metrics";
        if line.len() > LINE_BYTES_MAX {
            return Err(STRANGE.into());
        }
        let (before, check) = checked(line).ok_or("its checksum is missing")?;
        if checksum(before) != check {
            return Err("its checksum does not match".into());
        }
        let UniqueValue(value) = serde_json::from_str(line).map_err(|_| STRANGE)?;
        let step = value["step"].as_u64().filter(|step| *step > 0).ok_or(STRANGE)?;
        if !timing(line).is_empty() && serde_json::from_str::<Timing>(timing(line)).is_err() {
            return Err("its timing has other fields than those of a run".into());
        }
        let Some(chain) = self.source.chain else {
            let last = std::mem::replace(&mut self.last, step);
            return if step < last { Err(format!("step {step} comes after step {last}").into()) } else { Ok(step) };
        };
        if step > chain.updates.len() as u64 {
            let updates = counted(chain.updates.len() as u64, "update");
            let what = format!("it is of step {step}, but the chain has {updates}");
            return Err(Wrong { step: Some(step), what });
        }
        let is_evaluation = value.get("eval_loss_bits").is_some();
        let expected = self.expected(chain, step, is_evaluation)?;
        self.compare(line, &value, &expected)?;
        *(if is_evaluation { &mut self.evaluated } else { &mut self.logged }) = step;
        Ok(step)
    }

    /// The line that the chain gives.
    fn expected(&mut self, chain: &Chain, step: u64, is_evaluation: bool) -> Result<Record, Wrong> {
        let tokens = self.count(chain, step);
        let tokens = tokens
            .ok_or_else(|| format!("its tokens are not those of the updates up to {step}, or it is out of order"))?;
        let update = &chain.updates[step as usize - 1];
        let next = self.next_evaluation();
        let event = if is_evaluation {
            let evaluation = update.evaluation.ok_or(format!("the chain has no evaluation at step {step}"))?;
            if next != Some(step) {
                return Err(format!("the evaluation of step {step} is out of order, or is there twice").into());
            }
            let accuracy = evaluation.correct as f64 / evaluation.targets as f64;
            Event::Eval { loss: f64::from_bits(evaluation.loss), accuracy, tokens: evaluation.targets }
        } else {
            if step <= self.logged || step < self.evaluated {
                let last = self.logged.max(self.evaluated);
                return Err(format!("step {step} comes after step {last}").into());
            }
            if let Some(missing) = next.filter(|next| *next < step) {
                return Err(format!("the evaluation of step {missing} is missing before it").into());
            }
            let loss = mean_loss(&chain.updates[self.logged as usize..step as usize]);
            let learning_rate = f64::from_bits(update.learning_rate);
            Event::Train { loss, learning_rate, grad_norm: f64::from(f32::from_bits(update.norm)) }
        };
        let epoch = self.updates_of_epoch().map_or(0.0, |updates| step as f64 / updates as f64);
        Ok(Record { step, epoch, tokens, event, timing: None })
    }

    /// The part that equal runs share, character by character. Receipts of version 1 do not say how
    /// many updates an epoch has: there, the bits.
    fn compare(&self, line: &str, value: &Value, expected: &Record) -> Result<(), Wrong> {
        let expected = expected.to_line();
        let wanted: Value = serde_json::from_str(&expected).map_err(|_| "it is not a line of metrics")?;
        let skipped = |key: &str| {
            let is_free = ["timing", "check"].contains(&key);
            is_free || (self.updates_of_epoch().is_none() && !key.ends_with("_bits") && key != "tokens")
        };
        let keys = |value: &Value| value.as_object().map_or(Vec::new(), |object| object.keys().cloned().collect());
        let names: BTreeSet<String> = keys(value).into_iter().chain(keys(&wanted)).collect();
        let mut differing = names.into_iter().filter(|key| !skipped(key) && value.get(key) != wanted.get(key));
        if let Some(key) = differing.next() {
            let (step, key) = (&wanted["step"], quoted(&key));
            return Err(format!("{key} of step {step} is not what the chain says, or the line is out of order").into());
        }
        if self.updates_of_epoch().is_some() && shared(line) != shared(&expected) {
            return Err("it is not written as the run writes it".into());
        }
        Ok(())
    }

    fn updates_of_epoch(&self) -> Option<u64> {
        super::receipt::updates_of_epoch(self.source.made?)
    }

    /// The evaluation whose line comes next.
    fn next_evaluation(&self) -> Option<u64> {
        let chain = self.source.chain?;
        let after = chain.updates.get(self.evaluated as usize..)?;
        after.iter().find(|update| update.evaluation.is_some()).map(|update| update.step)
    }

    /// Tokens of the first updates; none for a step before the last one asked for.
    fn count(&mut self, chain: &Chain, step: u64) -> Option<u64> {
        let (done, sum) = self.tokens?;
        let more = chain.updates.get(done..step as usize)?;
        let sum = more.iter().try_fold(sum, |sum, update| sum.checked_add(update.tokens))?;
        self.tokens = Some((step as usize, sum));
        Some(sum)
    }
}

/// As a run computes it.
fn mean_loss(updates: &[Update]) -> f64 {
    // ORDER: update after update.
    updates.iter().fold(0.0, |sum, update| sum + f64::from_bits(update.loss)) / updates.len() as f64
}
