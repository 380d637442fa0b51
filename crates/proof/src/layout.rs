//! The names of what a run folder holds, for everybody who writes or reads one
//! (`docs/checkpoint-format.md`), and which of it the record of the run does not cover.
//!
//! Files with a format of their own are named beside it: `chain::NAME`, `receipt::NAME`,
//! `statement::NAME`, `Lock::NAME` and `Manifest::NAME`.

use crate::error::FileError;
use crate::lock::Lock;
use crate::safetensors::TensorFiles;
use crate::{chain, receipt, statement};
use std::collections::BTreeMap;
use std::path::Path;

/// The complete config, beside the checkpoints.
pub const RESOLVED: &str = "config.resolved.toml";
/// The files that the run trains on.
pub const DATA: &str = "data.json";
pub const METRICS: &str = "metrics.jsonl";
/// Where the result is.
pub const FINAL: &str = "final";
/// These two move while a run trains.
pub const LATEST: &str = "latest.json";
pub const BEST: &str = "best.json";
/// Checkpoints that were saved only because of a signal.
pub const STOPPED: &str = "stopped.json";
/// Folder of event files.
pub const TENSORBOARD: &str = "tensorboard";
pub const REPORT: &str = "report.html";
/// Texts before and after training.
pub const SAMPLES: &str = "samples.json";

/// Files of a checkpoint; those of weights also in the final folder.
pub const ADAPTER: &str = "adapter_model.safetensors";
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
pub const MODEL: &str = "model.safetensors";
pub const OPTIMIZER: &str = "optimizer.safetensors";
pub const STATE: &str = "state.json";

/// Small files whose hashes the receipt of a run has; all but the last are in every run.
pub const SMALL_FILES: [&str; 4] = [RESOLVED, DATA, LATEST, BEST];

/// What checkpoints and the final folder of a run hold. Its config decides, never the files that
/// are there: a file of the other kind beside the weights would hide them from every check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    Adapter,
    Model,
}

impl Holds {
    /// By the keys that a receipt has.
    pub fn by_config(config: &BTreeMap<String, String>) -> Self {
        if config.get("adapter.type").is_some_and(|kind| kind == "\"lora\"") { Self::Adapter } else { Self::Model }
    }

    /// The file of its weights in a checkpoint.
    pub fn weights(self) -> &'static str {
        match self {
            Self::Adapter => ADAPTER,
            Self::Model => MODEL,
        }
    }

    /// Opens the weights of a checkpoint, or of the final folder, where those of a model may be in
    /// several files.
    pub fn open(self, folder: &Path) -> Result<TensorFiles, FileError> {
        match self {
            Self::Adapter => TensorFiles::open_file(&folder.join(ADAPTER)),
            Self::Model => TensorFiles::open(folder),
        }
    }

    /// Files of a checkpoint besides its manifest.
    pub(crate) fn checkpoint_files(self) -> &'static [&'static str] {
        match self {
            Self::Adapter => &[ADAPTER, ADAPTER_CONFIG, OPTIMIZER, STATE],
            Self::Model => &[MODEL, OPTIMIZER, STATE],
        }
    }
}

/// The start of the name of a checkpoint.
pub(crate) const CHECKPOINT: &str = "checkpoint-";

/// Written by the program, with nothing recorded about them: who holds the folder, what changes
/// after the end of a run, and what is made from the rest.
const UNRECORDED: [&str; 6] = [Lock::NAME, STOPPED, TENSORBOARD, REPORT, SAMPLES, statement::NAME];
/// What people may add: their config, a plan, and a signature of OpenSSF model-signing.
const ADDED: [&str; 3] = ["config.toml", "plan.json", "model.sig"];
/// What a record covers besides small files and checkpoints.
const RECORDED: [&str; 4] = [chain::NAME, receipt::NAME, METRICS, FINAL];
/// What may be put into a final folder: proofs about it.
pub(crate) const BESIDE_RESULT: [&str; 2] = [statement::NAME, "model.sig"];

