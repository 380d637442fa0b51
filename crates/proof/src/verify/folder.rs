//! A run folder: the receipt, the chain it ends, the metrics, every checkpoint and the final
//! folder, each against the others.

use super::metrics::{self, Lines, Source};
use super::receipt::final_step;
use super::tensors::Stored;
use super::{Kind, Report, check_names, check_origin, check_result, manifest, small_files, state};
use crate::atomic::is_partial;
use crate::chain::{self, Chain};
use crate::error::FileError;
use crate::hash::{Hash, Manifest};
use crate::json::{self, UniqueValue};
use crate::layout::{
    self, ADAPTER_CONFIG, BESIDE_RESULT, DATA, FINAL, Holds, METRICS, SMALL_FILES, STATE, checkpoint_step,
};
use crate::lock::Lock;
use crate::name::{counted, quoted};
use crate::receipt::{self, Best, FolderRecord, Made, Receipt};
use crate::regular;
use std::collections::BTreeSet;
use std::path::Path;

pub(super) fn run(folder: &Path) -> Result<Report, FileError> {
    let mut report = Report { kind: Kind::Run, ..Report::default() };
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
    if let Some(chain) = &chain {
        super::receipt::check_chain(&mut report, &folder.join(chain::NAME), chain, receipt.as_ref());
    }
    whole.check_ends(&mut report);
    whole.check_files(&mut report)?;
    whole.check_folders(&mut report)?;
    whole.check_final(&mut report)?;
    let recorded = receipt.as_ref().map_or(0, |receipt| receipt.made.updates);
    report.updates = chain.as_ref().map_or(recorded, |chain| chain.updates.len() as u64);
    (report.receipt, report.chain) = (receipt, chain);
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
        let made = &self.receipt?.made;
        Some(Stored { chain: self.chain?, reordered: &made.reordered, holds: Holds::by_config(&made.config) })
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
                format!("it has {}, but the receipt covers {}", counted(updates, "update"), made.updates),
            ),
            Some(link) if link != made.link => {
                report.add_finding(&path, format!("its link of update {} is not that of the chain", made.updates));
            }
            Some(_) if made.updates < updates && made.finished => report.add_finding(
                &self.folder.join(chain::NAME),
                format!(
                    "it has {}, but the receipt says that the run ended after {}",
                    counted(updates, "update"),
                    made.updates
                ),
            ),
            Some(_) if made.updates < updates => {
                report.notes.push(format!("the receipt covers {} of {}", made.updates, counted(updates, "update")));
            }
            Some(_) => (),
        }
        if made.best != best_until(chain, made.updates) {
            report.add_finding(&path, "its best evaluation is not that of the chain");
        }
        if let (Some(lines), Some(record)) = (self.lines, self.record())
            && lines.digest(made.updates) != record.metrics
            && !report.findings.iter().any(|finding| finding.path.ends_with(METRICS))
        {
            let what = "a line is missing, or differs from what the receipt recorded";
            report.add_finding(&self.folder.join(METRICS), what);
        }
    }

    /// Small files, and anything that does not belong here.
    fn check_files(&self, report: &mut Report) -> Result<(), FileError> {
        let Some(receipt) = self.receipt else { return Ok(()) };
        if let Some(record) = &receipt.folder {
            small_files::check_names(report, self.folder, receipt, record);
        } else {
            report.add_finding(&self.folder.join(receipt::NAME), "it has no record of the folder");
        }
        let recorded = self.record().into_iter().flat_map(|record| &record.files);
        for (name, recorded) in recorded.filter(|(name, _)| SMALL_FILES.contains(&name.as_str())) {
            let path = self.folder.join(name);
            let read = regular::read(&path, json::BYTES_MAX).map(|bytes| Hash::of_bytes(&bytes));
            let Some(found) = report.damage_as_finding(&path, read)? else { continue };
            report.files += 1;
            if found == *recorded && name == DATA {
                small_files::check_data(report, &path, receipt)?;
            } else if found != *recorded {
                if self.is_finished() {
                    report.add_finding(&path, format!("the recorded hash is {recorded}, but it has {found}"));
                } else {
                    report.notes.push(format!("{name} changed after the receipt of this unfinished run was written"));
                }
            }
        }
        if self.is_finished() {
            small_files::check_pointers(report, self.folder, receipt)?;
        }
        let failed = |error| FileError::from_io("read", self.folder, error);
        let mut names = BTreeSet::new();
        for entry in std::fs::read_dir(self.folder).map_err(failed)? {
            names.insert(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
        }
        for name in names {
            if is_partial(&name) && Lock::in_use(&self.folder.join(&name)).is_some() {
                report.notes.push(format!("{name} is what `isobit prove` is writing"));
            } else if is_partial(&name) || layout::is_partial_folder(&name) {
                report.notes.push(format!("{name} was left by a crash; `train --resume` removes it"));
            } else if !layout::belongs(&name) {
                report.add_finding(&self.folder.join(&name), "it does not belong to the run");
            } else if layout::is_file_of_run(&name) && self.folder.join(&name).is_dir() {
                report.add_finding(&self.folder.join(&name), "it is a folder, not a regular file");
            }
        }
        Ok(())
    }

    fn check_folders(&self, report: &mut Report) -> Result<(), FileError> {
        let failed = |error| FileError::from_io("read", self.folder, error);
        let mut names = BTreeSet::new();
        for entry in std::fs::read_dir(self.folder).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            names.extend(checkpoint_step(&name).map(|step| (step, name)));
        }
        if let Some(record) = self.record() {
            for name in record.checkpoints.keys().filter(|name| !names.iter().any(|(_, there)| there == *name)) {
                if self.is_finished() {
                    report.add_finding(&self.folder.join(name), "it is missing");
                } else {
                    report.notes.push(format!("{name} is gone; an unfinished run may have pruned it"));
                }
            }
        }
        for (step, name) in names {
            self.check_checkpoint(report, (step, &name))?;
        }
        Ok(())
    }

    fn check_checkpoint(&self, report: &mut Report, (step, name): (u64, &str)) -> Result<(), FileError> {
        let folder = self.folder.join(name);
        let Some(manifest) = manifest(report, &folder, &[])? else { return Ok(()) };
        report.checkpoints += 1;
        if let Some(receipt) = self.receipt {
            let expected = Holds::by_config(&receipt.made.config).checkpoint_files();
            check_names(report, &folder, manifest.files.keys(), (expected, "a checkpoint of this run"));
            check_origin(report, &folder, &manifest, &receipt.made);
        }
        self.check_adapter_config(report, &folder, &manifest)?;
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
        let Some(state) = report.damage_as_finding(&path, json::read_small::<UniqueValue>(&path))? else {
            return Ok(());
        };
        let UniqueValue(state) = state;
        let same = |field: &str, expected: Option<Hash>| {
            expected.is_none_or(|expected| state[field].as_str() == Some(expected.to_string().as_str()))
        };
        // A changed line of the metrics has been named; the states after it are not to blame.
        let metrics_found = report.findings.iter().any(|finding| finding.path.ends_with(METRICS));
        let Some(chain) = self.chain else { return Ok(()) };
        // A checkpoint of before the run went back stays until its step is saved again, perhaps
        // after other lines of metrics.
        let is_ahead = !self.is_finished() && small_files::latest(self.folder).is_none_or(|latest| step > latest);
        if state["step"].as_u64() != Some(step) {
            report.add_finding(&path, format!("it has step {}, expected {step}", quoted(&state["step"].to_string())));
        } else if chain.link(step).is_none() && !self.is_finished() {
            report.notes.push(format!("{name} is of an update that the resumed run has not done again yet"));
            return Ok(());
        } else if chain.link(step).is_none() || !same("chain", chain.link(step)) {
            report.add_finding(&path, format!("its link is not that of update {step} in the chain"));
        } else if !is_ahead && !metrics_found && !same("metrics", self.lines.map(|lines| lines.digest(step))) {
            report.add_finding(&path, "its digest of the metrics is not that of their lines");
        } else if let (false, Some(lines), Some(receipt)) = (metrics_found, self.lines, self.receipt)
            && let Some(field) = state::wrong_field(&state, chain, &receipt.made, lines, (step, is_ahead))
        {
            report.add_finding(&path, format!("its {} does not follow from the chain", quoted(&field)));
        }
        if is_ahead {
            report.notes.push(format!("{name} is later than latest.json: the run writes it again"));
        }
        if let Some(stored) = self.stored() {
            stored.check_checkpoint(report, &folder, step)?;
        }
        Ok(())
    }

    /// Of a finished run, the config of every adapter is that of the final folder, but for the name
    /// of the base, which may move.
    fn check_adapter_config(&self, report: &mut Report, folder: &Path, own: &Manifest) -> Result<(), FileError> {
        let last = self.folder.join(FINAL);
        if !self.is_finished() || !own.files.contains_key(ADAPTER_CONFIG) || !last.join(ADAPTER_CONFIG).is_file() {
            return Ok(());
        }
        let mut read = |path: &Path| -> Result<Option<serde_json::Value>, FileError> {
            let found = report.damage_as_finding(path, json::read_small::<UniqueValue>(path))?;
            Ok(found.map(|UniqueValue(mut config)| {
                if let Some(config) = config.as_object_mut() {
                    config.remove("base_model_name_or_path");
                }
                config
            }))
        };
        let path = folder.join(ADAPTER_CONFIG);
        if let (Some(own), Some(last)) = (read(&path)?, read(&last.join(ADAPTER_CONFIG))?)
            && own != last
        {
            report.add_finding(&path, "it is not that of the final folder");
        }
        Ok(())
    }

    /// Whether a final folder can be of an earlier end of this run, made from the same; and whether
    /// the chain goes that far.
    fn earlier_end(&self, own: &Made, made: &Made) -> (bool, bool) {
        // Receipts of version 1 do not say how many rows there are.
        let start = |of: &Made| Made {
            rows: own.rows.and(of.rows),
            updates: 0,
            link: Hash([0; 32]),
            best: None,
            finished: true,
            ..of.clone()
        };
        let end = self.chain.and_then(|chain| Some((chain.link(own.updates)?, best_until(chain, own.updates))));
        let is_end = end.as_ref().is_none_or(|(link, best)| (own.link, &own.best) == (*link, best));
        (own.finished && is_end && start(own) == start(made), end.is_some())
    }

    fn check_final(&self, report: &mut Report) -> Result<(), FileError> {
        let folder = self.folder.join(FINAL);
        if folder.symlink_metadata().is_err() {
            if self.is_finished() {
                report.add_finding(&folder, "it is missing");
            }
            return Ok(());
        }
        for name in BESIDE_RESULT.iter().filter(|name| folder.join(name).is_dir()) {
            report.add_finding(&folder.join(name), "it is a folder, not a regular file");
        }
        let Some(manifest) = manifest(report, &folder, &BESIDE_RESULT)? else { return Ok(()) };
        let path = folder.join(receipt::NAME);
        let Some(own) = report.damage_as_finding(&path, Receipt::read(&folder))? else { return Ok(()) };
        let Some(receipt) = self.receipt else { return Ok(()) };
        if !receipt.made.finished {
            report.notes.push("final/ comes from an earlier end of this unfinished run".to_string());
            let (is_earlier, is_known) = self.earlier_end(&own.made, &receipt.made);
            if !is_earlier {
                report.add_finding(&path, "it is not the receipt of this run");
                return Ok(());
            }
            if !is_known {
                let what = "final/ is not compared: the chain does not have the last update of it yet";
                report.notes.push(what.to_string());
                return Ok(());
            }
        } else if own != receipt.of_result() {
            report.add_finding(&path, "it is not the receipt of this run");
            return Ok(());
        }
        check_result(report, &folder, &manifest, &own);
        if let Some(stored) = self.stored() {
            stored.check_final(report, &folder, (final_step(&own.made), receipt.made.finished))?;
        }
        Ok(())
    }
}

/// The best evaluation of the first updates.
fn best_until(chain: &Chain, updates: u64) -> Option<Best> {
    let evaluated = chain.updates.iter().take_while(|update| update.step <= updates);
    let best = evaluated.filter_map(|update| Some((update.step, update.evaluation.filter(|of| of.best)?)));
    best.last().map(|(step, of)| Best { step, loss: format!("{:016x}", of.loss) })
}
