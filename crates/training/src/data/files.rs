//! Reading whole files with a limit on their size, checked before anything is allocated.

use super::error::DataError;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

/// BOUND: one data file. Larger data comes as several files.
pub(super) const DATA_BYTES_MAX: u64 = 16 << 30;
/// BOUND: `tokenizer.json`; the largest published ones have some 35 MB.
pub(super) const TOKENIZER_BYTES_MAX: u64 = 512 << 20;
/// BOUND: `tokenizer_config.json` and its kin.
pub(super) const CONFIG_BYTES_MAX: u64 = 64 << 20;
/// BOUND: the source of a chat template; published ones stay below 50 kB.
pub(super) const TEMPLATE_BYTES_MAX: u64 = 1 << 20;

pub(super) fn read(path: &Path, limit: u64) -> Result<Vec<u8>, DataError> {
    let failed = |source: std::io::Error| match source.kind() {
        // A file in the place of a folder hides what would be below it.
        ErrorKind::NotFound | ErrorKind::NotADirectory => DataError::Missing { path: path.to_owned() },
        ErrorKind::IsADirectory => DataError::Folder { path: path.to_owned() },
        _ => DataError::Read { path: path.to_owned(), source },
    };
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.is_dir() {
        return Err(failed(ErrorKind::IsADirectory.into()));
    }
    let too_large = |bytes| DataError::FileTooLarge { path: path.to_owned(), bytes, limit };
    if metadata.len() > limit {
        return Err(too_large(metadata.len()));
    }
    // A pipe has no length, and a file may grow meanwhile: the limit holds for what is read, too.
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > limit {
        return Err(too_large(bytes.len() as u64));
    }
    Ok(bytes)
}

/// As [`read`], with `None` for a file that does not exist.
pub(super) fn read_if_there(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, DataError> {
    match read(path, limit) {
        Err(DataError::Missing { .. }) => Ok(None),
        result => result.map(Some),
    }
}

/// A JSON file of the model folder, `None` where it does not exist.
pub(super) fn json_if_there(path: &Path) -> Result<Option<serde_json::Value>, DataError> {
    let Some(bytes) = read_if_there(path, CONFIG_BYTES_MAX)? else { return Ok(None) };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|error| DataError::ModelFile { path: path.to_owned(), why: format!("not JSON: {error}") })
}
