//! `metrics.jsonl` against the chain: every line is checked by itself, and its numbers follow from
//! those of the updates. So a changed or moved line is named, not only the file.
#![expect(clippy::float_arithmetic, reason = "the means that a run writes, computed again")]

use super::Report;
use crate::chain::{Chain, Update};
use crate::error::FileError;
use crate::hash::Hash;
use crate::json;
use crate::layout::METRICS;
use crate::line::{NO_LINES, chained, checked, checksum};
use serde_json::Value;
use std::path::Path;

/// Digests of the lines, each with the step of its line.
pub(super) struct Lines(Vec<(u64, Hash)>);

impl Lines {
    /// The digest of the lines up to a step.
    pub(super) fn digest(&self, step: u64) -> Hash {
        self.0.iter().rev().find(|(of, _)| *of <= step).map_or(NO_LINES, |(_, digest)| *digest)
    }
}

/// Checks the lines up to the last update of the chain.
pub(super) fn check(report: &mut Report, folder: &Path, chain: &Chain) -> Result<Lines, FileError> {
    let path = folder.join(METRICS);
    let Some(text) = report.damage_as_finding(&path, json::read_text(&path))? else { return Ok(Lines(Vec::new())) };
    report.files += 1;
    // A line cut short by a crash is ignored, as it is by a resumed run.
    let (mut digests, mut digest, mut logged) = (Vec::new(), NO_LINES, 0);
    let mut tokens = Tokens { chain, done: 0, sum: 0 };
    for (index, line) in text.split_inclusive('\n').enumerate() {
        let Some(line) = line.strip_suffix('\n') else {
            report.notes.push(format!("{METRICS} ends in the middle of a line"));
            break;
        };
        let found = problem(line, chain, &mut logged, &mut tokens);
        match found {
            Ok(step) => {
                digest = chained(digest, line);
                digests.push((step, digest));
            }
            Err(what) => {
                // What follows depends on the line.
                report.add_finding(&path, format!("line {}: {what}", index + 1));
                break;
            }
        }
    }
    Ok(Lines(digests))
}

/// The step of a line if nothing is wrong with it. `logged` is the step of the last training line.
fn problem(line: &str, chain: &Chain, logged: &mut u64, tokens: &mut Tokens<'_>) -> Result<u64, String> {
    const STRANGE: &str = "it is not a line of metrics";
    let (before, check) = checked(line).ok_or("its checksum is missing")?;
    if checksum(before) != check {
        return Err("its checksum does not match".to_string());
    }
    let value: Value = serde_json::from_str(line).map_err(|_| STRANGE)?;
    let step = value["step"].as_u64().ok_or(STRANGE)?;
    if step > chain.updates.len() as u64 || step == 0 {
        return Err(format!("it has step {step}, but the chain has {} updates", chain.updates.len()));
    }
    let update = &chain.updates[step as usize - 1];
    if value["tokens"].as_u64() != tokens.at(step) {
        return Err(format!("its tokens are not those of {step} updates, or it is out of order"));
    }
    let same = |field: &str, bits: u64| {
        if value[field].as_str() == Some(format!("{bits:016x}").as_str()) {
            return Ok(());
        }
        Err(format!("`{field}` of step {step} is not what the chain says, or the line is out of order"))
    };
    if value.get("eval_loss_bits").is_some() {
        let evaluation = update.evaluation.ok_or(format!("the chain has no evaluation at step {step}"))?;
        same("eval_loss_bits", evaluation.loss)?;
        return Ok(step);
    }
    if step <= *logged {
        return Err(format!("step {step} comes after step {logged}"));
    }
    same("loss_bits", mean_loss(&chain.updates[*logged as usize..step as usize]).to_bits())?;
    same("learning_rate_bits", update.learning_rate)?;
    same("grad_norm_bits", f64::from(f32::from_bits(update.norm)).to_bits())?;
    *logged = step;
    Ok(step)
}

/// As a run computes it.
fn mean_loss(updates: &[Update]) -> f64 {
    // ORDER: update after update.
    updates.iter().fold(0.0, |sum, update| sum + f64::from_bits(update.loss)) / updates.len() as f64
}

/// Tokens of the first updates, summed as the steps ascend.
struct Tokens<'a> {
    chain: &'a Chain,
    done: usize,
    sum: u64,
}

impl Tokens<'_> {
    /// None for a step before the last one asked for.
    fn at(&mut self, step: u64) -> Option<u64> {
        let more = self.chain.updates.get(self.done..step as usize)?;
        self.sum += more.iter().map(|update| update.tokens).sum::<u64>();
        self.done = step as usize;
        Some(self.sum)
    }
}
