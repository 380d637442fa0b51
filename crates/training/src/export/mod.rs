//! Models for other programs: a Hugging Face folder with an adapter merged into its base, and (in
//! `gguf/`) GGUF files.
//!
//! The arithmetic is in `docs/numerics.md`, "Merge" and "Blocks of GGUF files". Weights pass
//! through a panel of rows at a time. What is written appears under its name whole, or not at all,
//! and never in place of something else.

pub mod gguf;

use crate::checkpoint;
use crate::config::SaveDtype;
use crate::model_folder::ModelFolder;
use crate::prepare::RunError;
use isobit_kernels::Backend;
use isobit_models::{Merged, Weights};
use isobit_proof::atomic::sync_folder;
use isobit_proof::{FileError, Manifest, disk};
use std::path::{Path, PathBuf};

/// A finished folder that does not have its name yet.
pub struct Unpublished {
    partial: Partial,
    target: PathBuf,
    names: Vec<String>,
}

impl Unpublished {
    /// Makes the folder appear under its name and returns the names of its files.
    pub fn publish(self) -> Result<Vec<String>, RunError> {
        self.partial.publish(&self.target)?;
        Ok(self.names)
    }
}

/// Writes the folder `target`: the model in `base` with the adapter of `merged`. It gets its name
/// when the caller knows that the base is whole.
pub fn merge<B: Backend>(
    backend: &B,
    base: &Path,
    weights: &Weights,
    merged: &Merged<'_>,
    dtype: Option<SaveDtype>,
    target: &Path,
) -> Result<Unpublished, RunError> {
    let folder = ModelFolder::merged(base, weights, merged, dtype)?;
    let partial = Partial::create(target)?;
    let names = folder.write_values(&partial.path, &mut |name, _, put| {
        merged.values(backend, name, &mut |values| {
            finite(name, values)?;
            put(values)
        })
    })?;
    Manifest::of(&partial.path, names.iter().map(String::as_str))?.write(&partial.path)?;
    Ok(Unpublished { partial, target: target.to_path_buf(), names })
}

/// Checks that a merged tensor holds numbers.
fn finite(name: &str, values: &[f32]) -> Result<(), RunError> {
    match values.iter().find(|value| !value.is_finite()) {
        None => Ok(()),
        Some(value) => {
            let format = SaveDtype::Float32.name();
            Err(checkpoint::Error::Beyond { tensor: name.to_string(), value: *value, format }.into())
        }
    }
}

/// Refuses a target that exists: nothing is ever overwritten.
pub fn check_target(target: &Path) -> Result<(), RunError> {
    if target.file_name().is_none() {
        let what = format!("{} is not a name for a new file or folder", target.display());
        return Err(RunError::Refused { what, hint: "choose another name with `-o`" });
    }
    if target.symlink_metadata().is_err() {
        return Ok(());
    }
    let what = format!("{} already exists, and nothing is overwritten", target.display());
    Err(RunError::Refused { what, hint: "move it away, or choose another name with `-o`" })
}

/// A folder that is being filled, under a temporary name beside its target. Dropped without
/// `publish`, it is removed.
struct Partial {
    path: PathBuf,
    parent: PathBuf,
    done: bool,
}

impl Partial {
    fn create(target: &Path) -> Result<Self, RunError> {
        check_target(target)?;
        let parent = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let path = parent.join(format!(".{name}.{}.partial", std::process::id()));
        let failed = |error| FileError::from_io("write", &path, error);
        disk::create_folders(&parent).map_err(failed)?;
        remove_abandoned(&parent, &name);
        disk::create_folder(&path).map_err(failed)?;
        Ok(Self { path, parent, done: false })
    }

    fn publish(mut self, target: &Path) -> Result<(), RunError> {
        sync_folder(&self.path)?;
        // Again, in case something appeared in between; a folder with content cannot be renamed
        // over.
        check_target(target)?;
        disk::rename(&self.path, target).map_err(|error| FileError::from_io("write", target, error))?;
        self.done = true;
        Ok(sync_folder(&self.parent)?)
    }
}

/// Removes what killed exports to the same name left behind: those whose process is gone. What
/// cannot be read or removed stays.
fn remove_abandoned(parent: &Path, name: &str) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let found = entry.file_name();
        let process = found.to_str().and_then(|found| {
            let rest = found.strip_prefix('.')?.strip_prefix(name)?.strip_prefix('.')?;
            rest.strip_suffix(".partial")?.parse::<u32>().ok()
        });
        if process.is_some_and(|process| !is_running(process)) {
            let _ = disk::remove_folder(&entry.path());
        }
    }
}

/// Whether a process exists; true where that is not known.
#[cfg(unix)]
fn is_running(process: u32) -> bool {
    let Ok(process) = libc::pid_t::try_from(process) else { return false };
    // SAFETY: signal 0 is sent to nobody: the call only asks whether the process exists.
    process > 0
        && (unsafe { libc::kill(process, 0) } == 0
            || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH))
}

#[cfg(not(unix))]
fn is_running(_process: u32) -> bool {
    true
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.done {
            // Ignored: the original error is the one to report.
            let _ = disk::remove_folder(&self.path);
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn only_what_dead_processes_left_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut dead = std::process::Command::new("true").spawn().expect("a process");
        dead.wait().expect("ended");
        let (dead, alive) = (dead.id(), std::process::id());
        let gone = format!(".merged.{dead}.partial");
        let others = [
            format!(".merged.{alive}.partial"),
            format!(".other.{dead}.partial"),
            format!("merged.{dead}.partial"),
            ".merged.x.partial".to_string(),
            format!(".merged.{dead}"),
        ];
        for name in others.iter().chain([&gone]) {
            std::fs::create_dir(folder.path().join(name)).expect("a folder");
        }
        std::fs::write(folder.path().join(&gone).join("model.safetensors"), "half").expect("written");
        remove_abandoned(folder.path(), "merged");
        assert!(!folder.path().join(&gone).exists());
        assert!(others.iter().all(|name| folder.path().join(name).exists()));
    }
}
