//! Checkpoints: everything a run needs to continue with the same bits, in a folder that exists
//! whole or not at all.
//!
//! A checkpoint is written into a temporary folder, file by file, each synced, the manifest last;
//! then the folder is renamed, and then `latest.json` points at it. Stopped anywhere, the run finds
//! either the previous checkpoint or the new one. `state.rs` defines what is saved, `write.rs`
//! saves it, `read.rs` reads it back, `folder.rs` manages the run folder, `owner.rs` finds what
//! belongs to this run, and `stopped.rs` tracks checkpoints requested only by a signal.

mod error;
mod folder;
mod owner;
mod read;
mod state;
mod stopped;
mod write;

#[cfg(test)]
mod crash;

pub use error::{Error, IdentityDifference};
pub use folder::{Latest, Pointer, begin, best, clean, go_back_to, latest, mark_best, prune, restore_best};
pub use owner::{Start, examine, kept_ahead, steps};
pub use read::{Opened, inspect, load, open, open_as_it_is};
pub use state::{Best, Identity, Progress, Snapshot};
pub use stopped::announce;
pub use write::{put_adapter, replace_final, save};

pub(crate) use isobit_proof::layout::checkpoint_name as folder_name;
pub use isobit_proof::layout::{
    ADAPTER, ADAPTER_CONFIG, FINAL, MODEL, OPTIMIZER, RESOLVED, STATE, checkpoint_step as step_of,
};

use isobit_proof::FileError;
use std::path::{Path, PathBuf};

/// The folder of a step inside the run folder.
pub fn folder_of(output_dir: &Path, step: u64) -> PathBuf {
    output_dir.join(folder_name(step))
}

/// Called before every change to the disk, with the path about to change. Tests stop here.
type BeforeWrite<'a> = &'a mut dyn FnMut(&Path) -> Result<(), FileError>;

#[expect(clippy::unnecessary_wraps, reason = "the watch that never stops anything")]
fn unwatched(_: &Path) -> Result<(), FileError> {
    Ok(())
}
