//! A run folder: the receipt, the chain it ends, the metrics, every checkpoint and the final
//! folder, each against the others.

use super::metrics::{self, Lines};
use super::{Report, check_result, manifest};
use crate::atomic::is_partial;
use crate::chain::{self, Chain};
use crate::error::FileError;
use crate::hash::{Hash, Manifest};
use crate::json;
use crate::layout::{self, ADAPTER, BEST, CHECKPOINT, FINAL, LATEST, METRICS, STATE};
use crate::name::quoted;
use crate::receipt::{self, FolderRecord, Receipt};
use crate::safetensors::TensorFiles;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// The key that makes the final weights those of the best evaluation.
const TAKES_BEST: &str = "training.load_best_model_at_end";

pub(super) fn run(folder: &Path) -> Result<Report, FileError> {
    let mut report = Report { kind: "run", ..Report::default() };
    let chain = report.damage_as_finding(&folder.join(chain::NAME), Chain::read(folder))?;
    report.files += usize::from(chain.is_some());
    let receipt = report.damage_as_finding(&folder.join(receipt::NAME), Receipt::read(folder))?;
    report.files += usize::from(receipt.is_some());
    let lines = match &chain {
        Some(chain) => Some(metrics::check(&mut report, folder, chain)?),
        None => None,
    };
    let whole = Whole { folder, chain: chain.as_ref(), receipt: receipt.as_ref(), lines: lines.as_ref() };
    whole.check_ends(&mut report);
    whole.check_files(&mut report)?;
    whole.check_folders(&mut report)?;
    whole.check_final(&mut report)?;
    report.updates = chain.as_ref().map_or(0, |chain| chain.updates.len() as u64);
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

    fn is_finished(&self) -> bool {
        self.receipt.is_some_and(|receipt| receipt.made.finished)
    }

    /// The receipt against the chain and the metrics.
    fn check_ends(&self, report: &mut Report) {
        let (Some(receipt), Some(chain)) = (self.receipt, self.chain) else { return };
        let (made, updates) = (&receipt.made, chain.updates.len() as u64);
        let path = self.folder.join(receipt::NAME);
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
                if self.is_finished() || ![LATEST, BEST].contains(&name.as_str()) {
                    report.add_finding(&path, format!("the recorded hash is {recorded}, but it has {found}"));
                } else {
                    report.notes.push(format!("{name} changed after the receipt of this unfinished run was written"));
                }
            }
        }
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
        let Some(state) = report.damage_as_finding(&path, json::read::<Value>(&path))? else { return Ok(()) };
        let same = |field: &str, expected: Option<Hash>| {
            expected.is_none_or(|expected| state[field].as_str() == Some(expected.to_string().as_str()))
        };
        // A changed line of the metrics has been named; the states after it are not to blame.
        let metrics_found = report.findings.iter().any(|finding| finding.path.ends_with(METRICS));
        let (Some(step), Some(chain)) = (step, self.chain) else { return Ok(()) };
        if state["step"].as_u64() != Some(step) {
            report.add_finding(&path, format!("it has step {}, expected {step}", quoted(&state["step"].to_string())));
        } else if chain.link(step).is_none() || !same("chain", chain.link(step)) {
            report.add_finding(&path, format!("its link is not that of update {step} in the chain"));
        } else if !metrics_found && !same("metrics", self.lines.map(|lines| lines.digest(step))) {
            report.add_finding(&path, "its digest of the metrics is not that of their lines");
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
        if own.made == receipt.made {
            check_result(report, &folder, &manifest, receipt);
            self.check_final_weights(report, &folder)?;
        } else {
            report.add_finding(&path, "it is not the receipt of this run");
        }
        Ok(())
    }

    /// The final weights are those of the checkpoint that they are said to be, if it is still there
    /// and they are not rounded.
    fn check_final_weights(&self, report: &mut Report, folder: &Path) -> Result<(), FileError> {
        let Some(made) = self.receipt.map(|receipt| &receipt.made) else { return Ok(()) };
        let takes_best = made.config.get(TAKES_BEST).is_some_and(|value| value == "true");
        let step = made.best.as_ref().filter(|_| takes_best).map_or(made.updates, |best| best.step);
        let checkpoint = self.folder.join(format!("{CHECKPOINT}{step}"));
        if !checkpoint.is_dir() {
            report.notes.push(format!("final weights are not compared: {CHECKPOINT}{step} is gone"));
            return Ok(());
        }
        let open = |folder: &Path| {
            let stem = if folder.join(ADAPTER).is_file() { "adapter_model" } else { "model" };
            TensorFiles::open_stem(folder, stem)
        };
        let (Some(saved), Some(last)) = (
            report.damage_as_finding(&checkpoint, open(&checkpoint))?,
            report.damage_as_finding(folder, open(folder))?,
        ) else {
            return Ok(());
        };
        for name in saved.names() {
            // A folder may leave out what another tensor holds, like a tied head.
            let Some((saved, last)) = saved.get(name).ok().zip(last.get(name).ok()) else { continue };
            if saved.dtype == last.dtype && saved.bytes != last.bytes {
                report.add_finding(folder, format!("{} is not that of {CHECKPOINT}{step}", quoted(name)));
                return Ok(());
            }
        }
        Ok(())
    }
}
