//! Folders that are complete: a file more in one of them would be a finding of `verify`. Nothing is
//! written into the final weights of a run, a checkpoint, or a model that `export` wrote.

use crate::checkpoint::ADAPTER_CONFIG;
use crate::prepare::RunError;
use isobit_proof::{Manifest, chain};
use std::path::{Path, PathBuf};

/// Refuses a new file or folder in a complete folder, at any depth.
pub fn check_target(target: &Path) -> Result<(), RunError> {
    let parent = parent(target);
    match parent.ancestors().find(|folder| Manifest::read(folder).is_ok()) {
        None => Ok(()),
        Some(folder) => {
            let what = format!(
                "{} would be written into {}, whose files are listed in its {}",
                target.display(),
                folder.display(),
                Manifest::NAME
            );
            Err(RunError::Refused { what, hint: "choose a name outside of that folder" })
        }
    }
}

/// Refuses a new file or folder in the folder of a run, where `verify` would find it.
pub fn check_beside_run(target: &Path) -> Result<(), RunError> {
    match parent(target).ancestors().find(|folder| folder.join(chain::NAME).symlink_metadata().is_ok()) {
        None => Ok(()),
        Some(folder) => {
            let what = format!("{} would be written into the run {}", target.display(), folder.display());
            Err(RunError::Refused { what, hint: "choose a name outside of that folder: `verify` knows its files" })
        }
    }
}

/// Refuses a new file or folder in the folder of a base model.
pub fn check_beside_base(target: &Path, base: &Path) -> Result<(), RunError> {
    if base.canonicalize().is_ok_and(|base| parent(target).starts_with(base)) {
        let what = format!("{} would be written into the folder of the base model", target.display());
        return Err(RunError::Refused { what, hint: "choose a name outside of that folder" });
    }
    Ok(())
}

/// What makes a folder one of weights, which cannot be the folder of a run too.
pub(crate) fn holds_weights(folder: &Path) -> Option<&'static str> {
    [Manifest::NAME, ADAPTER_CONFIG, "config.json"]
        .into_iter()
        .find(|name| folder.join(name).symlink_metadata().is_ok())
}

/// The folder that a path lies in, without links; of folders that do not exist yet, the nearest
/// that does.
fn parent(target: &Path) -> PathBuf {
    let whole = std::path::absolute(target).unwrap_or_else(|_| target.to_path_buf());
    whole.ancestors().skip(1).find_map(|folder| folder.canonicalize().ok()).unwrap_or_default()
}
