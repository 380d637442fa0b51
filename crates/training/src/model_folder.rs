//! A complete model folder that `eval --model` and other tools can load: `final/` of a run that
//! trains the model's own weights, and what `export merge` writes. In `final/`, trained tensors
//! come from the run, all others from the base; float8 is expanded, 4-bit modules stay as they are.
//! A merge changes tensors of the base and expands all.
//!
//! The list of tensors is settled before anything is written. They are written one at a time, so
//! memory never holds a second copy of the model. The folder also gets the base's config, changed
//! where necessary, and its tokenizer and template.

mod config_text;

use crate::checkpoint::{self, MODEL};
use crate::config::SaveDtype;
use crate::prepare::{QUANTIZE_CONFIG, RunError};
use config_text::Edits;
use isobit_models::config::Quantization;
use isobit_models::{Config, Copied, Merged, MergedKind, ModelError, StoredTensor, Weights};
use isobit_numerics::cast::{f32_to_bf16, f32_to_f16};
use isobit_proof::atomic::{AtomicFile, write_atomically};
use isobit_proof::safetensors::{Declared, Dtype, Sink, write_streamed};
use isobit_proof::{FileError, Manifest, regular};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// Names and shapes of the trained tensors, as stored in files.
pub type Shapes = BTreeMap<String, Vec<usize>>;

/// Returns a trained tensor, given its name and shape.
pub type Trained<'a> = &'a mut dyn FnMut(&str, &[usize]) -> Result<Vec<f32>, RunError>;

/// Receives consecutive values of a tensor.
pub type Put<'a> = &'a mut dyn FnMut(&[f32]) -> Result<(), RunError>;

/// Passes on the values of a tensor, given its name and shape.
pub type Values<'a> = &'a mut dyn FnMut(&str, &[usize], Put<'_>) -> Result<(), RunError>;

/// Once a file reaches this many bytes, the next tensor goes into a new file, as in other tools.
const SHARD_BYTES: usize = 5_000_000_000;
/// Maps each tensor to its file when there are several.
const INDEX: &str = "model.safetensors.index.json";
/// Values converted to bytes at a time.
const VALUES_AT_ONCE: usize = 1 << 16;
/// BOUND: bytes of a copied file, far more than any tokenizer.
const COPIED_BYTES_MAX: u64 = 1 << 30;

/// A tensor of the folder to be written.
#[derive(Debug)]
struct PlannedTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    from: ValuesFrom,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValuesFrom {
    /// From the run, or computed by the merge.
    Run,
    Base,
    /// Copied as bytes, not converted.
    BaseAsStored,
}

/// What the folder will hold.
#[derive(Debug)]
pub struct ModelFolder<'a> {
    base: &'a Path,
    weights: &'a Weights,
    edits: Edits,
    tensors: Vec<PlannedTensor>,
    shard_bytes: usize,
}

impl<'a> ModelFolder<'a> {
    /// Settles the list of tensors. All of `trained` must exist in the base: a folder that lacks
    /// one could not be loaded.
    pub fn new(
        base: &'a Path,
        model: &Config,
        weights: &'a Weights,
        trained: &Shapes,
        dtype: SaveDtype,
    ) -> Result<Self, ModelError> {
        let mut tensors = Vec::new();
        for name in weights.tensor_files().names() {
            let planned = |dtype, shape: &[usize], from| PlannedTensor {
                name: name.to_string(),
                dtype,
                shape: shape.to_vec(),
                from,
            };
            // A separate head would contradict the table it is tied to.
            if model.tied && name == "lm_head.weight" {
                continue;
            }
            match (trained.get(name), weights.copied(name)?) {
                (_, None) => {}
                (Some(shape), _) => tensors.push(planned(stored_as(dtype), shape, ValuesFrom::Run)),
                (None, Some(Copied::Numbers(tensor))) => {
                    let shape = weights.numbers_shape(&tensor)?;
                    tensors.push(planned(stored_as(dtype), &shape, ValuesFrom::Base));
                }
                (None, Some(Copied::AsStored(tensor))) => {
                    tensors.push(planned(tensor.dtype, tensor.shape, ValuesFrom::BaseAsStored));
                }
            }
        }
        if let Some(name) = trained.keys().find(|name| !tensors.iter().any(|planned| planned.name == **name)) {
            let what =
                "it is trained and the base has no tensor of this name: the result could not be saved as a model";
            return Err(ModelError::Tensor { name: name.clone(), what: what.to_string() });
        }
        let expanded = matches!(model.quantization, Quantization::Fp8(_) | Quantization::Bitsandbytes);
        let edits = Edits { dtype: Some(dtype.name()), expanded, untied: false };
        Ok(Self { base, weights, edits, tensors, shard_bytes: SHARD_BYTES })
    }

