//! The run folder around its checkpoints: pointers to the latest and the best, which of the others stay, and what a crash
//! left behind. Only for a folder whose lock is held.

use super::error::Error;
use super::read::read_json;
use super::state::{Progress, bits};
use super::stopped;
use super::{FINAL, Watch, folder_name, folder_of, step_of, unwatched};
use isobit_proof::FileError;
use isobit_proof::atomic::{remove_partials, sync_folder, write_atomically};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Which checkpoint is meant, and for the best why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pointer {
    pub step: u64,
    pub metric: Option<f64>,
}

/// The form in the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    schema: String,
    checkpoint: String,
    step: u64,
    /// For people.
    #[serde(skip_serializing_if = "Option::is_none")]
    metric: Option<serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metric_bits: Option<Bits>,
}

#[derive(Serialize, Deserialize)]
struct Bits(#[serde(with = "bits")] f64);

impl Pointer {
    pub const LATEST: &str = "latest.json";
    pub const BEST: &str = "best.json";
    const SCHEMA: &str = "isobit.pointer/1";

    pub(super) fn write(self, output_dir: &Path, name: &str, watch: Watch<'_>) -> Result<(), Error> {
        let stored = Stored {
            schema: Self::SCHEMA.to_string(),
            checkpoint: folder_name(self.step),
            step: self.step,
            metric: self.metric.map(serde_json::Value::from),
            metric_bits: self.metric.map(Bits),
        };
        let mut json = serde_json::to_string_pretty(&stored).expect("strings and numbers have a JSON form");
        json.push('\n');
        let path = output_dir.join(name);
        watch(&path)?;
        Ok(write_atomically(&path, json.as_bytes())?)
    }

    /// None where the pointer is not there.
    pub(super) fn read(output_dir: &Path, name: &str) -> Result<Option<Self>, Error> {
        let path = output_dir.join(name);
        let stored: Stored = match read_json(&path) {
            Err(Error::File(FileError::Missing { .. })) => return Ok(None),
            stored => stored?,
        };
        if stored.schema != Self::SCHEMA || step_of(&stored.checkpoint) != Some(stored.step) {
            let what = "it does not name a checkpoint of this folder".to_string();
            return Err(FileError::Malformed { path, what }.into());
        }
        if !folder_of(output_dir, stored.step).is_dir() {
            let what = format!("{} is not there", stored.checkpoint);
            return Err(FileError::Altered { path, what }.into());
        }
        Ok(Some(Self { step: stored.step, metric: stored.metric_bits.map(|bits| bits.0) }))
    }
}

/// The checkpoint to go on from; none before the first.
pub fn latest(output_dir: &Path) -> Result<Option<PathBuf>, Error> {
    Ok(Pointer::read(output_dir, Pointer::LATEST)?.map(|pointer| folder_of(output_dir, pointer.step)))
}

/// The best checkpoint so far and its metric.
pub fn best(output_dir: &Path) -> Result<Option<Pointer>, Error> {
    Pointer::read(output_dir, Pointer::BEST)
}

/// Points `best.json` at a checkpoint that has been saved.
pub fn mark_best(output_dir: &Path, step: u64, metric: f64) -> Result<(), Error> {
    mark_best_watched(output_dir, step, metric, &mut unwatched)
}

pub(super) fn mark_best_watched(output_dir: &Path, step: u64, metric: f64, watch: Watch<'_>) -> Result<(), Error> {
    Pointer { step, metric: Some(metric) }.write(output_dir, Pointer::BEST, watch)
}

/// Puts `best.json` where the progress of a resumed run says it was. A run stopped between saving a checkpoint and marking
/// it, or gone back to an earlier one, is then as if it had not been. False if that checkpoint is no longer there.
pub fn restore_best(output_dir: &Path, progress: &Progress) -> Result<bool, Error> {
    match progress.best {
        Some(best) if folder_of(output_dir, best.step).is_dir() => {
            mark_best(output_dir, best.step, best.metric)?;
            Ok(true)
        }
        Some(_) => Ok(false),
        None => {
            let path = output_dir.join(Pointer::BEST);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    Err(FileError::from_io("remove", &path, error).into())
                }
                _ => Ok(true),
            }
        }
    }
}

