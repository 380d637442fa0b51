//! How `diff` interprets a path: a file, an adapter, a checkpoint, a sharded model, or the `final`
//! folder of a run.
//!
//! Tensors come in sets, one per stem: `adapter_model` and `optimizer` of a checkpoint, `model` of
//! a model with any number of shards. JSON files are included, except indexes and manifests, which
//! follow from the rest.

use crate::error::FileError;
use crate::hash::Manifest;
use crate::json::{self, UniqueMap};
use crate::layout::{self, FINAL, STATE};
use crate::receipt;
use crate::safetensors::TensorFiles;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const TENSORS: &str = ".safetensors";
const INDEX: &str = ".safetensors.index.json";
/// The stem of what a checkpoint holds beside weights.
const OPTIMIZER: &str = "optimizer";

/// Everything on one side.
#[derive(Debug, Default)]
pub(crate) struct DiffSide {
    /// The path is a file, not a folder.
    pub(crate) is_file: bool,
    /// By stem.
    pub(crate) sets: BTreeMap<String, TensorFiles>,
    /// By file name.
    pub(crate) documents: BTreeMap<String, Value>,
}

impl DiffSide {
    pub(crate) fn open(path: &Path) -> Result<Self, FileError> {
        let metadata = std::fs::metadata(path).map_err(|error| FileError::from_io("read", path, error))?;
        if metadata.is_dir() {
            return Self::open_folder(path);
        }
        let mut source = Self { is_file: true, ..Self::default() };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some(stem) = name.strip_suffix(INDEX) {
            source.sets.insert(stem.to_string(), TensorFiles::open_index(path)?);
        } else if is_json(path) {
            source.documents.insert(name, json::read(path)?);
        } else {
            let stem = name.strip_suffix(TENSORS).unwrap_or(&name);
            source.sets.insert(stem.to_string(), TensorFiles::open_file(path)?);
        }
        Ok(source)
    }

    /// What it holds, judged by its files and the names of its tensors.
    pub(crate) fn kind(&self) -> &'static str {
        let has = |part: &str| self.sets.values().any(|set| set.names().any(|name| name.contains(part)));
        if self.documents.contains_key(layout::ADAPTER_CONFIG) || has(".lora_A.") || has(".lora_embedding_A") {
            "adapter"
        } else if has("embed_tokens.") || has(".layers.") {
            "model"
        } else if self.sets.is_empty() {
            "JSON"
        } else {
            "tensors"
        }
    }

    /// Against weights alone, the state of a checkpoint is left out: what is left out of it.
    pub(crate) fn without_state(&mut self, other: &Self) -> Vec<String> {
        let has_state = |side: &Self| side.documents.contains_key(STATE) && side.sets.contains_key(OPTIMIZER);
        if !has_state(self) || other.documents.contains_key(STATE) || other.sets.contains_key(OPTIMIZER) {
            return Vec::new();
        }
        self.documents.remove(STATE);
        self.sets.remove(OPTIMIZER);
        vec![layout::OPTIMIZER.to_string(), STATE.to_string()]
    }

    /// Against a single file, a folder is reduced to the set of that name, or to all of its sets if
    /// it has none of that name.
    pub(crate) fn narrow_to(&mut self, other: &Self) {
        if !other.is_file || self.is_file {
            return;
        }
        self.documents.retain(|name, _| other.documents.contains_key(name));
        if self.sets.keys().any(|stem| other.sets.contains_key(stem)) || other.sets.is_empty() {
            self.sets.retain(|stem, _| other.sets.contains_key(stem));
        }
    }

    fn open_folder(folder: &Path) -> Result<Self, FileError> {
        let names = list(folder)?;
        let tensors =
            |names: &BTreeSet<String>| names.iter().any(|name| name.ends_with(TENSORS) || name.ends_with(INDEX));
        if tensors(&names) {
            return Self::open_listed(folder, &names);
        }
        let inner = folder.join(FINAL);
        if inner.is_dir() {
            let names = list(&inner)?;
            if tensors(&names) {
                return Self::open_listed(&inner, &names);
            }
        }
        Err(FileError::NoTensors { folder: folder.to_path_buf() })
    }

    fn open_listed(folder: &Path, names: &BTreeSet<String>) -> Result<Self, FileError> {
        let mut stems = BTreeSet::new();
        let mut shards = BTreeSet::new();
        for name in names {
            if let Some(stem) = name.strip_suffix(INDEX) {
                stems.insert(stem);
                let index: Index = json::read(&folder.join(name))?;
                shards.extend(index.weight_map.0.into_values());
            }
        }
        for name in names.iter().filter(|name| !shards.contains(*name)) {
            stems.extend(name.strip_suffix(TENSORS));
        }
        let mut source = Self::default();
        for stem in stems {
            source.sets.insert(stem.to_string(), TensorFiles::open_stem(folder, stem)?);
        }
        for name in names {
            // Records about the files are no content: two runs never share them.
            let is_record = name == Manifest::NAME || name == receipt::NAME;
            if is_json(Path::new(name)) && !name.ends_with(INDEX) && !is_record {
                source.documents.insert(name.clone(), json::read(&folder.join(name))?);
            }
        }
        Ok(source)
    }
}

fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "json")
}

/// Distinguishes shards from standalone files.
#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

/// Names of the files in a folder; names that are not UTF-8 are skipped, as none is ever looked up.
fn list(folder: &Path) -> Result<BTreeSet<String>, FileError> {
    let failed = |error| FileError::from_io("read", folder, error);
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // Follows links: model caches consist of them.
        if let Ok(name) = entry.file_name().into_string()
            && entry.path().is_file()
        {
            names.insert(name);
        }
    }
    Ok(names)
}
