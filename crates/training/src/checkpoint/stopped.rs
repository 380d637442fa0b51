//! Checkpoints requested only by a signal: a run that was never stopped would not have them.
//! `stopped.json` lists them from before they are saved; the next checkpoint replaces them, and
//! pruning does not count them. So the folder of a run that was stopped and resumed ends like that
//! of one that was not, even if it was killed in between.

use super::error::Error;
use super::folder::{Pointer, remove_folder};
use super::owner;
use super::read::read_json;
use super::state::Identity;
use super::{BeforeWrite, folder_of, unwatched};
use isobit_proof::atomic::{sync_folder, write_atomically};
pub(super) use isobit_proof::layout::STOPPED as NAME;
use isobit_proof::{FileError, disk};
use serde::{Deserialize, Serialize};
use std::path::Path;

const SCHEMA: &str = "isobit.stopped/1";

/// The form in the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    schema: String,
    steps: Vec<u64>,
}

/// Call before saving a checkpoint, with whether only a signal requested it.
pub fn announce(output_dir: &Path, step: u64, only_signal: bool) -> Result<(), Error> {
    announce_watched(output_dir, step, only_signal, &mut unwatched)
}

pub(super) fn announce_watched(
    output_dir: &Path,
    step: u64,
    only_signal: bool,
    watch: BeforeWrite<'_>,
) -> Result<(), Error> {
    let before = steps(output_dir)?;
    let mut after: Vec<u64> = before.iter().copied().filter(|other| *other != step).collect();
    after.extend(only_signal.then_some(step));
    if after == before { Ok(()) } else { put(output_dir, after, watch) }
}

/// Removes those replaced by another checkpoint. One that the run would resume from stays.
pub(super) fn dismiss(output_dir: &Path, run: &Identity, watch: BeforeWrite<'_>) -> Result<(), Error> {
    let all = steps(output_dir)?;
    if all.is_empty() {
        return Ok(());
    }
    let latest = Pointer::read(output_dir, Pointer::LATEST)?.map(|pointer| pointer.step);
    let (stay, go): (Vec<u64>, Vec<u64>) = all.iter().partition(|step| Some(**step) == latest);
    for step in go {
        let folder = folder_of(output_dir, step);
        if owner::is_ours(&folder, run) {
            remove_folder(&folder, watch)?;
        }
    }
    if stay == all { Ok(()) } else { put(output_dir, stay, watch) }
}

/// The steps of checkpoints requested only by a signal.
pub(super) fn steps(output_dir: &Path) -> Result<Vec<u64>, Error> {
    let path = output_dir.join(NAME);
    match read_json::<Stored>(&path) {
        Err(Error::File(FileError::Missing { .. })) => Ok(Vec::new()),
        Ok(stored) if stored.schema != SCHEMA => {
            Err(FileError::Malformed { path, what: "it is not a list of checkpoints".to_string() }.into())
        }
        stored => Ok(stored?.steps),
    }
}

fn put(output_dir: &Path, steps: Vec<u64>, watch: BeforeWrite<'_>) -> Result<(), Error> {
    let path = output_dir.join(NAME);
    watch(&path)?;
    if steps.is_empty() {
        disk::remove_file(&path).map_err(|error| FileError::from_io("remove", &path, error))?;
        return Ok(sync_folder(output_dir)?);
    }
    let stored = Stored { schema: SCHEMA.to_string(), steps };
    let json = serde_json::to_string(&stored).expect("strings and numbers have a JSON form") + "\n";
    Ok(write_atomically(&path, json.as_bytes())?)
}
