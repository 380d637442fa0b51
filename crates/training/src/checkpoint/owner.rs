//! Finds what in a run folder belongs to this run. Only that is ever pruned or replaced: folders
//! whose manifest names this run and lists everything in them. Anything else under one of our names
//! is refused before anything is written.

use super::error::Error;
use super::folder::{Latest, Pointer, latest};
use super::read::read_json;
use super::state::{Identity, Progress};
use super::{ADAPTER, ADAPTER_CONFIG, FINAL, MODEL, RESOLVED, STATE, folder_name, folder_of, step_of, stopped};
use crate::{data_record, metrics};
use isobit_proof::lock::Lock;
use isobit_proof::{FileError, Manifest, chain, receipt};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// How a run is to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// From its first step, in a folder that holds no run.
    New,
    /// From the latest checkpoint, or from the first step if there is none yet.
    Resume,
    /// From the checkpoint of this step.
    From(u64),
}

/// Whether this run made the folder and may remove it: it is not a link, its manifest names this
/// run, and the manifest lists everything in it.
pub(super) fn is_ours(folder: &Path, run: &Identity) -> bool {
    let is_folder = folder.symlink_metadata().is_ok_and(|found| found.is_dir());
    let made = |manifest: &Manifest| is_made_by(folder, manifest, run);
    is_folder
        && Manifest::read(folder)
            .is_ok_and(|manifest| made(&manifest) && manifest.has_more(folder).is_ok_and(|more| !more))
}

/// Whether its manifest names this run.
fn says_ours(folder: &Path, run: &Identity) -> bool {
    Manifest::read(folder).is_ok_and(|manifest| is_made_by(folder, &manifest, run))
}

/// Manifests of earlier versions have no run digest: there the state of a checkpoint identified the
/// run; `final` had no such record.
fn is_made_by(folder: &Path, manifest: &Manifest, run: &Identity) -> bool {
    match manifest.run {
        Some(digest) => digest == run.digest(),
        None if manifest.files.contains_key(STATE) => {
            read_json::<Progress>(&folder.join(STATE)).is_ok_and(|progress| progress.identity == *run)
        }
        None => manifest.files.keys().all(|name| [ADAPTER, ADAPTER_CONFIG, MODEL].contains(&name.as_str())),
    }
}

fn no_such(output_dir: &Path, step: u64, there: &[u64]) -> Error {
    let there = there.iter().map(|step| folder_name(*step)).collect();
    Error::NoSuch { folder: output_dir.to_path_buf(), name: folder_name(step), there }
}

/// Examines the folder that a run is to begin in and returns the step to resume from; None is the
/// beginning. Writes nothing. Anything under the name of a file or folder of a run that does not
/// belong to this run is an error.
pub fn examine(output_dir: &Path, run: &Identity, start: Start) -> Result<Option<u64>, Error> {
    // Obstacles to the folder itself are found when it is created.
    if !output_dir.is_dir() {
        return match start {
            Start::From(step) => Err(no_such(output_dir, step, &[])),
            _ => Ok(None),
        };
    }
    check_lock(output_dir)?;
    let steps = steps(output_dir)?;
    let from = match start {
        Start::New => {
            check_new(output_dir, &steps)?;
            None
        }
        Start::From(step) if steps.contains(&step) => Some(step),
        Start::From(step) => {
            return Err(no_such(output_dir, step, &steps));
        }
        Start::Resume => match latest(output_dir)? {
            Latest::At(step) => Some(step),
            other => {
                check_begun(output_dir, &steps, other, run)?;
                None
            }
        },
    };
    if let Some(step) = from
        && !says_ours(&folder_of(output_dir, step), run)
    {
        // Differences or damage are reported when it is opened, and nothing is written before.
        return Ok(from);
    }
    // Earlier ones are left alone; later ones and `final` would be in the way.
    let ahead = steps.iter().filter(|step| from.is_none_or(|from| **step > from));
    for folder in ahead.map(|step| folder_of(output_dir, *step)).chain([output_dir.join(FINAL)]) {
        if folder.symlink_metadata().is_ok() {
            check_folder(&folder, run)?;
        }
    }
    check_files(output_dir, from)?;
    if from.is_none() && start == Start::Resume {
        check_nothing_is_left(output_dir)?;
    }
    Ok(from)
}