    /// The folder of a base with an adapter merged into it. Without a dtype, tensors keep theirs;
    /// quantised ones become bfloat16, and so does float16 beside them: files of one 16-bit format
    /// are what other tools expect.
    pub fn merged(
        base: &'a Path,
        weights: &'a Weights,
        merged: &Merged<'_>,
        dtype: Option<SaveDtype>,
    ) -> Result<Self, ModelError> {
        let expanded = merged.is_expanded();
        let mut tensors = Vec::new();
        for tensor in merged.tensors()? {
            let kept = match tensor.stored {
                Dtype::F16 if expanded => Dtype::Bf16,
                Dtype::F32 | Dtype::F16 | Dtype::Bf16 => tensor.stored,
                _ => Dtype::Bf16,
            };
            let (dtype, from) = match (tensor.kind, dtype.map_or(kept, stored_as)) {
                (MergedKind::Opaque, _) => (tensor.stored, ValuesFrom::BaseAsStored),
                (MergedKind::Kept, dtype) if dtype == tensor.stored => (dtype, ValuesFrom::BaseAsStored),
                (MergedKind::Kept, dtype) => (dtype, ValuesFrom::Base),
                (MergedKind::Expanded | MergedKind::Changed, dtype) => (dtype, ValuesFrom::Run),
            };
            tensors.push(PlannedTensor { name: tensor.name, dtype, shape: tensor.shape, from });
        }
        let dtype = dtype.map(SaveDtype::name).or(expanded.then_some(SaveDtype::Bfloat16.name()));
        let edits = Edits { dtype, expanded, untied: merged.config().tied && !merged.tied() };
        Ok(Self { base, weights, edits, tensors, shard_bytes: SHARD_BYTES })
    }

    /// The format that a tensor is written in.
    pub fn dtype_of(&self, name: &str) -> Option<Dtype> {
        self.tensors.iter().find(|planned| planned.name == name).map(|planned| planned.dtype)
    }

    /// The same with smaller files.
    #[must_use]
    pub fn with_shards_of(self, shard_bytes: usize) -> Self {
        Self { shard_bytes, ..self }
    }

    /// Writes all files and returns their names.
    pub fn write(&self, folder: &Path, trained: Trained<'_>) -> Result<Vec<String>, RunError> {
        self.write_values(folder, &mut |name, shape, put| put(&trained(name, shape)?))
    }

    /// The same for values that come in pieces.
    pub fn write_values(&self, folder: &Path, values: Values<'_>) -> Result<Vec<String>, RunError> {
        let mut names = self.copy_others(folder)?;
        let text = read_text(&self.base.join("config.json"))?;
        let config = self.edits.of(&text).ok_or_else(|| FileError::Malformed {
            path: self.base.join("config.json"),
            what: "it is not a JSON object".to_string(),
        })?;
        write_atomically(&folder.join("config.json"), config.as_bytes())?;
        names.push("config.json".to_string());
        let shards = self.shards();
        let mut places = BTreeMap::new();
        for (index, shard) in shards.iter().enumerate() {
            let name = match shards.len() {
                1 => MODEL.to_string(),
                count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            };
            self.put(&folder.join(&name), shard, values)?;
            places.extend(shard.iter().map(|planned| (planned.name.clone(), name.clone())));
            names.push(name);
        }
        if shards.len() > 1 {
            let total: usize = self.tensors.iter().map(bytes_of).sum();
            let value = serde_json::json!({"metadata": {"total_size": total}, "weight_map": places});
            write_atomically(&folder.join(INDEX), format!("{value:#}\n").as_bytes())?;
            names.push(INDEX.to_string());
        }
        Ok(names)
    }

    /// Tensors in order of their names, starting a new file when one is full.
    fn shards(&self) -> Vec<&[PlannedTensor]> {
        let (mut shards, mut begin, mut bytes) = (Vec::new(), 0, 0);
        for (index, planned) in self.tensors.iter().enumerate() {
            if index > begin && bytes + bytes_of(planned) > self.shard_bytes {
                shards.push(&self.tensors[begin..index]);
                (begin, bytes) = (index, 0);
            }
            bytes += bytes_of(planned);
        }
        shards.push(&self.tensors[begin..]);
        shards
    }

    fn put(&self, path: &Path, tensors: &[PlannedTensor], values: Values<'_>) -> Result<(), RunError> {
        let declared: Vec<Declared<'_>> = tensors
            .iter()
            .map(|PlannedTensor { name, dtype, shape, .. }| Declared { name, dtype: *dtype, shape })
            .collect();
        write_streamed(path, &BTreeMap::new(), &declared, |index, sink| -> Result<(), RunError> {
            let planned = &tensors[index];
            let PlannedTensor { name, dtype, shape, .. } = planned;
            if planned.from == ValuesFrom::Run {
                return values(name, shape, &mut |values| put_values(sink, *dtype, name, values));
            }
            let tensor = self.weights.tensor_files().get(name)?;
            if planned.from == ValuesFrom::BaseAsStored {
                sink.write(tensor.bytes)?;
            } else {
                put_numbers(sink, *dtype, name, &self.weights.numbers(tensor)?)?;
            }
            tensor.release();
            Ok(())
        })
    }

