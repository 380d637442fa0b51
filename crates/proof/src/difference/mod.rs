//! What differs between two files or folders: tensors by name, element by element, and the JSON
//! files next to them.
//!
//! `side` determines what a path holds, `tensor` matches tensors and splits the work, `number`
//! compares elements, `document` JSON, and `run` the metrics of two runs. A path may come from any
//! tool that writes safetensors.

mod document;
mod number;
mod receipt;
mod run;
mod side;
mod tensor;

pub use document::{DocumentDifference, Documents, KeyDifference};
pub use number::{Tally, decimal};
pub use receipt::{ChainDifference, receipts};
pub use run::{MetricDifference, RunDifference};
pub use tensor::{Shown, TensorDifference, TensorMismatch, Values, compare as compare_tensors};

use crate::error::FileError;
use side::DiffSide;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What differs between two paths.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Difference {
    /// What each side holds.
    pub kinds: [&'static str; 2],
    /// Tensors present on either side.
    pub tensor_count: u64,
    /// Differing tensors by set (`adapter_model`, `model`), each sorted by name.
    pub sets: BTreeMap<String, Vec<TensorDifference>>,
    /// Differing JSON files.
    pub documents: Documents,
    /// Files on one side only: tensors or JSON.
    pub only_in_first: Vec<String>,
    pub only_in_second: Vec<String>,
    /// Files of a checkpoint that were left out, because the other side has weights alone.
    pub left_out: [Vec<String>; 2],
    /// If both are runs: how their metrics differ.
    pub run: Option<RunDifference>,
}

impl Difference {
    /// Whether both sides hold the same numbers and the same JSON.
    pub fn is_none(&self) -> bool {
        self.documents.is_empty()
            && self.run.as_ref().is_none_or(RunDifference::is_none)
            && self.only_in_first.is_empty()
            && self.only_in_second.is_empty()
            && self.tensors().all(|tensor| !tensor.kind.is_difference())
    }

    pub fn tensors(&self) -> impl Iterator<Item = &TensorDifference> {
        self.sets.values().flatten()
    }

    /// Tensors whose elements were compared: both sides have them, with one shape and formats that
    /// have numbers in common.
    pub fn compared_count(&self) -> u64 {
        let compared = |kind: &TensorMismatch| matches!(kind, TensorMismatch::Values(_));
        self.tensor_count - self.tensors().filter(|tensor| !compared(&tensor.kind)).count() as u64
    }

    /// All tallies combined; the position of the first element is meaningless here.
    pub fn total(&self) -> Tally {
        let tallies = self.tensors().filter_map(|tensor| match &tensor.kind {
            TensorMismatch::Values(values) => Some(values.tally),
            _ => None,
        });
        Tally { first: None, ..tallies.fold(Tally::default(), Tally::join) }
    }
}

/// Compares two paths: files, adapters, checkpoints, models, runs. The result does not depend on
/// `threads`.
pub fn compare(a: &Path, b: &Path, threads: usize) -> Result<Difference, FileError> {
    if run::is_run(a) && run::is_run(b) {
        let (run, folders) = run::compare(a, b)?;
        let difference = match folders {
            Some([a, b]) => compare_held(&a, &b, threads)?,
            None => Difference::default(),
        };
        return Ok(Difference { run: Some(run), ..difference });
    }
    compare_held(a, b, threads)
}

/// Compares the contents of files and folders.
fn compare_held(a: &Path, b: &Path, threads: usize) -> Result<Difference, FileError> {
    let (mut a, mut b) = (DiffSide::open(a)?, DiffSide::open(b)?);
    a.narrow_to(&b);
    b.narrow_to(&a);
    let left_out = [a.without_state(&b), b.without_state(&a)];
    let mut difference = Difference { kinds: [a.kind(), b.kind()], left_out, ..Difference::default() };
    compare_sets(&mut difference, &a, &b, threads)?;
    compare_documents(&mut difference, a, b);
    difference.only_in_first.sort();
    difference.only_in_second.sort();
    Ok(difference)
}

fn compare_sets(difference: &mut Difference, a: &DiffSide, b: &DiffSide, threads: usize) -> Result<(), FileError> {
    // A single set on each side is compared whatever its name.
    if let (1, 1, Some((name, first)), Some(second)) =
        (a.sets.len(), b.sets.len(), a.sets.first_key_value(), b.sets.values().next())
    {
        return add_set(difference, name, [first, second], threads);
    }
    let names: BTreeSet<&String> = a.sets.keys().chain(b.sets.keys()).collect();
    for name in names {
        match (a.sets.get(name), b.sets.get(name)) {
            (Some(first), Some(second)) => add_set(difference, name, [first, second], threads)?,
            (Some(_), None) => difference.only_in_first.push(format!("{name}.safetensors")),
            (None, _) => difference.only_in_second.push(format!("{name}.safetensors")),
        }
    }
    Ok(())
}

fn add_set(
    difference: &mut Difference,
    name: &str,
    [a, b]: [&crate::safetensors::TensorFiles; 2],
    threads: usize,
) -> Result<(), FileError> {
    let tensors = compare_tensors(a, b, threads)?;
    let extra = tensors.iter().filter(|tensor| tensor.kind == TensorMismatch::OnlyInSecond).count();
    difference.tensor_count += (a.names().len() + extra) as u64;
    difference.sets.insert(name.to_string(), tensors);
    Ok(())
}

fn compare_documents(difference: &mut Difference, a: DiffSide, mut b: DiffSide) {
    for (name, first) in a.documents {
        let Some(second) = b.documents.remove(&name) else {
            difference.only_in_first.push(name);
            continue;
        };
        let found = document::compare(&name, first, second);
        if found.count > 0 {
            difference.documents.insert(name, found);
        }
    }
    difference.only_in_second.extend(b.documents.into_keys());
}
