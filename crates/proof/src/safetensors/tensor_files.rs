//! A folder of tensors: one file, or shards and an index that maps each tensor to its shard.
//!
//! The index is checked against the shards: every tensor it lists must be in the shard it names,
//! and no tensor in two. Tensors of a shard that are missing from the index count as present, as in
//! other loaders.

use super::file::{SafeTensors, Tensor};
use crate::error::FileError;
use crate::json::{self, UniqueMap};
use crate::name::{is_plain, quoted};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// BOUND: shards of one model.
const SHARDS_MAX: usize = 10_000;

/// The tensors of a folder, by name.
#[derive(Debug)]
pub struct TensorFiles {
    /// The file, or the index, as named in messages.
    path: PathBuf,
    /// Sorted by file name.
    files: Vec<SafeTensors>,
    /// Tensor name to index in `files`.
    places: BTreeMap<String, usize>,
}

impl TensorFiles {
    /// Opens `model.safetensors`, or the shards of `model.safetensors.index.json`.
    pub fn open(folder: &Path) -> Result<Self, FileError> {
        Self::open_stem(folder, "model")
    }

    /// The same for another stem: `adapter_model`, `optimizer`.
    pub fn open_stem(folder: &Path, stem: &str) -> Result<Self, FileError> {
        let single = folder.join(format!("{stem}.safetensors"));
        let index = folder.join(format!("{stem}.safetensors.index.json"));
        if !single.exists() && index.exists() {
            return Self::open_index(&index);
        }
        Self::open_file(&single)
    }

    /// Opens one file.
    pub fn open_file(path: &Path) -> Result<Self, FileError> {
        let file = SafeTensors::open(path)?;
        let places = file.names().map(|name| (name.to_string(), 0)).collect();
        Ok(Self { path: path.to_path_buf(), files: vec![file], places })
    }

    /// Opens the shards that an index lists; they are in the same folder.
    pub fn open_index(index: &Path) -> Result<Self, FileError> {
        let malformed = |what: String| FileError::malformed(index, what);
        let weight_map = json::read::<Index>(index)?.weight_map.0;
        let names: BTreeSet<&str> = weight_map.values().map(String::as_str).collect();
        if names.len() > SHARDS_MAX {
            return Err(malformed(format!("{} shards are over the limit of {SHARDS_MAX}", names.len())));
        }
        let folder = index.parent().unwrap_or(Path::new(""));
        let mut files = Vec::with_capacity(names.len());
        for name in names {
            if !is_plain(name) {
                return Err(malformed(format!("{} is not the name of a file in this folder", quoted(name))));
            }
            files.push(match SafeTensors::open(&folder.join(name)) {
                Err(FileError::Missing { .. }) => return Err(malformed(format!("the shard {name} is missing"))),
                result => result?,
            });
        }
        let places = places(&files).map_err(malformed)?;
        for (tensor, shard) in &weight_map {
            let found = places.get(tensor).map(|&place| files[place].path());
            if found != Some(folder.join(shard).as_path()) {
                let what = format!("tensor {} is not in {}, where the index puts it", quoted(tensor), quoted(shard));
                return Err(malformed(what));
            }
        }
        Ok(Self { path: index.to_path_buf(), files, places })
    }

    /// The file or index this was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files, sorted by name.
    pub fn files(&self) -> &[SafeTensors] {
        &self.files
    }

    /// Tensor names in sorted order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    pub fn contains(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    pub fn get(&self, name: &str) -> Result<Tensor<'_>, FileError> {
        match self.places.get(name) {
            Some(&place) => self.files[place].get(name),
            None => Err(FileError::NoTensor { path: self.path.clone(), name: name.to_string() }),
        }
    }
}

fn places(files: &[SafeTensors]) -> Result<BTreeMap<String, usize>, String> {
    let mut places = BTreeMap::new();
    for (place, file) in files.iter().enumerate() {
        for name in file.names() {
            if let Some(other) = places.insert(name.to_string(), place) {
                let [first, second] = [&files[other], file].map(|file| file.path().display().to_string());
                return Err(format!("tensor {} is in two shards: {first} and {second}", quoted(name)));
            }
        }
    }
    Ok(places)
}

