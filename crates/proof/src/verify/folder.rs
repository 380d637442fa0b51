//! A run folder: the receipt, the chain it ends, the metrics, every checkpoint and the final
//! folder, each against the others.

use super::metrics::{self, Lines, Source};
use super::receipt::final_step;
use super::state;
use super::tensors::Stored;
use super::{Report, check_result, manifest};
use crate::atomic::is_partial;
use crate::chain::{self, Chain};
use crate::error::FileError;
use crate::hash::{Hash, Manifest};
use crate::json::{self, UniqueValue};
use crate::layout::{self, BEST, CHECKPOINT, FINAL, METRICS, STATE};
use crate::name::quoted;
use crate::receipt::{self, FolderRecord, Receipt};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

pub(super) fn run(folder: &Path) -> Result<Report, FileError> {
    let mut report = Report { kind: "run", ..Report::default() };
    let chain = report.damage_as_finding(&folder.join(chain::NAME), Chain::read(folder))?;
    report.files += usize::from(chain.is_some());
    let receipt = report.damage_as_finding(&folder.join(receipt::NAME), Receipt::read(folder))?;
    report.files += usize::from(receipt.is_some());
    let source = Source { chain: chain.as_ref(), made: receipt.as_ref().map(|receipt| &receipt.made) };
    let lines = Some(metrics::check(&mut report, folder, source)?);
    let whole = Whole { folder, chain: chain.as_ref(), receipt: receipt.as_ref(), lines: lines.as_ref() };
    if let Some(receipt) = &receipt {
        super::receipt::check(&mut report, &folder.join(receipt::NAME), receipt);
    }
    whole.check_ends(&mut report);
    whole.check_files(&mut report)?;
    whole.check_folders(&mut report)?;
    whole.check_final(&mut report)?;
    let recorded = receipt.as_ref().map_or(0, |receipt| receipt.made.updates);
    report.updates = chain.as_ref().map_or(recorded, |chain| chain.updates.len() as u64);
    report.receipt = receipt;
    Ok(report)
}

/// What was read of a run; None where it is damaged.
struct Whole<'a> {
    folder: &'a Path,
    chain: Option<&'a Chain>,
    receipt: Option<&'a Receipt>,
    lines: Option<&'a Lines>,
}

