//! Models for other programs: a Hugging Face folder with an adapter merged into its base, and (in
//! `gguf/`) GGUF files.
//!
//! The arithmetic is in `docs/numerics.md`, "Merge" and "Blocks of GGUF files". Weights pass
//! through a panel of rows at a time. What is written appears under its name whole, or not at all,
//! and never in place of something else.

#![expect(clippy::float_arithmetic, reason = "how much is lost by rounding, for people")]

pub mod gguf;

use crate::checkpoint;
use crate::config::SaveDtype;
use crate::model_folder::ModelFolder;
use crate::prepare::RunError;
use crate::sealed;
use crate::signal;
use isobit_kernels::Backend;
use isobit_models::{Merged, Weights};
use isobit_numerics::cast::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use isobit_proof::atomic::sync_folder;
use isobit_proof::safetensors::Dtype;
use isobit_proof::{FileError, Manifest, disk};
use std::path::{Path, PathBuf};

/// A finished folder that does not have its name yet.
pub struct Unpublished {
    partial: Partial,
    target: PathBuf,
    written: Written,
}

/// What was written.
#[derive(Debug)]
pub struct Written {
    /// Of the files.
    pub names: Vec<String>,
    /// The share of what the adapter adds that is left after rounding to the format of the result:
    /// `⟨rounded(W + Δ) − W, Δ⟩ / ⟨Δ, Δ⟩` over all tensors with an adapter; 1 without rounding.
    pub kept: f64,
}

impl Unpublished {
    /// Makes the folder appear under its name.
    pub fn publish(self) -> Result<Written, RunError> {
        self.partial.publish(&self.target)?;
        Ok(self.written)
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
    let mut kept = Kept::default();
    let names = folder.write_values(&partial.path, &mut |name, _, put| {
        let rounded = rounding_to(folder.dtype_of(name));
        merged.values_and_base(backend, name, &mut |values, base| {
            check_signal()?;
            finite(name, values)?;
            if let Some(base) = base {
                kept.add(base, values, rounded);
            }
            put(values)
        })
    })?;
    Manifest::of(&partial.path, names.iter().map(String::as_str))?.write(&partial.path)?;
    Ok(Unpublished { partial, target: target.to_path_buf(), written: Written { names, kept: kept.share() } })
}

/// How much of what an adapter adds is left by rounding.
#[derive(Default)]
struct Kept {
    /// Sums of `(rounded(W + Δ) − W)·Δ` and of `Δ·Δ`.
    rounded: f64,
    exact: f64,
}

impl Kept {
    fn add(&mut self, base: &[f32], values: &[f32], rounded: fn(f32) -> f32) {
        for (base, value) in base.iter().zip(values) {
            let added = f64::from(*value) - f64::from(*base);
            self.rounded += (f64::from(rounded(*value)) - f64::from(*base)) * added;
            self.exact += added * added;
        }
    }

    fn share(&self) -> f64 {
        if self.exact > 0.0 { self.rounded / self.exact } else { 1.0 }
    }
}

fn rounding_to(dtype: Option<Dtype>) -> fn(f32) -> f32 {
    match dtype {
        Some(Dtype::Bf16) => |value| bf16_to_f32(f32_to_bf16(value)),
        Some(Dtype::F16) => |value| f16_to_f32(f32_to_f16(value)),
        _ => |value| value,
    }
}

/// An error once a signal asked to stop; what was written is removed on the way out.
fn check_signal() -> Result<(), RunError> {
    signal::requested().map_or(Ok(()), |signal| Err(RunError::Stopped(signal)))
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

/// Refuses a target that exists, since nothing is ever overwritten, and one inside a folder that is
/// complete.
pub fn check_target(target: &Path) -> Result<(), RunError> {
    sealed::check_target(target)?;
    sealed::check_beside_run(target)?;
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
        disk::create_folders(&parent).map_err(|error| FileError::from_io("write", &parent, error))?;
        // Names that are taken were left by killed exports, or belong to other machines.
        for number in 0_u32.. {
            let path = parent.join(format!(".{name}.{}-{number}.partial", std::process::id()));
            match disk::create_folder(&path) {
                Ok(()) => return Ok(Self { path, parent, done: false }),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => (),
                Err(error) => return Err(FileError::from_io("write", &path, error).into()),
            }
        }
        unreachable!("a folder has fewer entries than numbers")
    }

    fn publish(mut self, target: &Path) -> Result<(), RunError> {
        check_signal()?;
        sync_folder(&self.path)?;
        // Again, in case something appeared in between; a folder with content cannot be renamed
        // over.
        check_target(target)?;
        disk::rename(&self.path, target).map_err(|error| FileError::from_io("write", target, error))?;
        self.done = true;
        Ok(sync_folder(&self.parent)?)
    }
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

    /// What a killed export left under the name of this process is in nobody's way, and stays.
    #[test]
    fn leftovers_of_other_exports_stay() {
        let folder = tempfile::tempdir().expect("a folder");
        let left = folder.path().join(format!(".merged.{}-0.partial", std::process::id()));
        std::fs::create_dir(&left).expect("a folder");
        let partial = Partial::create(&folder.path().join("merged")).expect("another name");
        assert_ne!(partial.path, left);
        drop(partial);
        assert!(left.exists());
    }
}
