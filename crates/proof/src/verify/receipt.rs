//! A receipt against itself: what it says the run was made from must give the identity that its
//! chain begins with.

use super::Report;
use crate::chain::Chain;
use crate::name::quoted;
use crate::receipt::{Made, Receipt, config_digest};
use std::collections::BTreeSet;
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
            "the receipt is of version 1: its digest covers neither the files of the result nor the segments, and the \
             course of the run (its length, learning rates and evaluations) was not checked"
                .to_string(),
        );
    }
}

/// What a chain says of its evaluations and tensors against itself and the receipt.
pub(super) fn check_chain(report: &mut Report, path: &Path, chain: &Chain, receipt: Option<&Receipt>) {
    let mut best: Option<f64> = None;
    for (step, evaluation) in chain.updates.iter().filter_map(|update| Some((update.step, update.evaluation?))) {
        let loss = f64::from_bits(evaluation.loss);
        let is_best = !loss.is_nan() && best.is_none_or(|best| loss < best);
        if is_best != evaluation.best {
            let what = format!("update {step}: it says wrongly whether its evaluation is the best so far");
            report.add_finding(path, what);
            break;
        }
        best = if is_best { Some(loss) } else { best };
    }
    let tensors: BTreeSet<&String> = chain.origin.tensors.iter().collect();
    if tensors.len() < chain.origin.tensors.len() {
        report.add_finding(path, "it names a trained tensor twice");
    }
    let Some(reordered) = receipt.map(|receipt| &receipt.made.reordered).filter(|names| !names.is_empty()) else {
        return;
    };
    // Only experts have another layout in files.
    let is_of_experts = |name: &String| tensors.contains(name) && name.contains(".experts");
    if let Some(name) = reordered.iter().find(|name| !is_of_experts(name)) {
        let what = format!("it says that files hold {} in another layout, which is not of experts", quoted(name));
        report.add_finding(&path.with_file_name(crate::receipt::NAME), what);
    }
    let count = reordered.len();
    let what = if count == 1 { "tensor of experts is".to_string() } else { "tensors of experts are".to_string() };
    report.notes.push(format!("{count} {what} stored in another layout: only a replay compares such weights"));
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