impl Whole<'_> {
    fn record(&self) -> Option<&FolderRecord> {
        self.receipt?.folder.as_ref()
    }

    fn stored(&self) -> Option<Stored<'_>> {
        Some(Stored { chain: self.chain?, reordered: &self.receipt?.made.reordered })
    }

    fn is_finished(&self) -> bool {
        self.receipt.is_some_and(|receipt| receipt.made.finished)
    }

    /// The receipt against the chain and the metrics.
    fn check_ends(&self, report: &mut Report) {
        let (Some(receipt), Some(chain)) = (self.receipt, self.chain) else { return };
        let (made, updates) = (&receipt.made, chain.updates.len() as u64);
        let path = self.folder.join(receipt::NAME);
        if chain.cut > 0 && made.finished {
            let what = format!("{} bytes follow its last line", chain.cut);
            report.add_finding(&self.folder.join(chain::NAME), what);
        }
        if made.identity != chain.origin.identity {
            let differs = |key: &&String| made.identity.get(*key) != chain.origin.identity.get(*key);
            let key = made.identity.keys().chain(chain.origin.identity.keys()).find(differs);
            let key = key.map_or(String::new(), |key| format!(" (`{key}` differs)"));
            report.add_finding(&path, format!("its identity is not that of the chain{key}"));
        }
        match chain.link(made.updates) {
            None => report.add_finding(
                &self.folder.join(chain::NAME),
                format!("it has {updates} updates, but the receipt covers {}", made.updates),
            ),
            Some(link) if link != made.link => {
                report.add_finding(&path, format!("its link of update {} is not that of the chain", made.updates));
            }
            Some(_) if made.updates < updates && made.finished => report.add_finding(
                &self.folder.join(chain::NAME),
                format!("it has {updates} updates, but the receipt says that the run ended after {}", made.updates),
            ),
            Some(_) if made.updates < updates => {
                report.notes.push(format!("the receipt covers {} updates, {updates} are done", made.updates));
            }
            Some(_) => (),
        }
        let best = chain.updates.iter().filter(|update| update.step <= made.updates);
        let best =
            best.filter_map(|update| update.evaluation.filter(|of| of.best).map(|of| (update.step, of))).next_back();
        let recorded = made.best.as_ref().map(|best| (best.step, best.loss.clone()));
        if recorded != best.map(|(step, evaluation)| (step, format!("{:016x}", evaluation.loss))) {
            report.add_finding(&path, "its best evaluation is not that of the chain");
        }
        if let (Some(lines), Some(record)) = (self.lines, self.record())
            && lines.digest(made.updates) != record.metrics
        {
            let what = "a line is missing, or differs from what the receipt recorded";
            report.add_finding(&self.folder.join(METRICS), what);
        }
    }

    /// Small files, and anything that does not belong here.
    fn check_files(&self, report: &mut Report) -> Result<(), FileError> {
        let Some(record) = self.record() else { return Ok(()) };
        for (name, recorded) in &record.files {
            let path = self.folder.join(name);
            let Some(found) = report.damage_as_finding(&path, Hash::of_file(&path))? else { continue };
            report.files += 1;
            if found != *recorded {
                if self.is_finished() {
                    report.add_finding(&path, format!("the recorded hash is {recorded}, but it has {found}"));
                } else {
                    report.notes.push(format!("{name} changed after the receipt of this unfinished run was written"));
                }
            }
        }
        self.check_best(report)?;
        let failed = |error| FileError::from_io("read", self.folder, error);
        let mut names = BTreeSet::new();
        for entry in std::fs::read_dir(self.folder).map_err(failed)? {
            names.insert(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
        }
        for name in names {
            let is_known = layout::belongs(&name) || record.files.contains_key(&name);
            if is_partial(&name) || (name.starts_with('.') && name.ends_with(".partial")) {
                report.notes.push(format!("{name} was left by a crash; `train --resume` removes it"));
            } else if !is_known {
                report.add_finding(&self.folder.join(&name), "it does not belong to the run");
            }
        }
        Ok(())
    }

    /// Of a finished run, the best checkpoint and its metric, in bits and for people.
    fn check_best(&self, report: &mut Report) -> Result<(), FileError> {
        let path = self.folder.join(BEST);
        if !self.is_finished() || path.symlink_metadata().is_err() {
            return Ok(());
        }
        let Some(UniqueValue(found)) = report.damage_as_finding(&path, json::read(&path))? else { return Ok(()) };
        let Some(best) = self.receipt.and_then(|receipt| receipt.made.best.as_ref()) else { return Ok(()) };
        let number = u64::from_str_radix(&best.loss, 16).map(f64::from_bits).ok();
        let metric = number.and_then(|number| serde_json::to_string(&number).ok());
        let expected = [
            ("checkpoint", format!("\"{CHECKPOINT}{}\"", best.step)),
            ("step", best.step.to_string()),
            ("metric", metric.unwrap_or_default()),
            ("metric_bits", format!("\"{}\"", best.loss)),
        ];
        // A pointer of a run that has no best checkpoint names none.
        if found["checkpoint"].is_null() {
            return Ok(());
        }
        if let Some((field, _)) = expected.iter().find(|(field, value)| !is_same(&found[*field], value)) {
            report.add_finding(&path, format!("its {} is not that of the best evaluation", quoted(field)));
        }
        Ok(())
    }

    fn check_folders(&self, report: &mut Report) -> Result<(), FileError> {
        let failed = |error| FileError::from_io("read", self.folder, error);
        let mut names = BTreeSet::new();
        for entry in std::fs::read_dir(self.folder).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            names.extend(name.starts_with(CHECKPOINT).then_some(name));
        }
        if let Some(record) = self.record() {
            for name in record.checkpoints.keys().filter(|name| !names.contains(*name)) {
                if self.is_finished() {
                    report.add_finding(&self.folder.join(name), "it is missing");
                } else {
                    report.notes.push(format!("{name} is gone; an unfinished run may have pruned it"));
                }
            }
        }
        for name in names {
            self.check_checkpoint(report, &name)?;
        }
        Ok(())
    }

    fn check_checkpoint(&self, report: &mut Report, name: &str) -> Result<(), FileError> {
        let folder = self.folder.join(name);
        let Some(_) = manifest(report, &folder)? else { return Ok(()) };
        report.checkpoints += 1;
        let step = name.trim_start_matches(CHECKPOINT).parse::<u64>().ok();
        let path = folder.join(Manifest::NAME);
        if let (Some(record), Some(receipt)) = (self.record(), self.receipt) {
            let found = Hash::of_file(&path)?;
            match record.checkpoints.get(name) {
                Some(recorded) if *recorded != found => {
                    report.add_finding(&path, format!("the receipt's hash of it is {recorded}, but it has {found}"));
                }
                Some(_) => (),
                None if !receipt.made.finished => {
                    report.notes.push(format!("{name} is newer than the receipt of this unfinished run"));
                }
                None => report.add_finding(&folder, "the receipt does not name it"),
            }
        }
        let path = folder.join(STATE);
        let Some(state) = report.damage_as_finding(&path, json::read::<UniqueValue>(&path))? else { return Ok(()) };
        let UniqueValue(state) = state;
        let same = |field: &str, expected: Option<Hash>| {
            expected.is_none_or(|expected| state[field].as_str() == Some(expected.to_string().as_str()))
        };
        // A changed line of the metrics has been named; the states after it are not to blame.
        let metrics_found = report.findings.iter().any(|finding| finding.path.ends_with(METRICS));
        let (Some(step), Some(chain)) = (step, self.chain) else { return Ok(()) };
        if state["step"].as_u64() != Some(step) {
            report.add_finding(&path, format!("it has step {}, expected {step}", quoted(&state["step"].to_string())));
        } else if chain.link(step).is_none() && !self.is_finished() {
            report.notes.push(format!("{name} is of an update that the resumed run has not done again yet"));
            return Ok(());
        } else if chain.link(step).is_none() || !same("chain", chain.link(step)) {
            report.add_finding(&path, format!("its link is not that of update {step} in the chain"));
        } else if !metrics_found && !same("metrics", self.lines.map(|lines| lines.digest(step))) {
            report.add_finding(&path, "its digest of the metrics is not that of their lines");
        } else if let (false, Some(lines), Some(receipt)) = (metrics_found, self.lines, self.receipt)
            && let Some(field) = state::wrong_field(&state, chain, &receipt.made, lines, step)
        {
            report.add_finding(&path, format!("its {} does not follow from the chain", quoted(&field)));
        }
        if let Some(stored) = self.stored() {
            stored.check_checkpoint(report, &folder, step)?;
        }
        Ok(())
    }

    fn check_final(&self, report: &mut Report) -> Result<(), FileError> {
        let folder = self.folder.join(FINAL);
        if folder.symlink_metadata().is_err() {
            if self.is_finished() {
                report.add_finding(&folder, "it is missing");
            }
            return Ok(());
        }
        let Some(manifest) = manifest(report, &folder)? else { return Ok(()) };
        let path = folder.join(receipt::NAME);
        let Some(own) = report.damage_as_finding(&path, Receipt::read(&folder))? else { return Ok(()) };
        let Some(receipt) = self.receipt else { return Ok(()) };
        if !receipt.made.finished {
            report.notes.push("final/ comes from an earlier end of this unfinished run".to_string());
            return Ok(());
        }
        if own.digest == receipt.digest {
            check_result(report, &folder, &manifest, receipt);
            if let Some(stored) = self.stored() {
                stored.check_final(report, &folder, final_step(&receipt.made))?;
            }
        } else {
            report.add_finding(&path, "it is not the receipt of this run");
        }
        Ok(())
    }
}

/// Whether a value is the one that is written so.
fn is_same(found: &Value, written: &str) -> bool {
    serde_json::from_str::<Value>(written).is_ok_and(|expected| expected == *found)
}
