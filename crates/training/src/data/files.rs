//! Reads whole files: regular files only, with a size limit that is checked before anything is
//! allocated.

use super::error::DataError;
use isobit_proof::{FileError, regular};
use std::path::Path;

/// BOUND: one data file. Larger data comes as several files.
pub(super) const DATA_BYTES_MAX: u64 = 16 << 30;
/// BOUND: `tokenizer.json`; the largest published ones have some 35 MB.
pub(super) const TOKENIZER_BYTES_MAX: u64 = 512 << 20;
/// BOUND: `tokenizer_config.json` and similar files.
pub(super) const CONFIG_BYTES_MAX: u64 = 64 << 20;
/// BOUND: the source of a chat template; published ones stay below 50 kB.
pub(super) const TEMPLATE_BYTES_MAX: u64 = 1 << 20;

/// Reads a regular file of at most `limit` bytes.
pub(super) fn read(path: &Path, limit: u64) -> Result<Vec<u8>, DataError> {
    regular::read(path, limit).map_err(|error| match error {
        FileError::Missing { path } => DataError::Missing { path },
        FileError::NotRegular { path, found: "a folder" } => DataError::Folder { path },
        FileError::NotRegular { path, found } => DataError::NotRegular { path, found },
        FileError::TooLarge { path, bytes, limit } => DataError::FileTooLarge { path, bytes, limit },
        FileError::NotAllowed { path, source, .. } | FileError::Io { path, source, .. } => {
            DataError::Read { path, source }
        }
        other => DataError::Read { path: path.to_owned(), source: std::io::Error::other(other) },
    })
}

/// Like [`read`], but `None` for a file that does not exist.
pub(super) fn read_if_there(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, DataError> {
    match read(path, limit) {
        Err(DataError::Missing { .. }) => Ok(None),
        result => result.map(Some),
    }
}

/// A JSON file of the model folder; `None` if it does not exist.
pub(super) fn json_if_there(path: &Path) -> Result<Option<serde_json::Value>, DataError> {
    let Some(bytes) = read_if_there(path, CONFIG_BYTES_MAX)? else { return Ok(None) };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|error| DataError::ModelFile { path: path.to_owned(), why: format!("not JSON: {error}") })
}
