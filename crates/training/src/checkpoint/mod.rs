//! Checkpoints: everything a run needs to go on with the same bits, in a folder that exists whole
//! or not at all.
//!
//! A checkpoint is written into a temporary folder, file by file, each synced, the manifest last;
//! then the folder gets its name, and then `latest.json` points at it. Stopped anywhere, the run
//! finds the checkpoint before or the new one. `state.rs` is what is saved, `write.rs` how,
//! `read.rs` the way back, `folder.rs` the run folder around it, `owner.rs` what in it is this
//! run's, `stopped.rs` the checkpoints that only a signal asked for.

mod error;
mod folder;
mod owner;
mod read;
mod state;
mod stopped;
mod write;

#[cfg(test)]
mod crash;

pub use error::{Difference, Error};
pub use folder::{Latest, Pointer, begin, best, clean, go_back_to, latest, mark_best, prune, restore_best};
pub use owner::{Start, examine};
pub use read::{Opened, inspect, load, open};
pub use state::{Best, Identity, Progress, Snapshot};
pub use stopped::announce;
pub use write::{put_adapter, replace_final, save};

use isobit_proof::FileError;
use std::path::{Path, PathBuf};

pub const ADAPTER: &str = "adapter_model.safetensors";
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
pub const MODEL: &str = "model.safetensors";
pub const OPTIMIZER: &str = "optimizer.safetensors";
pub const STATE: &str = "state.json";
pub const FINAL: &str = "final";
/// The config in full, beside the checkpoints.
pub const RESOLVED: &str = "config.resolved.toml";

/// The folder of a step inside the run folder.
pub fn folder_of(output_dir: &Path, step: u64) -> PathBuf {
    output_dir.join(folder_name(step))
}

pub(crate) fn folder_name(step: u64) -> String {
    format!("checkpoint-{step}")
}

/// The step of a checkpoint's folder name, if it is one.
pub fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("checkpoint-")?.parse().ok()?;
    (folder_name(step) == name).then_some(step)
}

/// Called before every step that changes the disk, with the path it will change. The tests stop
/// here.
type BeforeWrite<'a> = &'a mut dyn FnMut(&Path) -> Result<(), FileError>;

#[expect(clippy::unnecessary_wraps, reason = "the watch that never stops anything")]
fn unwatched(_: &Path) -> Result<(), FileError> {
    Ok(())
}
