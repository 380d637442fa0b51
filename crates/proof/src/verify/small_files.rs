//! The small files of a run folder: which of them the receipt has hashes of, and the two pointers,
//! which follow from the chain.

use super::Report;
use crate::error::FileError;
use crate::json::{self, UniqueValue};
use crate::layout::{BEST, LATEST, SMALL_FILES, checkpoint_name};
use crate::name::quoted;
use crate::receipt::{self, FolderRecord, Receipt};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// The record names small files of a run and nothing else, and all that a run leaves.
pub(super) fn check_names(report: &mut Report, folder: &Path, receipt: &Receipt, record: &FolderRecord) {
    let path = folder.join(receipt::NAME);
    for name in record.files.keys().filter(|name| !SMALL_FILES.contains(&name.as_str())) {
        report.add_finding(&path, format!("{} is not a file that a run records", quoted(name)));
    }
    // Receipts of version 1 are of times with fewer files.
    let has_best = receipt.made.finished && receipt.made.best.is_some();
    let wanted = SMALL_FILES.iter().filter(|name| **name != BEST || has_best).filter(|_| receipt.segment.is_some());
    for name in wanted.filter(|name| !record.files.contains_key(**name)) {
        let path = folder.join(name);
        let there = path.symlink_metadata().is_ok();
        report.add_finding(&path, if there { "the receipt does not name it" } else { "it is missing" });
    }
}

/// Of a finished run, `latest.json` names the last checkpoint and `best.json` the best one.
pub(super) fn check_pointers(report: &mut Report, folder: &Path, receipt: &Receipt) -> Result<(), FileError> {
    let step = receipt.made.updates;
    let pointer = json!({ "schema": "isobit.pointer/1", "checkpoint": checkpoint_name(step), "step": step });
    compare(report, &folder.join(LATEST), &pointer, "of the last checkpoint")?;
    let path = folder.join(BEST);
    let Some(best) = &receipt.made.best else {
        if path.symlink_metadata().is_ok() {
            report.add_finding(&path, "the run has no evaluation that is the best");
        }
        return Ok(());
    };
    let metric = u64::from_str_radix(&best.loss, 16).map(f64::from_bits).unwrap_or(f64::NAN);
    let pointer = json!({ "schema": "isobit.pointer/1", "checkpoint": checkpoint_name(best.step), "step": best.step,
        "metric": metric, "metric_bits": best.loss });
    compare(report, &path, &pointer, "of the best evaluation")
}

/// Names the first field that is not as expected. A missing file has been found by its hash.
fn compare(report: &mut Report, path: &Path, expected: &Value, of: &str) -> Result<(), FileError> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    let Some(UniqueValue(found)) = report.damage_as_finding(path, json::read_small(path))? else { return Ok(()) };
    let fields = |value: &Value| value.as_object().map_or(Vec::new(), |object| object.keys().cloned().collect());
    let names: BTreeSet<String> = fields(&found).into_iter().chain(fields(expected)).collect();
    if let Some(name) = names.iter().find(|name| found.get(name) != expected.get(name)) {
        report.add_finding(path, format!("its {} is not that {of}", quoted(name)));
    }
    Ok(())
}
