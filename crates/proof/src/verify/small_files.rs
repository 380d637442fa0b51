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

/// `data.json` names the training data of the receipt: the same contents in the same order.
pub(super) fn check_data(report: &mut Report, path: &Path, receipt: &Receipt) -> Result<(), FileError> {
    let Some(UniqueValue(found)) = report.damage_as_finding(path, json::read(path))? else { return Ok(()) };
    let found = found["files"].as_array().into_iter().flatten().map(|file| file["blake3"].as_str().unwrap_or(""));
    let trained = receipt.made.data.iter().filter(|file| file.used_for == "train");
    if !found.eq(trained.map(|file| file.blake3.to_string())) {
        report.add_finding(path, "its files are not the training data that the receipt names");
    }
    Ok(())
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
    let metric = u64::from_str_radix(&best.loss, 16).map_or(f64::NAN, f64::from_bits);
    let pointer = json!({ "schema": "isobit.pointer/1", "checkpoint": checkpoint_name(best.step), "step": best.step,
        "metric": metric, "metric_bits": best.loss });
    compare(report, &path, &pointer, "of the best evaluation")
}

/// The step that `latest.json` of an unfinished run names; none if it names none yet.
pub(super) fn latest(folder: &Path) -> Option<u64> {
    let UniqueValue(pointer) = json::read_small(&folder.join(LATEST)).ok()?;
    pointer["step"].as_u64()
}

/// Names the first field that is not as expected. A missing file has been found by its hash.
fn compare(report: &mut Report, path: &Path, expected: &Value, of: &str) -> Result<(), FileError> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    let Some(UniqueValue(found)) = report.damage_as_finding(path, json::read_small(path))? else { return Ok(()) };
    // Decimals are read as the file's are: a parser may be off in the last place.
    let expected = serde_json::from_str::<Value>(&expected.to_string()).unwrap_or_default();
    let fields = |value: &Value| value.as_object().map_or(Vec::new(), |object| object.keys().cloned().collect());
    let names: BTreeSet<String> = fields(&found).into_iter().chain(fields(&expected)).collect();
    if let Some(name) = names.iter().find(|name| found.get(name) != expected.get(name)) {
        report.add_finding(path, format!("its {} is not that {of}", quoted(name)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also one whose decimal form is not read as the same number.
    #[test]
    fn a_pointer_is_compared_as_it_is_written() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join(BEST);
        for bits in [0x3fca_3243_5555_5555_u64, 0x3ff0_0000_0000_0000, 0x4014_0aaa_aaaa_aaab] {
            let pointer = json!({ "step": 3, "metric": f64::from_bits(bits) });
            std::fs::write(&path, format!("{pointer:#}\n")).expect("written");
            let mut report = Report::default();
            compare(&mut report, &path, &pointer, "of the best evaluation").expect("read");
            assert_eq!(report.findings, []);
            compare(&mut report, &path, &json!({ "step": 3 }), "of the best evaluation").expect("read");
            assert_eq!(report.findings[0].what, "its `metric` is not that of the best evaluation");
        }
    }
}
