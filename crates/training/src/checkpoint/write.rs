//! Saving: into a temporary folder, then renamed, then `latest.json`. Nothing under a final name is
//! ever half done.

use super::error::Error;
use super::folder::{Pointer, partial_name, remove_folder};
use super::owner;
use super::read::MOMENTS;
use super::state::{Identity, Progress, Snapshot};
use super::{ADAPTER, ADAPTER_CONFIG, BeforeWrite, FINAL, MODEL, OPTIMIZER, STATE, folder_name, folder_of, unwatched};
use isobit_proof::atomic::{sync_folder, write_atomically};
use isobit_proof::safetensors::NamedTensor;
use isobit_proof::{FileError, Hash, Manifest, disk};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Writes `checkpoint-N` into the run folder, points `latest.json` at it and returns its folder.
/// With an adapter config the weights are an adapter, without one a model. An existing checkpoint
/// of that step must hold the same bytes, apart from what is logged; it is then left as it is.
pub fn save(
    output_dir: &Path,
    snapshot: &Snapshot,
    adapter_config: Option<&serde_json::Value>,
) -> Result<PathBuf, Error> {
    save_watched(output_dir, snapshot, adapter_config, &mut unwatched)
}

pub(super) fn save_watched(
    output_dir: &Path,
    snapshot: &Snapshot,
    adapter_config: Option<&serde_json::Value>,
    watch: BeforeWrite<'_>,
) -> Result<PathBuf, Error> {
    let folder = folder_of(output_dir, snapshot.step);
    if snapshot.step != snapshot.progress.step {
        let what = format!("the snapshot has step {}, its progress {}", snapshot.step, snapshot.progress.step);
        return Err(Error::Inconsistent { path: folder, what });
    }
    let partial = output_dir.join(partial_name(&folder_name(snapshot.step)));
    let result = fill(&partial, snapshot, adapter_config, watch).and_then(|manifest| {
        if keeps_earlier(&folder, &manifest, &snapshot.progress)? {
            remove_folder(&partial, watch)
        } else {
            publish(output_dir, &partial, &folder, &snapshot.progress.identity, watch)
        }
    });
    if let Err(error) = result {
        // A failed save frees its disk space; the original error is the one worth reporting.
        let _ = disk::remove_folder(&partial);
        return Err(error);
    }
    Pointer { step: snapshot.step, metric: None }.write(output_dir, Pointer::LATEST, watch)?;
    Ok(folder)
}

/// Writes the folder `final`: `fill` puts files into a folder and returns their names. An earlier
/// `final` of this run is replaced.
pub fn replace_final<E: From<Error>>(
    output_dir: &Path,
    run: &Identity,
    fill: impl FnOnce(&Path) -> Result<Vec<String>, E>,
) -> Result<PathBuf, E> {
    let watch: BeforeWrite<'_> = &mut unwatched;
    let (folder, partial) = (output_dir.join(FINAL), output_dir.join(partial_name(FINAL)));
    create_folder(&partial, watch)?;
    let written = fill(&partial).and_then(|names| {
        let manifest = manifest(&partial, names.iter().map(String::as_str), run)?;
        manifest.write(&partial).map_err(Error::from)?;
        Ok(publish(output_dir, &partial, &folder, run, watch)?)
    });
    if let Err(error) = written {
        let _ = disk::remove_folder(&partial);
        return Err(error);
    }
    Ok(folder)
}

/// Records which files there are, which run made them and from which base.
fn manifest<'a>(folder: &Path, names: impl IntoIterator<Item = &'a str>, run: &Identity) -> Result<Manifest, Error> {
    let (base, load_in_4bit) = (Hash::parse(&run.base), run.load_in_4bit.clone());
    Ok(Manifest { run: Some(run.digest()), base, load_in_4bit, ..Manifest::of(folder, names)? })
}

/// Writes an adapter as other tools load it: `tensors` writes the tensor file at the given path.
/// Returns the names of its files.
pub fn put_adapter<E: From<Error>>(
    folder: &Path,
    config: &serde_json::Value,
    tensors: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<Vec<String>, E> {
    tensors(&folder.join(ADAPTER))?;
    put_json(&folder.join(ADAPTER_CONFIG), &sorted(config), &mut unwatched)?;
    Ok([ADAPTER, ADAPTER_CONFIG].map(str::to_string).to_vec())
}

/// Writes all files of a checkpoint, the manifest last.
fn fill(
    partial: &Path,
    snapshot: &Snapshot,
    adapter_config: Option<&serde_json::Value>,
    watch: BeforeWrite<'_>,
) -> Result<Manifest, Error> {
    create_folder(partial, watch)?;
    let mut names = put_weights(partial, &snapshot.weights, adapter_config, watch)?;
    let moments = MOMENTS.into_iter().zip([&snapshot.moments1, &snapshot.moments2]);
    let moments = moments
        .flat_map(|(start, tensors)| tensors.iter().map(move |tensor| (format!("{start}{}", tensor.name), tensor)));
    put_tensors(&partial.join(OPTIMIZER), moments, watch)?;
    put_json(&partial.join(STATE), &snapshot.progress, watch)?;
    names.extend([OPTIMIZER, STATE]);
    let manifest = manifest(partial, names, &snapshot.progress.identity)?;
    watch(&partial.join(Manifest::NAME))?;
    manifest.write(partial)?;
    Ok(manifest)
}

fn put_weights(
    partial: &Path,
    weights: &[NamedTensor],
    adapter_config: Option<&serde_json::Value>,
    watch: BeforeWrite<'_>,
) -> Result<Vec<&'static str>, Error> {
    let named = weights.iter().map(|tensor| (tensor.name.clone(), tensor));
    let Some(config) = adapter_config else {
        put_tensors(&partial.join(MODEL), named, watch)?;
        return Ok(vec![MODEL]);
    };
    put_tensors(&partial.join(ADAPTER), named, watch)?;
    put_json(&partial.join(ADAPTER_CONFIG), &sorted(config), watch)?;
    Ok(vec![ADAPTER, ADAPTER_CONFIG])
}

