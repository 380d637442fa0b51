//! The way back: the manifest first, then whose checkpoint it is, then its tensors, and that they belong together.

use super::error::{Difference, Error};
use super::state::{Identity, NamedTensor, Progress, Snapshot};
use super::{ADAPTER, ADAPTER_CONFIG, MODEL, OPTIMIZER, STATE, step_of};
use isobit_proof::safetensors::{SafeTensors, Tensor};
use isobit_proof::{FileError, Manifest};
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// BOUND: bytes of a pointer or a state.
const JSON_BYTES_MOST: u64 = 1 << 20;

/// Reads a checkpoint of this very run: every byte as recorded, and made under the same config, data, base model, profile
/// and numerics version.
pub fn load(folder: &Path, identity: &Identity) -> Result<Snapshot, Error> {
    let progress = inspect(folder)?;
    let differences = differences(&progress.identity, identity);
    if !differences.is_empty() {
        return Err(Error::Different { folder: folder.to_path_buf(), differences });
    }
    let adapter = folder.join(ADAPTER).exists();
    let weights = tensors(&folder.join(if adapter { ADAPTER } else { MODEL }))?;
    let (moments1, moments2) = moments(&folder.join(OPTIMIZER), &weights)?;
    Ok(Snapshot { step: progress.step, weights, moments1, moments2, progress })
}

/// How far the run of a checkpoint had come and what it was, after every byte has been checked.
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

fn differences(saved: &Identity, wanted: &Identity) -> Vec<Difference> {
    let pairs = [
        ("numerics version", &saved.numerics, &wanted.numerics),
        ("profile", &saved.profile, &wanted.profile),
        ("base model", &saved.base, &wanted.base),
        ("data", &saved.data, &wanted.data),
        ("config", &saved.run, &wanted.run),
    ];
    let differing = pairs.into_iter().filter(|(_, saved, wanted)| saved != wanted);
    differing.map(|(what, saved, wanted)| Difference { what, saved: short(saved), wanted: short(wanted) }).collect()
}

/// Digests by their first digits: enough to tell them apart on one line.
fn short(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).take(16).collect()
}

fn tensors(path: &Path) -> Result<Vec<NamedTensor>, Error> {
    let file = SafeTensors::open(path)?;
    let tensors: Result<Vec<NamedTensor>, Error> = file.tensors().map(|tensor| named(&tensor, tensor.name)).collect();
    tensors
}

fn named(tensor: &Tensor<'_>, name: &str) -> Result<NamedTensor, Error> {
    let values = tensor.to_f32()?;
    tensor.release();
    Ok(NamedTensor { name: name.to_string(), shape: tensor.shape.to_vec(), values })
}

/// First and second moments under the names of their weights, each of its weight's shape, both or neither.
fn moments(path: &Path, weights: &[NamedTensor]) -> Result<(Vec<NamedTensor>, Vec<NamedTensor>), Error> {
    let inconsistent = |what: String| Error::Inconsistent { path: path.to_path_buf(), what };
    let shapes: BTreeMap<&str, &[usize]> =
        weights.iter().map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice())).collect();
    let file = SafeTensors::open(path)?;
    let (mut moments1, mut moments2) = (Vec::new(), Vec::new());
    for tensor in file.tensors() {
        let (of, moments) = match (tensor.name.strip_prefix("moment1."), tensor.name.strip_prefix("moment2.")) {
            (Some(of), _) => (of, &mut moments1),
            (_, Some(of)) => (of, &mut moments2),
            _ => return Err(inconsistent(format!("{:?} is not a moment", tensor.name))),
        };
        if shapes.get(of) != Some(&tensor.shape) {
            return Err(inconsistent(format!("{:?} has no weight of its shape", tensor.name)));
        }
        moments.push(named(&tensor, of)?);
    }
    let names = |moments: &[NamedTensor]| moments.iter().map(|tensor| tensor.name.clone()).collect::<Vec<_>>();
    if names(&moments1) != names(&moments2) {
        return Err(inconsistent("a first moment stands without its second".to_string()));
    }
    Ok((moments1, moments2))
}

pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let failed = |error| FileError::from_io("read", path, error);
    let malformed = |what: String| FileError::Malformed { path: path.to_path_buf(), what };
    // Before opening: a pipe would wait for a writer that never comes.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(malformed("this is not a regular file".to_string()).into());
    }
    let mut bytes = Vec::new();
    File::open(path).map_err(failed)?.take(JSON_BYTES_MOST + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > JSON_BYTES_MOST {
        return Err(malformed(format!("it is over the limit of {JSON_BYTES_MOST} bytes")).into());
    }
    Ok(serde_json::from_slice(&bytes).map_err(|error| {
        let told: String = error.to_string().chars().filter(|letter| !letter.is_control()).take(300).collect();
        malformed(told)
    })?)
}