/// Keeps the newest `limit` checkpoints, the latest and the best, and removes the others; 0 keeps all. One that only a signal
/// asked for does not count, and goes when it is no longer the latest.
pub fn prune(output_dir: &Path, limit: u32) -> Result<(), Error> {
    prune_watched(output_dir, limit, &mut unwatched)
}

pub(super) fn prune_watched(output_dir: &Path, limit: u32, watch: Watch<'_>) -> Result<(), Error> {
    stopped::dismiss(output_dir, watch)?;
    if limit == 0 {
        return Ok(());
    }
    let kept = [Pointer::LATEST, Pointer::BEST].map(|name| Pointer::read(output_dir, name));
    let mut kept_steps = Vec::new();
    for pointer in kept {
        kept_steps.extend(pointer?.map(|pointer| pointer.step));
    }
    let mut steps: Vec<u64> = names(output_dir)?.iter().filter_map(|name| step_of(name)).collect();
    let uncounted = stopped::steps(output_dir)?;
    steps.retain(|step| !uncounted.contains(step));
    steps.sort_unstable();
    let older = steps.len().saturating_sub(limit as usize);
    for step in steps[..older].iter().filter(|step| !kept_steps.contains(step)) {
        remove_folder(&folder_of(output_dir, *step), watch)?;
    }
    Ok(())
}

/// Removes what a crash left behind: temporary folders and files, and a checkpoint only where another has taken the place of one
/// that a signal asked for.
pub fn clean(output_dir: &Path) -> Result<(), Error> {
    for name in names(output_dir)?.iter().filter(|name| is_partial(name)) {
        let path = output_dir.join(name);
        std::fs::remove_dir_all(&path).map_err(|error| FileError::from_io("clean", &path, error))?;
    }
    remove_partials(output_dir)?;
    stopped::dismiss(output_dir, &mut unwatched)
}

/// The name of a folder on its way in or out: hidden, and never mistaken for a checkpoint.
pub(super) fn partial_name(name: &str) -> String {
    format!(".{name}.partial")
}

fn is_partial(name: &str) -> bool {
    let inner = name.strip_prefix('.').and_then(|rest| rest.strip_suffix(".partial"));
    let inner = inner.map(|inner| inner.strip_suffix(".removed").unwrap_or(inner));
    inner.is_some_and(|inner| step_of(inner).is_some() || inner == FINAL)
}

/// Renames first: a folder that is half removed must not look like a checkpoint.
pub(super) fn remove_folder(folder: &Path, watch: Watch<'_>) -> Result<(), Error> {
    let failed = |error| FileError::from_io("remove", folder, error);
    let (Some(parent), Some(name)) = (folder.parent(), folder.file_name().and_then(|name| name.to_str())) else {
        return Err(failed(std::io::Error::from(std::io::ErrorKind::InvalidInput)).into());
    };
    let mut leaving = folder.to_path_buf();
    if !is_partial(name) {
        leaving = parent.join(partial_name(&format!("{name}.removed")));
        if leaving.symlink_metadata().is_ok() {
            watch(&leaving)?;
            std::fs::remove_dir_all(&leaving).map_err(failed)?;
        }
        watch(folder)?;
        std::fs::rename(folder, &leaving).map_err(failed)?;
        sync_folder(parent)?;
    }
    watch(&leaving)?;
    Ok(std::fs::remove_dir_all(&leaving).map_err(failed)?)
}

fn names(output_dir: &Path) -> Result<Vec<String>, Error> {
    let failed = |error| FileError::from_io("read", output_dir, error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(output_dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_dir() {
            names.extend(entry.file_name().into_string());
        }
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_checkpoints_from_leftovers() {
        assert_eq!(step_of("checkpoint-200"), Some(200));
        for other in
            ["checkpoint-", "checkpoint-02", "checkpoint-+2", "checkpoint-2x", "Checkpoint-2", ".checkpoint-2.partial"]
        {
            assert_eq!(step_of(other), None, "{other}");
        }
        for leftover in [".checkpoint-2.partial", ".checkpoint-2.removed.partial", ".final.partial"] {
            assert!(is_partial(leftover), "{leftover}");
        }
        for other in
            [".partial", "..partial", ".x.partial", "checkpoint-2", ".checkpoint-x.partial", ".removed.partial"]
        {
            assert!(!is_partial(other), "{other}");
        }
    }
}
