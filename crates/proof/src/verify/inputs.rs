//! The base model and the data of a run, given by the user, against the receipt.

use super::Report;
use crate::error::FileError;
use crate::hash::{FileRecord, Hash};
use crate::name::counted;
use crate::receipt::{DataFile, LineRange, Receipt, TOKENIZER_FILES};
use crate::safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;

/// Compares the files of a model folder; of a tensor file that differs, the tensors. A file of the
/// tokenizer that the receipt does not name is a finding too, and so is a recorded tensor that is
/// not one of the files.
pub fn check_base(report: &mut Report, receipt: &Receipt, folder: &Path) -> Result<(), FileError> {
    let made = &receipt.made;
    let mut found_tensors = 0;
    for (name, recorded) in made.base.files.iter().chain(&made.tokenizer) {
        let path = folder.join(name);
        let Some(found) = report.damage_as_finding(&path, FileRecord::of(&path))? else { continue };
        report.files += 1;
        let is_weights = path.extension().is_some_and(|kind| kind == "safetensors");
        let (differing, held) =
            if is_weights { differing_tensors(&path, &made.base.tensors)? } else { (Vec::new(), 0) };
        found_tensors += held;
        match differing.split_first() {
            None if found == *recorded => (),
            None => {
                let what = format!("the recorded hash is {}, but it has {}", recorded.blake3, found.blake3);
                report.add_finding(&path, what);
            }
            Some((only, [])) => {
                report.add_finding(&path, format!("{only} is not the tensor that the run was trained on"));
            }
            Some((first, _)) => {
                let count = differing.len();
                let what = format!("{count} of {held} tensors are not those the run was trained on, first {first}");
                report.add_finding(&path, what);
            }
        }
    }
    if found_tensors < made.base.tensors.len() {
        report.add_finding(folder, "the receipt names tensors that its files do not have");
    }
    for name in TOKENIZER_FILES.iter().filter(|name| !made.tokenizer.contains_key(**name)) {
        if folder.join(name).exists() {
            report.add_finding(&folder.join(name), "the receipt does not name it");
        }
    }
    Ok(())
}

/// Names of the tensors of a file that are not as recorded, and how many it holds. A file that
/// cannot be read has none: it is reported by its hash.
fn differing_tensors(path: &Path, recorded: &BTreeMap<String, Hash>) -> Result<(Vec<String>, usize), FileError> {
    let file = match SafeTensors::open(path) {
        Err(error) if error.is_damage() => return Ok((Vec::new(), 0)),
        file => file?,
    };
    let differs = |name: &str, bytes: &[u8]| recorded.get(name) != Some(&Hash::of_bytes(bytes));
    let tensors = file.tensors().filter(|tensor| differs(tensor.name, tensor.bytes));
    Ok((tensors.map(|tensor| crate::name::quoted(tensor.name)).collect(), file.tensors().len()))
}

/// Compares a data file with those of the run, and names the first line that differs from the one
/// that is most like it.
pub fn check_data(report: &mut Report, receipt: &Receipt, path: &Path) -> Result<(), FileError> {
    report.files += 1;
    // By the number of lines that share a digest.
    let mut read: BTreeMap<u64, DataFile> = BTreeMap::new();
    let mut nearest: Option<(LineRange, &DataFile)> = None;
    for recorded in &receipt.made.data {
        let each = recorded.lines_per_digest;
        if let Entry::Vacant(entry) = read.entry(each) {
            entry.insert(recorded.now(path)?);
        }
        let found = &read[&each];
        match recorded.first_difference(found) {
            None if recorded.is_same_file(found) => return Ok(()),
            None => {
                report.add_finding(path, "the receipt has its hash, but another size, or other lines");
                return Ok(());
            }
            Some(lines) if nearest.is_none_or(|(before, _)| lines.first > before.first) => {
                nearest = Some((lines, recorded));
            }
            Some(_) => (),
        }
    }
    let Some((lines, recorded)) = nearest else {
        report.add_finding(path, "the receipt names no data");
        return Ok(());
    };
    let found = &read[&recorded.lines_per_digest];
    let counts = if recorded.line_count == found.line_count {
        String::new()
    } else {
        format!("; it has {}, the run's has {}", counted(found.line_count, "line"), recorded.line_count)
    };
    report.add_finding(path, format!("{lines} is not what the run was trained on{counts}"));
    Ok(())
}