/// Whether a run folder may hold this.
pub(crate) fn belongs(name: &str) -> bool {
    let mut listed = RECORDED.iter().chain(&SMALL_FILES).chain(&UNRECORDED).chain(&ADDED);
    listed.any(|listed| *listed == name) || checkpoint_step(name).is_some()
}

/// Whether this is a file, of what a run folder may hold beside what is recorded.
pub(crate) fn is_file_of_run(name: &str) -> bool {
    name != TENSORBOARD && UNRECORDED.iter().chain(&ADDED).any(|listed| *listed == name)
}

/// The folder of a step inside the run folder.
pub fn checkpoint_name(step: u64) -> String {
    format!("{CHECKPOINT}{step}")
}

/// The step in a checkpoint's folder name; None for other names. No run writes one before its first
/// update: what it starts from is the base.
pub fn checkpoint_step(name: &str) -> Option<u64> {
    let step = name.strip_prefix(CHECKPOINT)?.parse().ok()?;
    (step > 0 && checkpoint_name(step) == name).then_some(step)
}

/// Whether a name is the temporary one of a checkpoint or of the final folder, while it is written
/// or removed.
pub fn is_partial_folder(name: &str) -> bool {
    let inner = name.strip_prefix('.').and_then(|rest| rest.strip_suffix(".partial"));
    let inner = inner.map(|inner| inner.strip_suffix(".removed").unwrap_or(inner));
    inner.is_some_and(|inner| inner == FINAL || checkpoint_step(inner).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn temporary_folders_are_told_by_their_names() {
        for ours in
            [".checkpoint-2.partial", ".checkpoint-2.removed.partial", ".final.partial", ".final.removed.partial"]
        {
            assert!(is_partial_folder(ours), "{ours}");
        }
        for other in
            [".partial", "..partial", ".x.partial", "checkpoint-2", ".checkpoint-x.partial", ".removed.partial"]
        {
            assert!(!is_partial_folder(other), "{other}");
        }
    }

    const FOLDERS: &str = include_str!("../../../docs/checkpoint-format.md");
    const RECEIPTS: &str = include_str!("../../../docs/receipt-format.md");

    /// The tree of docs/checkpoint-format.md has what the program writes, and nothing else.
    #[test]
    fn the_page_lists_what_a_run_leaves() {
        let (_, tree) = FOLDERS.split_once("    out/run-a/\n").expect("a tree");
        let top = tree.lines().take_while(|line| !line.is_empty()).filter_map(|line| line.strip_prefix("      "));
        let listed: BTreeSet<&str> = top
            .filter_map(|line| line.split_whitespace().next().filter(|_| !line.starts_with(' ')))
            .map(|name| name.trim_end_matches('/'))
            .collect();
        let written = RECORDED.iter().chain(&SMALL_FILES).chain(&UNRECORDED).chain(&["checkpoint-N"]);
        assert_eq!(listed, written.copied().collect());
    }

    /// The same for what docs/receipt-format.md says is not covered.
    #[test]
    fn the_page_lists_what_is_not_covered() {
        let (_, rest) = RECEIPTS.split_once("Not covered: ").expect("a list");
        let (list, _) = rest.split_once("\n- ").expect("another item");
        let listed: BTreeSet<&str> =
            list.split('`').skip(1).step_by(2).map(|name| name.trim_end_matches('/')).collect();
        assert_eq!(listed, UNRECORDED.iter().chain(&ADDED).copied().collect());
    }

    #[test]
    fn a_checkpoint_is_named_by_its_step_in_one_way() {
        assert_eq!(checkpoint_step(&checkpoint_name(200)), Some(200));
        for other in [
            "checkpoint-",
            "checkpoint-0",
            "checkpoint-02",
            "checkpoint-+2",
            "checkpoint-2x",
            "Checkpoint-2",
            ".checkpoint-2.partial",
        ] {
            assert_eq!(checkpoint_step(other), None, "{other}");
        }
    }
}
