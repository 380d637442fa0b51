//! A receipt against itself: what it says the run was made from must give the identity that its
//! chain begins with.

use super::Report;
use crate::receipt::{Made, Receipt, config_digest};
use std::path::Path;

/// Config and base against their digests in the identity. Rows have one too; it takes the
/// tokenizer to compute it, so a replay compares it.
pub(super) fn check(report: &mut Report, path: &Path, receipt: &Receipt) {
    let made = &receipt.made;
    let identity = |field: &str| made.identity.get(field).map_or("", String::as_str);
    if identity("run") != config_digest(&made.config).to_string() {
        report.add_finding(path, "its config is not the one that the identity of the run has the digest of");
    }
    if identity("base") != made.base.digest().to_string() {
        report.add_finding(path, "its base files are not those that the identity of the run has the digest of");
    }
    if made.config.get("profile").is_none_or(|profile| profile.trim_matches('"') != identity("profile")) {
        report.add_finding(path, "its profile is not that of its config");
    }
    if made.finished != receipt.result.is_some() {
        report.add_finding(path, "it names files of a result although the run is not finished, or the reverse");
    }
    if receipt.segment.is_none() {
        report.notes.push(
            "the receipt is of version 1: its digest covers neither the files of the result nor the segments"
                .to_string(),
        );
    }
}

/// The update whose weights the final folder holds.
pub(super) fn final_step(made: &Made) -> u64 {
    let takes_best = made.config.get("training.load_best_model_at_end").is_some_and(|value| value == "true");
    made.best.as_ref().filter(|_| takes_best).map_or(made.updates, |best| best.step)
}

/// Updates of an epoch; none if the receipt does not say how many rows there are.
pub(super) fn updates_of_epoch(made: &Made) -> Option<u64> {
    let together = made.config.get("training.rows_per_update")?.parse::<u64>().ok()?;
    Some(made.rows?.div_ceil(together.max(1)).max(1))
}