/// The part of an index that is used.
#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

#[cfg(test)]
mod tests {
    use super::super::{Dtype, Entry, write};
    use super::*;

    fn shard(folder: &Path, name: &str, tensors: &[(&str, u8)]) {
        let bytes: Vec<[u8; 1]> = tensors.iter().map(|&(_, value)| [value]).collect();
        let entries: Vec<Entry> = tensors
            .iter()
            .zip(&bytes)
            .map(|(&(name, _), bytes)| Entry { name, dtype: Dtype::U8, shape: &[1], bytes })
            .collect();
        write(&folder.join(name), &BTreeMap::new(), &entries).expect("written");
    }

    fn index(folder: &Path, json: &str) {
        std::fs::write(folder.join("model.safetensors.index.json"), json).expect("written");
    }

    #[test]
    fn one_file_is_preferred_and_shards_are_found_through_the_index() {
        let folder = tempfile::tempdir().expect("folder");
        let folder = folder.path();
        assert!(matches!(TensorFiles::open(folder), Err(FileError::Missing { .. })));
        shard(folder, "m-1.safetensors", &[("a", 1), ("c", 3)]);
        shard(folder, "m-2.safetensors", &[("b", 2), ("forgotten", 9)]);
        index(
            folder,
            r#"{"metadata":{"total_size":3},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors","c":"m-1.safetensors"}}"#,
        );
        let model = TensorFiles::open(folder).expect("well formed");
        assert_eq!(model.names().collect::<Vec<_>>(), ["a", "b", "c", "forgotten"]);
        assert_eq!(model.get("b").expect("there").bytes, [2]);
        assert!(model.contains("c") && !model.contains("d"));
        assert!(model.get("d").expect_err("absent").to_string().contains("no tensor `d`"));
        shard(folder, "model.safetensors", &[("a", 7)]);
        assert_eq!(TensorFiles::open(folder).expect("well formed").get("a").expect("there").bytes, [7]);
        shard(folder, "adapter_model.safetensors", &[("l", 8)]);
        assert!(TensorFiles::open_stem(folder, "adapter_model").expect("well formed").contains("l"));
    }

    #[test]
    fn an_index_that_lies_is_refused() {
        let folder = tempfile::tempdir().expect("folder");
        let folder = folder.path();
        shard(folder, "m-1.safetensors", &[("a", 1)]);
        shard(folder, "m-2.safetensors", &[("a", 1), ("b", 2)]);
        let cases = [
            (r#"{"weight_map":{"b":"m-1.safetensors"}}"#, 8, "tensor `b` is not in `m-1.safetensors`"),
            (r#"{"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}}"#, 8, "tensor `a` is in two shards"),
            (r#"{"weight_map":{"a":"m-3.safetensors"}}"#, 8, "the shard m-3.safetensors is missing"),
            (r#"{"weight_map":{"a":"../m-1.safetensors"}}"#, 8, "not the name of a file"),
            (r#"{"weight_map":{"a":"/etc/passwd"}}"#, 8, "not the name of a file"),
            (r#"{"weight_map":{"a":".."}}"#, 8, "not the name of a file"),
            (r#"{"weight_map":{"a":""}}"#, 8, "not the name of a file"),
            (r#"{"weight_map":{"a":"x\\y"}}"#, 8, "not the name of a file"),
            (r#"{"weight_map":{"a":"m-1.safetensors","a":"m-2.safetensors"}}"#, 8, "`a` appears twice"),
            (r#"{"weight_map":{},"weight_map":{}}"#, 8, "duplicate field `weight_map`"),
            (r"{}", 8, "missing field `weight_map`"),
            (r"[", 8, "malformed"),
        ];
        for (json, code, expected) in cases {
            index(folder, json);
            let error = TensorFiles::open(folder).expect_err(json);
            assert!(error.to_string().contains(expected), "{json}: {error}");
            assert_eq!(error.exit_code(), code, "{json}: {error}");
        }
    }
}
