//! The run folder around its checkpoints: pointers to the latest and the best, which of the others
//! to keep, and cleanup after a crash. Requires the folder's lock.

use super::error::Error;
use super::owner;
use super::read::read_json;
use super::state::{Identity, Progress, bits};
use super::stopped;
use super::{
    ADAPTER, ADAPTER_CONFIG, BeforeWrite, FINAL, MODEL, OPTIMIZER, STATE, folder_name, folder_of, step_of, unwatched,
};
use isobit_proof::atomic::{is_partial as is_partial_file, remove_partials, sync_folder, write_atomically};
use isobit_proof::lock::Lock;
use isobit_proof::{FileError, Manifest, disk, layout};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The contents of `latest.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Latest {
    /// The file is missing.
    Missing,
    /// A run has begun but not saved yet.
    Begun,
    At(u64),
}

/// The checkpoint pointed to, and for the best one its metric.
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
    /// None before the first checkpoint.
    checkpoint: Option<String>,
    step: u64,
    /// For people only.
    #[serde(skip_serializing_if = "Option::is_none")]
    metric: Option<serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metric_bits: Option<Bits>,
}

#[derive(Serialize, Deserialize)]
struct Bits(#[serde(with = "bits")] f64);

impl Pointer {
    pub const LATEST: &str = layout::LATEST;
    pub const BEST: &str = layout::BEST;
    const SCHEMA: &str = "isobit.pointer/1";

    pub(super) fn write(self, output_dir: &Path, name: &str, watch: BeforeWrite<'_>) -> Result<(), Error> {
        let stored = Stored {
            schema: Self::SCHEMA.to_string(),
            checkpoint: Some(folder_name(self.step)),
            step: self.step,
            metric: self.metric.map(serde_json::Value::from),
            metric_bits: self.metric.map(Bits),
        };
        stored.write(&output_dir.join(name), watch)
    }

    /// None if the pointer is missing or names nothing yet.
    pub(super) fn read(output_dir: &Path, name: &str) -> Result<Option<Self>, Error> {
        let path = output_dir.join(name);
        let stored: Stored = match read_json(&path) {
            Err(Error::File(FileError::Missing { .. })) => return Ok(None),
            stored => stored?,
        };
        let Stored { schema, checkpoint, step, metric_bits, .. } = stored;
        let named = checkpoint.as_deref().map_or(Some(0), step_of);
        if schema != Self::SCHEMA || named != Some(step) {
            let what = "it does not name a checkpoint of this folder".to_string();
            return Err(FileError::Malformed { path, what }.into());
        }
        let Some(checkpoint) = checkpoint else { return Ok(None) };
        if !folder_of(output_dir, step).is_dir() {
            let what = format!("{checkpoint} is missing");
            return Err(FileError::Altered { path, what }.into());
        }
        Ok(Some(Self { step, metric: metric_bits.map(|bits| bits.0) }))
    }
}

impl Stored {
    fn write(&self, path: &Path, watch: BeforeWrite<'_>) -> Result<(), Error> {
        let mut json = serde_json::to_string_pretty(self).expect("strings and numbers have a JSON form");
        json.push('\n');
        watch(path)?;
        Ok(write_atomically(path, json.as_bytes())?)
    }
}

/// Call when a run begins: from then on, a folder with checkpoints but no `latest.json` has lost
/// it.
pub fn begin(output_dir: &Path) -> Result<(), Error> {
    let schema = Pointer::SCHEMA.to_string();
    let stored = Stored { schema, checkpoint: None, step: 0, metric: None, metric_bits: None };
    stored.write(&output_dir.join(Pointer::LATEST), &mut unwatched)
}

/// Points `latest.json` back at an earlier checkpoint, to resume from there.
pub fn go_back_to(output_dir: &Path, step: u64) -> Result<(), Error> {
    Pointer { step, metric: None }.write(output_dir, Pointer::LATEST, &mut unwatched)
}

/// Where the run would resume.
pub fn latest(output_dir: &Path) -> Result<Latest, Error> {
    Ok(match Pointer::read(output_dir, Pointer::LATEST)? {
        Some(pointer) => Latest::At(pointer.step),
        None if output_dir.join(Pointer::LATEST).exists() => Latest::Begun,
        None => Latest::Missing,
    })
}

/// The best checkpoint so far and its metric.
pub fn best(output_dir: &Path) -> Result<Option<Pointer>, Error> {
    Pointer::read(output_dir, Pointer::BEST)
}

/// Points `best.json` at a checkpoint that has been saved.
pub fn mark_best(output_dir: &Path, step: u64, metric: f64) -> Result<(), Error> {
    mark_best_watched(output_dir, step, metric, &mut unwatched)
}

pub(super) fn mark_best_watched(
    output_dir: &Path,
    step: u64,
    metric: f64,
    watch: BeforeWrite<'_>,
) -> Result<(), Error> {
    Pointer { step, metric: Some(metric) }.write(output_dir, Pointer::BEST, watch)
}

/// Restores `best.json` from the progress of a resumed run. A run that was stopped between saving a
/// checkpoint and marking it, or that went back to an earlier one, is then as if it had not been.
/// False if that checkpoint no longer exists.
pub fn restore_best(output_dir: &Path, progress: &Progress) -> Result<bool, Error> {
    match progress.best {
        Some(best) if folder_of(output_dir, best.step).is_dir() => {
            mark_best(output_dir, best.step, best.metric)?;
            Ok(true)
        }
        Some(_) => Ok(false),
        None => {
            let path = output_dir.join(Pointer::BEST);
            match disk::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    Err(FileError::from_io("remove", &path, error).into())
                }
                _ => Ok(true),
            }
        }
    }
}

/// Keeps the newest `limit` checkpoints, the latest and the best, and removes the others; 0 keeps
/// all. A checkpoint requested only by a signal does not count, and is removed once it is no longer
/// the latest. Anything not made by this run, or later than the checkpoint it went back to, is
/// neither counted nor touched.
pub fn prune(output_dir: &Path, limit: u32, run: &Identity) -> Result<(), Error> {
    prune_watched(output_dir, limit, run, &mut unwatched)
}

pub(super) fn prune_watched(
    output_dir: &Path,
    limit: u32,
    run: &Identity,
    watch: BeforeWrite<'_>,
) -> Result<(), Error> {
    stopped::dismiss(output_dir, run, watch)?;
    if limit == 0 {
        return Ok(());
    }
    let [latest, best] = [Pointer::LATEST, Pointer::BEST].map(|name| Pointer::read(output_dir, name));
    let Some(latest) = latest?.map(|pointer| pointer.step) else { return Ok(()) };
    let mut kept_steps = vec![latest];
    kept_steps.extend(best?.map(|pointer| pointer.step));
    let folders = entries(output_dir)?.into_iter().filter(|(_, is_folder)| *is_folder);
    let mut steps: Vec<u64> = folders.filter_map(|(name, _)| step_of(&name)).collect();
    let uncounted = stopped::steps(output_dir)?;
    steps.retain(|step| *step <= latest && !uncounted.contains(step));
    steps.retain(|step| owner::is_ours(&folder_of(output_dir, *step), run));
    steps.sort_unstable();
    let older = steps.len().saturating_sub(limit as usize);
    for step in steps[..older].iter().filter(|step| !kept_steps.contains(step)) {
        remove_folder(&folder_of(output_dir, *step), watch)?;
    }
    Ok(())
}

/// Removes what a crash left behind: temporary folders and files, and a checkpoint only if it was
/// requested by a signal and has been replaced by another. `is_of_final` decides which files the
/// folder `final` may hold; anything else in a temporary folder is an error, and nothing is
/// removed. The folder that a proof is writing to stays.
pub fn clean(output_dir: &Path, run: &Identity, is_of_final: impl Fn(&str) -> bool) -> Result<(), Error> {
    let partials: Vec<PathBuf> = partials(output_dir)?.iter().map(|name| output_dir.join(name)).collect();
    for path in &partials {
        check_partial(path, &is_of_final)?;
    }
    for path in &partials {
        disk::remove_folder(path).map_err(|error| FileError::from_io("clean", path, error))?;
    }
    remove_partials(output_dir)?;
    stopped::dismiss(output_dir, run, &mut unwatched)
}

/// Checks that a temporary folder holds only files of ours.
fn check_partial(folder: &Path, is_of_final: &dyn Fn(&str) -> bool) -> Result<(), Error> {
    const OF_CHECKPOINT: [&str; 6] = [ADAPTER, ADAPTER_CONFIG, MODEL, OPTIMIZER, STATE, Manifest::NAME];
    let foreign = |what: &'static str| Err(Error::Foreign { path: folder.to_path_buf(), what });
    let failed = |error| FileError::from_io("read", folder, error);
    if !folder.symlink_metadata().map_err(failed)?.is_dir() {
        return foreign(owner::NOT_OURS);
    }
    let name = folder.file_name().map_or("".into(), |name| name.to_string_lossy());
    // A proof writes the final folder once more.
    let is_proof = is_partial_file(&name);
    let is_final = is_proof || name.starts_with(&format!(".{FINAL}."));
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let name = name.to_str().unwrap_or_default();
        let is_ours = is_partial_file(name)
            || (is_proof && name == Lock::NAME)
            || if is_final { is_of_final(name) || name == Manifest::NAME } else { OF_CHECKPOINT.contains(&name) };
        match is_ours {
            true => {}
            false if is_final => return foreign("holds files that do not belong to `final` and would be removed"),
            false => return foreign("holds files that do not belong to a checkpoint and would be removed"),
        }
    }
    Ok(())
}

/// The temporary name of a folder: hidden, and never mistaken for a checkpoint.
pub(super) fn partial_name(name: &str) -> String {
    format!(".{name}.partial")
}

/// Renames first: a half-removed folder must not look like a checkpoint.
pub(super) fn remove_folder(folder: &Path, watch: BeforeWrite<'_>) -> Result<(), Error> {
    let failed = |error| FileError::from_io("remove", folder, error);
    let (Some(parent), Some(name)) = (folder.parent(), folder.file_name().and_then(|name| name.to_str())) else {
        return Err(failed(std::io::Error::from(std::io::ErrorKind::InvalidInput)).into());
    };
    let mut leaving = folder.to_path_buf();
    if !layout::is_partial_folder(name) {
        leaving = parent.join(partial_name(&format!("{name}.removed")));
        if leaving.symlink_metadata().is_ok() {
            watch(&leaving)?;
            disk::remove_folder(&leaving).map_err(failed)?;
        }
        watch(folder)?;
        disk::rename(folder, &leaving).map_err(failed)?;
        sync_folder(parent)?;
    }
    watch(&leaving)?;
    Ok(disk::remove_folder(&leaving).map_err(failed)?)
}

/// Temporary names of checkpoints, whether folders or not, and folders of proofs that have ended.
fn partials(output_dir: &Path) -> Result<Vec<String>, Error> {
    let is_of_proof = |name: &str| is_partial_file(name) && Lock::in_use(&output_dir.join(name)).is_none();
    let is_left = |name: &str, is_folder| layout::is_partial_folder(name) || (is_folder && is_of_proof(name));
    let left = entries(output_dir)?.into_iter().filter(|(name, is_folder)| is_left(name, *is_folder));
    Ok(left.map(|(name, _)| name).collect())
}

/// Names in the run folder, and whether each is a folder.
fn entries(output_dir: &Path) -> Result<Vec<(String, bool)>, Error> {
    let failed = |error| FileError::from_io("read", output_dir, error);
    let mut entries = Vec::new();
    for entry in std::fs::read_dir(output_dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_folder = entry.file_type().map_err(failed)?.is_dir();
        entries.extend(entry.file_name().into_string().ok().map(|name| (name, is_folder)));
    }
    entries.sort_unstable();
    Ok(entries)
}