/// Steps of everything named like a checkpoint, folder or not.
pub fn steps(output_dir: &Path) -> Result<Vec<u64>, Error> {
    let failed = |error| FileError::from_io("read", output_dir, error);
    let mut steps = Vec::new();
    for entry in std::fs::read_dir(output_dir).map_err(failed)? {
        steps.extend(entry.map_err(failed)?.file_name().to_str().and_then(step_of));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Steps after `step` of checkpoints that stay, of before a resume: not those requested only by a
/// signal.
pub fn kept_ahead(output_dir: &Path, step: u64) -> Result<Vec<u64>, Error> {
    if !output_dir.is_dir() {
        return Ok(Vec::new());
    }
    let by_signal = stopped::steps(output_dir)?;
    let all = steps(output_dir)?.into_iter();
    Ok(all.filter(|ahead| *ahead > step && !by_signal.contains(ahead)).collect())
}

/// Checks that no run is in the folder.
fn check_new(output_dir: &Path, steps: &[u64]) -> Result<(), Error> {
    for folder in steps.iter().map(|step| folder_of(output_dir, *step)).chain([output_dir.join(FINAL)]) {
        if folder.symlink_metadata().is_ok() && !is_of_a_run(&folder) {
            return Err(Error::Foreign { path: folder, what: NOT_OURS });
        }
    }
    for name in [Pointer::LATEST, Pointer::BEST] {
        // A pointer to a missing checkpoint belongs to a run too.
        match Pointer::read(output_dir, name) {
            Ok(None) => {}
            Ok(Some(_)) | Err(Error::File(FileError::Altered { .. })) => return Err(holds(output_dir)),
            Err(Error::File(FileError::Malformed { path, .. })) => return Err(Error::Foreign { path, what: NOT_OURS }),
            Err(error) => return Err(error),
        }
    }
    let is_over = latest(output_dir)? == Latest::Missing && has_metrics(output_dir);
    let is_empty = steps.is_empty() && output_dir.join(FINAL).symlink_metadata().is_err();
    if is_empty && !is_over { Ok(()) } else { Err(holds(output_dir)) }
}

/// Nothing to resume from: killed before the first checkpoint, or between naming it and pointing at
/// it. With more than one checkpoint, or one without a pointer, the pointer was lost.
fn check_begun(output_dir: &Path, steps: &[u64], latest: Latest, run: &Identity) -> Result<(), Error> {
    let Some(newest) = steps.last() else { return Ok(()) };
    for step in steps {
        check_folder(&folder_of(output_dir, *step), run)?;
    }
    if latest == Latest::Begun && steps.len() == 1 {
        return Ok(());
    }
    Err(Error::NoPointer { folder: output_dir.to_path_buf(), newest: folder_name(*newest) })
}

/// Nothing to resume from, but results of a run exist: starting over would replace them.
fn check_nothing_is_left(output_dir: &Path) -> Result<(), Error> {
    let left = if is_of_a_run(&output_dir.join(FINAL)) { Some(FINAL) } else { None };
    let left = left.or(has_metrics(output_dir).then_some(metrics::NAME));
    match left.filter(|_| latest(output_dir).is_ok_and(|latest| latest == Latest::Missing)) {
        Some(left) => Err(Error::NoPointer { folder: output_dir.to_path_buf(), newest: left.to_string() }),
        None => Ok(()),
    }
}

/// Whether a run has logged anything.
fn has_metrics(output_dir: &Path) -> bool {
    let path = output_dir.join(metrics::NAME);
    let is_filled = path.symlink_metadata().is_ok_and(|found| found.is_file() && found.len() > 0);
    is_filled && begins_with(&path, metrics::LINE_START).unwrap_or(false)
}

pub(super) const NOT_OURS: &str = "was not made by Isobit, and a run would overwrite it";

/// Whether any run made it.
fn is_of_a_run(folder: &Path) -> bool {
    folder.symlink_metadata().is_ok_and(|found| found.is_dir()) && Manifest::read(folder).is_ok()
}

fn holds(output_dir: &Path) -> Error {
    Error::Holds { folder: output_dir.to_path_buf() }
}

fn check_folder(folder: &Path, run: &Identity) -> Result<(), Error> {
    if is_ours(folder, run) {
        return Ok(());
    }
    let what = if !is_of_a_run(folder) {
        NOT_OURS
    } else if says_ours(folder, run) {
        "holds files that this run did not put there, and is in its way"
    } else {
        "belongs to a different run, and is in the way of this one"
    };
    Err(Error::Foreign { path: folder.to_path_buf(), what })
}

/// Checks the files that a run replaces: they were written by a run, or are missing. Metrics that a
/// run resumes from are checked when they are read, every line.
fn check_files(output_dir: &Path, from: Option<u64>) -> Result<(), Error> {
    let foreign = |name: &str| Err(Error::Foreign { path: output_dir.join(name), what: NOT_OURS });
    let path = output_dir.join(metrics::NAME);
    if from.is_none() && !begins_with(&path, metrics::LINE_START)? && !may_be_torn(output_dir, &path)? {
        return foreign(metrics::NAME);
    }
    if !begins_with(&output_dir.join(RESOLVED), "base_model = ")? {
        return foreign(RESOLVED);
    }
    for (name, start) in [(chain::NAME, chain::FILE_START), (receipt::NAME, receipt::FILE_START)] {
        if !begins_with(&output_dir.join(name), start)? {
            return foreign(name);
        }
    }
    match Pointer::read(output_dir, Pointer::BEST) {
        Err(error) if is_no_file_of_ours(&error) => return foreign(Pointer::BEST),
        // A resumed run knows which checkpoint is best, and marks it again.
        Err(Error::File(FileError::Altered { .. })) if from.is_some() => {}
        other => _ = other?,
    }
    match stopped::steps(output_dir) {
        Err(error) if is_no_file_of_ours(&error) => return foreign(stopped::NAME),
        other => _ = other?,
    }
    if data_record::is_ours(output_dir)? { Ok(()) } else { foreign(data_record::NAME) }
}

/// Whether something else stands in place of a file of ours.
fn is_no_file_of_ours(error: &Error) -> bool {
    use FileError::{Malformed, NotRegular, TooLarge};
    matches!(error, Error::File(Malformed { .. } | NotRegular { .. } | TooLarge { .. }))
}

/// Whether a file is missing, empty, or begins with `start`.
fn begins_with(path: &Path, start: &str) -> Result<bool, FileError> {
    let failed = |error| FileError::from_io("read", path, error);
    match path.symlink_metadata() {
        Ok(found) if found.is_file() => {}
        Ok(_) => return Ok(false),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(failed(error)),
    }
    let begun = beginning(path, start)?;
    Ok(begun.is_empty() || begun == start.as_bytes())
}

/// As many bytes of a file as `start` has, or fewer.
fn beginning(path: &Path, start: &str) -> Result<Vec<u8>, FileError> {
    let failed = |error| FileError::from_io("read", path, error);
    let mut begun = Vec::new();
    File::open(path).map_err(failed)?.take(start.len() as u64).read_to_end(&mut begun).map_err(failed)?;
    Ok(begun)
}

/// Whether a run has begun here, and a power cut may have left this of the first line of its
/// metrics, which are appended: a part of it, then zeros.
fn may_be_torn(output_dir: &Path, path: &Path) -> Result<bool, FileError> {
    let is_file = path.symlink_metadata().is_ok_and(|found| found.is_file());
    if !is_file || !latest(output_dir).is_ok_and(|latest| latest == Latest::Begun) {
        return Ok(false);
    }
    let begun = beginning(path, metrics::LINE_START)?;
    let written = begun.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    Ok(metrics::LINE_START.as_bytes().starts_with(&begun[..written]))
}

/// A lock file of ours is empty or holds a process id; after a power cut, zeros in its place.
fn check_lock(output_dir: &Path) -> Result<(), Error> {
    const BYTES_MAX: u64 = 32;
    let path = output_dir.join(Lock::NAME);
    let foreign = || Error::Foreign { path: path.clone(), what: NOT_OURS };
    match path.symlink_metadata() {
        Err(_) => return Ok(()),
        Ok(found) if !found.is_file() || found.len() > BYTES_MAX => return Err(foreign()),
        Ok(_) => {}
    }
    let text = std::fs::read(&path).map_err(|error| FileError::from_io("read", &path, error))?;
    let number = text.iter().all(|byte| byte.is_ascii_digit() || byte.is_ascii_whitespace() || *byte == 0);
    if number { Ok(()) } else { Err(foreign()) }
}