    /// Copies the tokenizer, template, generation config, licence and any other text files beside
    /// the weights.
    fn copy_others(&self, folder: &Path) -> Result<Vec<String>, FileError> {
        let failed = |error| FileError::from_io("read", self.base, error);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(self.base).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            // Follows links: model caches are made of them.
            let Ok(found) = std::fs::metadata(entry.path()) else { continue };
            let applies = !self.edits.expanded || name != QUANTIZE_CONFIG;
            if found.is_file() && found.len() <= COPIED_BYTES_MAX && applies && comes_along(&name) {
                copy(&entry.path(), &folder.join(&name))?;
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }
}

/// Writes the tensors of a trained adapter into one file.
pub fn put_tensors(path: &Path, shapes: &Shapes, dtype: SaveDtype, trained: Trained<'_>) -> Result<(), RunError> {
    let all: Vec<(&String, &Vec<usize>)> = shapes.iter().collect();
    let declared: Vec<Declared<'_>> =
        all.iter().map(|(name, shape)| Declared { name, dtype: stored_as(dtype), shape }).collect();
    write_streamed(path, &BTreeMap::new(), &declared, |index, sink| {
        let (name, shape) = all[index];
        put_values(sink, stored_as(dtype), name, &trained(name, shape)?)
    })
}

/// A few values at a time: the base may be larger than memory.
fn put_numbers(sink: &mut Sink<'_>, dtype: Dtype, name: &str, stored: &StoredTensor<'_>) -> Result<(), RunError> {
    stored.bytes.chunks(VALUES_AT_ONCE * stored.format.bytes()).try_for_each(|bytes| {
        let values = bytes.len() / stored.format.bytes();
        let part = StoredTensor { format: stored.format, shape: vec![values], bytes: bytes.into() };
        put_values(sink, dtype, name, &part.to_f32())
    })
}

fn stored_as(dtype: SaveDtype) -> Dtype {
    match dtype {
        SaveDtype::Float32 => Dtype::F32,
        SaveDtype::Bfloat16 => Dtype::Bf16,
        SaveDtype::Float16 => Dtype::F16,
    }
}

fn bytes_of(planned: &PlannedTensor) -> usize {
    planned.dtype.bytes_of(&planned.shape).unwrap_or(usize::MAX)
}

/// Rounds to nearest, ties to even. A number that rounds to infinity is an error, since it could
/// not be restored.
fn put_values(sink: &mut Sink<'_>, dtype: Dtype, name: &str, values: &[f32]) -> Result<(), RunError> {
    let (narrow, format): (fn(f32) -> u16, _) = match dtype {
        Dtype::Bf16 => (f32_to_bf16, SaveDtype::Bfloat16),
        Dtype::F16 => (f32_to_f16, SaveDtype::Float16),
        _ => {
            return Ok(sink.write_f32(values)?);
        }
    };
    let infinity = narrow(f32::INFINITY);
    for values in values.chunks(VALUES_AT_ONCE) {
        let mut bytes = Vec::with_capacity(2 * values.len());
        for value in values {
            let bits = narrow(*value);
            if value.is_finite() && bits & 0x7fff == infinity {
                let (tensor, format) = (name.to_string(), format.name());
                return Err(checkpoint::Error::Beyond { tensor, value: *value, format }.into());
            }
            bytes.extend(bits.to_le_bytes());
        }
        sink.write(&bytes)?;
    }
    Ok(())
}

/// Whether a file of the base is copied unchanged. Weights and their index are written anew.
fn comes_along(name: &str) -> bool {
    const ENDINGS: [&str; 6] = ["json", "jinja", "txt", "model", "tiktoken", "py"];
    const NOT: [&str; 4] = ["config.json", Manifest::NAME, checkpoint::ADAPTER_CONFIG, checkpoint::STATE];
    let ending = Path::new(name).extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    let licence = ["LICENSE", "LICENCE", "NOTICE"].iter().any(|start| name.starts_with(start));
    !name.starts_with('.')
        && !NOT.contains(&name)
        && !name.ends_with(".index.json")
        && (licence || ENDINGS.contains(&ending))
}

/// Whether the folder may hold a file of this name, given the files of the base.
pub fn may_hold(base: &Path, name: &str) -> bool {
    let is_shard = name.starts_with("model-") && name.ends_with(".safetensors");
    is_shard || [MODEL, INDEX, "config.json"].contains(&name) || comes_along(name) && base.join(name).exists()
}

fn copy(from: &Path, to: &Path) -> Result<(), FileError> {
    let failed = |error| FileError::from_io("read", from, error);
    let (mut source, _) = regular::open(from)?;
    let mut target = AtomicFile::create(to)?;
    let mut buffer = vec![0; 1 << 16];
    loop {
        match source.read(&mut buffer).map_err(failed)? {
            0 => return target.commit(),
            count => target.write(&buffer[..count])?,
        }
    }
}

fn read_text(path: &Path) -> Result<String, FileError> {
    regular::read_text(path, crate::prepare::CONFIG_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_along() {
        for name in
            ["tokenizer.json", "merges.txt", "chat_template.jinja", "tokenizer.model", "LICENSE", "modeling_x.py"]
        {
            assert!(comes_along(name), "{name}");
        }
        for name in
            ["config.json", "model.safetensors", "model.safetensors.index.json", Manifest::NAME, ".git", "a.bin"]
        {
            assert!(!comes_along(name), "{name}");
        }
    }
}