fn put_tensors<'a>(
    path: &Path,
    tensors: impl Iterator<Item = (String, &'a NamedTensor)>,
    watch: BeforeWrite<'_>,
) -> Result<(), Error> {
    watch(path)?;
    Ok(NamedTensor::write(path, tensors)?)
}

/// Sorts keys at every depth: the way a map was built must not show in the bytes.
fn sorted(value: &serde_json::Value) -> serde_json::Value {
    use serde_json::Value::{Array, Object};
    match value {
        Object(map) => {
            let entries: BTreeMap<&String, serde_json::Value> =
                map.iter().map(|(key, value)| (key, sorted(value))).collect();
            Object(entries.into_iter().map(|(key, value)| (key.clone(), value)).collect())
        }
        Array(items) => Array(items.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

fn put_json(path: &Path, value: &impl serde::Serialize, watch: BeforeWrite<'_>) -> Result<(), Error> {
    watch(path)?;
    let mut json = serde_json::to_string_pretty(value).expect("strings, numbers and maps have a JSON form");
    json.push('\n');
    Ok(write_atomically(path, json.as_bytes())?)
}

/// Creates an empty folder under a temporary name, removing what a crash left there.
fn create_folder(partial: &Path, watch: BeforeWrite<'_>) -> Result<(), Error> {
    let failed = |error| FileError::from_io("write", partial, error);
    if partial.symlink_metadata().is_ok() {
        watch(partial)?;
        disk::remove_folder(partial).map_err(failed)?;
    }
    watch(partial)?;
    Ok(disk::create_folder(partial).map_err(failed)?)
}

/// Whether a valid checkpoint of this name already exists. A damaged one is moved away by
/// `publish`, and so is one that differs only in what is logged; any other valid one with different
/// bytes is an error and is not overwritten.
fn keeps_earlier(folder: &Path, manifest: &Manifest, progress: &Progress) -> Result<bool, Error> {
    let Ok(earlier) = Manifest::read(folder) else { return Ok(false) };
    if earlier.verify(folder).is_err() {
        return Ok(false);
    }
    let names: BTreeSet<&String> = manifest.files.keys().chain(earlier.files.keys()).collect();
    let differs = |name: &&String| manifest.files.get(*name) != earlier.files.get(*name);
    match names.into_iter().filter(differs).collect::<Vec<_>>()[..] {
        [] => Ok(true),
        [file] if file == STATE && is_logged_differently(&folder.join(STATE), progress) => Ok(false),
        [file, ..] => Err(Error::Exists { folder: folder.to_path_buf(), file: file.clone() }),
    }
}

/// Whether a saved state is this one but for the lines of the metrics: `logging_steps` may change
/// when a run is resumed.
fn is_logged_differently(path: &Path, progress: &Progress) -> bool {
    let Ok(text) = std::fs::read_to_string(path) else { return false };
    let Ok(saved) = serde_json::from_str::<Progress>(&text) else { return false };
    let as_logged = |mut state: Progress| {
        (state.loss_sum, state.loss_count, state.metrics) = (0.0, 0, None);
        state
    };
    as_logged(saved) == as_logged(progress.clone())
}

/// Renames a finished folder to its final name, durably. An existing folder of this run is removed;
/// anything else stays and is an error.
fn publish(
    output_dir: &Path,
    partial: &Path,
    folder: &Path,
    run: &Identity,
    watch: BeforeWrite<'_>,
) -> Result<(), Error> {
    let failed = |error| FileError::from_io("write", folder, error);
    if folder.symlink_metadata().is_ok() {
        if !owner::is_ours(folder, run) {
            return Err(Error::Foreign {
                path: folder.to_path_buf(),
                what: "is in the way, and does not belong to this run",
            });
        }
        remove_folder(folder, watch)?;
    }
    watch(folder)?;
    disk::rename(partial, folder).map_err(failed)?;
    Ok(sync_folder(output_dir)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_written_in_order_whatever_order_they_came_in() {
        let one: serde_json::Value = serde_json::from_str(r#"{"b":[{"d":1,"c":2}],"a":null}"#).expect("JSON");
        assert_eq!(sorted(&one).to_string(), r#"{"a":null,"b":[{"c":2,"d":1}]}"#);
    }
}
