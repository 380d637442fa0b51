//! Reads checkpoints: the manifest first, then which run it belongs to, then its tensors and their
//! consistency.

use super::error::{Error, IdentityDifference};
use super::state::{Identity, Progress, Snapshot};
use super::{ADAPTER, ADAPTER_CONFIG, MODEL, OPTIMIZER, STATE, step_of};
use isobit_proof::layout::Holds;
use isobit_proof::safetensors::{NamedTensor, SafeTensors};
use isobit_proof::{FileError, Manifest, regular};
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// BOUND: bytes of a pointer or a state.
const JSON_BYTES_MAX: u64 = 1 << 20;

/// Reads a checkpoint of exactly this run: every byte as recorded, and made under the same config,
/// data, base model, profile and numerics version.
pub fn load(folder: &Path, identity: &Identity) -> Result<Snapshot, Error> {
    let opened = open(folder, identity)?;
    let mut moments = [Vec::new(), Vec::new()];
    for tensor in opened.optimizer.tensors() {
        let second = usize::from(tensor.name.starts_with(MOMENTS[1]));
        moments[second].push(NamedTensor::read(&tensor, &tensor.name[MOMENTS[second].len()..])?);
    }
    let weights = opened.weights.tensors().map(|tensor| NamedTensor::read(&tensor, tensor.name));
    let weights = weights.collect::<Result<_, _>>()?;
    let [moments1, moments2] = moments;
    Ok(Snapshot { step: opened.progress.step, weights, moments1, moments2, progress: opened.progress })
}

/// Name prefixes of the two moments of a weight.
pub(super) const MOMENTS: [&str; 2] = ["moment1.", "moment2."];

/// A checkpoint whose tensors are read on demand, one at a time.
#[derive(Debug)]
pub struct Opened {
    pub progress: Progress,
    weights: SafeTensors,
    optimizer: SafeTensors,
}

impl Opened {
    /// A trained tensor.
    pub fn weight(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        values(&self.weights, name, shape)
    }

    /// Its first (0) or second (1) moment.
    pub fn moment(&self, order: usize, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        values(&self.optimizer, &format!("{}{name}", MOMENTS[order]), shape)
    }
}

fn values(file: &SafeTensors, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
    let tensor = file.get(name)?;
    if tensor.shape != shape {
        let what = format!("the shape of {name} is {:?}, the run's is {shape:?}", tensor.shape);
        return Err(Error::Inconsistent { path: file.path().to_path_buf(), what });
    }
    let values = tensor.to_f32()?;
    // Including what the system read around it.
    file.release();
    Ok(values)
}

/// Opens a checkpoint of exactly this run, like `load`, but reads no tensor.
pub fn open(folder: &Path, identity: &Identity) -> Result<Opened, Error> {
    let progress = inspect(folder)?;
    let differences = differences(&progress.identity, identity);
    if !differences.is_empty() {
        return Err(Error::Different { folder: folder.to_path_buf(), differences });
    }
    // Its files are those of one of the two kinds.
    let holds = if folder.join(ADAPTER).exists() { Holds::Adapter } else { Holds::Model };
    open_tensors(folder, progress, holds)
}

/// Opens a checkpoint whatever run made it and whatever its manifest says: to look at what is in
/// its files, not to resume from it.
pub fn open_as_it_is(folder: &Path, holds: Holds) -> Result<Opened, Error> {
    open_tensors(folder, read_json(&folder.join(STATE))?, holds)
}

fn open_tensors(folder: &Path, progress: Progress, holds: Holds) -> Result<Opened, Error> {
    let weights = SafeTensors::open(&folder.join(holds.weights()))?;
    let optimizer = SafeTensors::open(&folder.join(OPTIMIZER))?;
    check_moments(&optimizer, &weights)?;
    Ok(Opened { progress, weights, optimizer })
}

/// The progress and identity stored in a checkpoint, after checking every byte.
pub fn inspect(folder: &Path) -> Result<Progress, Error> {
    let manifest = Manifest::read(folder)?;
    manifest.verify(folder)?;
    let listed: BTreeSet<&str> = manifest.files.keys().map(String::as_str).collect();
    let adapter = BTreeSet::from([ADAPTER, ADAPTER_CONFIG, OPTIMIZER, STATE]);
    let model = BTreeSet::from([MODEL, OPTIMIZER, STATE]);
    if listed != adapter && listed != model {
        let what = format!("these are not the files of a checkpoint: {}", Vec::from_iter(listed).join(", "));
        return Err(Error::Inconsistent { path: folder.to_path_buf(), what });
    }
    let progress: Progress = read_json(&folder.join(STATE))?;
    let named = folder.file_name().and_then(|name| name.to_str()).and_then(step_of);
    if named.is_some_and(|step| step != progress.step) {
        let what = format!("it holds step {}", progress.step);
        return Err(Error::Inconsistent { path: folder.to_path_buf(), what });
    }
    Ok(progress)
}

fn differences(saved: &Identity, wanted: &Identity) -> Vec<IdentityDifference> {
    let none = "none".to_string();
    let [saved_rule, wanted_rule] = [saved, wanted].map(|of| of.load_in_4bit.as_ref().unwrap_or(&none));
    let pairs = [
        ("starting adapter", saved.start.as_ref().unwrap_or(&none), wanted.start.as_ref().unwrap_or(&none)),
        ("rule of load_in_4bit", saved_rule, wanted_rule),
        ("numerics version", &saved.numerics, &wanted.numerics),
        ("profile", &saved.profile, &wanted.profile),
        ("base model", &saved.base, &wanted.base),
        ("data", &saved.data, &wanted.data),
        ("config", &saved.run, &wanted.run),
    ];
    let differing = pairs.into_iter().filter(|(_, saved, wanted)| saved != wanted);
    differing
        .map(|(what, saved, wanted)| IdentityDifference { what, saved: short(saved), wanted: short(wanted) })
        .collect()
}

/// Digests shortened to their first digits: enough to tell them apart on one line.
fn short(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).take(16).collect()
}

/// Moments are stored under the names of their weights, each with its weight's shape, both or
/// neither.
fn check_moments(optimizer: &SafeTensors, weights: &SafeTensors) -> Result<(), Error> {
    let inconsistent = |what: String| Error::Inconsistent { path: optimizer.path().to_path_buf(), what };
    let shapes: BTreeMap<&str, &[usize]> = weights.tensors().map(|tensor| (tensor.name, tensor.shape)).collect();
    let mut names = [BTreeSet::new(), BTreeSet::new()];
    for tensor in optimizer.tensors() {
        let of = MOMENTS.map(|start| tensor.name.strip_prefix(start));
        let Some(order) = of.iter().position(Option::is_some) else {
            return Err(inconsistent(format!("{:?} is not a moment", tensor.name)));
        };
        let of = of[order].unwrap_or_default();
        if shapes.get(of) != Some(&tensor.shape) {
            return Err(inconsistent(format!("{:?} has no weight of its shape", tensor.name)));
        }
        names[order].insert(of);
    }
    if names[0] != names[1] {
        return Err(inconsistent("a first moment has no second moment".to_string()));
    }
    Ok(())
}

pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let malformed = |what: String| FileError::Malformed { path: path.to_path_buf(), what };
    let bytes = regular::read(path, JSON_BYTES_MAX)?;
    Ok(serde_json::from_slice(&bytes).map_err(|error| {
        let told: String = error.to_string().chars().filter(|letter| !letter.is_control()).take(300).collect();
        malformed(told)
    })?)
}
