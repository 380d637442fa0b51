//! `data.json` in a run folder: the files the run trains on, with format, size and digest.
//! `generate` reads it to find out whether an adapter was trained on conversations.

use crate::data::{Report, RowFormat};
use isobit_proof::atomic::write_atomically;
pub(crate) use isobit_proof::layout::DATA as NAME;
use isobit_proof::{FileError, regular};
use serde::Deserialize;
use std::path::Path;

const SCHEMA: &str = "isobit.data/1";

/// BOUND: bytes of the file, far more than we write.
const BYTES_MAX: u64 = 1 << 24;

fn value(report: &Report) -> serde_json::Value {
    serde_json::json!({"schema": SCHEMA, "files": report.files})
}

/// Whether the file in a run folder is that of these data, wherever they lie now.
pub fn is_of(output_dir: &Path, report: &Report) -> Result<bool, FileError> {
    let text = regular::read_text(&output_dir.join(NAME), BYTES_MAX)?;
    let Ok(mut found) = serde_json::from_str::<serde_json::Value>(&text) else { return Ok(false) };
    let mut expected = value(report);
    for file in [&mut found, &mut expected].into_iter().filter_map(|value| value["files"].as_array_mut()).flatten() {
        if let Some(fields) = file.as_object_mut() {
            fields.remove("path");
        }
    }
    Ok(found == expected)
}

pub fn write(output_dir: &Path, report: &Report) -> Result<(), FileError> {
    let value = value(report);
    let mut text = serde_json::to_string_pretty(&value).expect("strings and numbers have a JSON form");
    text.push('\n');
    write_atomically(&output_dir.join(NAME), text.as_bytes())
}

/// Whether the file is missing or was written by a run.
pub(crate) fn is_ours(output_dir: &Path) -> Result<bool, FileError> {
    let bytes = regular::if_there(regular::read(&output_dir.join(NAME), BYTES_MAX));
    let is_record =
        |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).is_ok_and(|value| value["schema"] == SCHEMA);
    match bytes {
        Ok(bytes) => Ok(bytes.is_none_or(|bytes| is_record(&bytes))),
        Err(FileError::NotRegular { .. } | FileError::TooLarge { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The format of the conversations that the run in this folder trained on. None if there were none
/// or the folder has no record of it: this is only a hint.
pub fn conversations(output_dir: &Path) -> Option<String> {
    let bytes = regular::read(&output_dir.join(NAME), BYTES_MAX).ok()?;
    let value: serde_json::Value = serde_json::from_slice(&bytes).ok()?;
    if value["schema"] != SCHEMA {
        return None;
    }
    let is_conversation =
        |format: &&serde_json::Value| RowFormat::deserialize(*format).is_ok_and(RowFormat::is_conversation);
    let mut formats = value["files"].as_array()?.iter().map(|file| &file["format"]).filter(is_conversation);
    formats.next()?.as_str().map(str::to_string)
}
