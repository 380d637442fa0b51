//! Stored weights and optimizer state against the digests that the chain has of them.
//!
//! A file holds most tensors as they are in memory, and their digests are computed from it as it
//! is. The receipt names those it holds in another layout; only a replay compares these.

use super::Report;
use crate::chain::{Chain, Item, combined, part, tensors_per_part};
use crate::error::FileError;
use crate::layout::{FINAL, Holds, OPTIMIZER, checkpoint_name};
use crate::name::quoted;
use crate::safetensors::{Dtype, SafeTensors, Tensor, TensorFiles};
use isobit_numerics::cast::{f32_to_bf16, f32_to_f16};
use isobit_numerics::digest::Digest;
use std::collections::BTreeSet;
use std::path::Path;

/// Name prefixes of the two moments of a weight.
const MOMENTS: [&str; 2] = ["moment1.", "moment2."];
/// What trained tensors of a final folder may be rounded to.
const ROUNDED: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// A chain, and the tensors that files hold in another layout.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    pub(super) chain: &'a Chain,
    pub(super) reordered: &'a [String],
    pub(super) holds: Holds,
}

impl Stored<'_> {
    /// Weights and state of a checkpoint, and that it holds nothing else.
    pub(super) fn check_checkpoint(&self, report: &mut Report, folder: &Path, step: u64) -> Result<(), FileError> {
        let Some(update) = step.checked_sub(1).and_then(|at| self.chain.updates.get(at as usize)) else {
            return Ok(());
        };
        let path = folder.join(self.holds.weights());
        let weights = report.damage_as_finding(&path, SafeTensors::open(&path))?;
        if let Some(file) = &weights {
            let digests = self.digests(|name| digest(file.get(name).ok()?));
            self.compare(report, &path, (Item::Weights(None), step), &digests, (update.weights, &update.parts.weights));
            self.check_names(report, &path, file.names(), &[""]);
            check_types(report, &path, file.tensors(), &[Dtype::F32]);
        }
        let path = folder.join(OPTIMIZER);
        if let Some(file) = report.damage_as_finding(&path, SafeTensors::open(&path))? {
            let moment = |start: &str, name: &str| digest(file.get(&format!("{start}{name}")).ok()?);
            let digests = self.digests(|name| Some(combined(&[moment(MOMENTS[0], name)?, moment(MOMENTS[1], name)?])));
            self.compare(report, &path, (Item::State(None), step), &digests, (update.state, &update.parts.state));
            self.check_names(report, &path, file.names(), &MOMENTS);
            check_types(report, &path, file.tensors(), &[Dtype::F32]);
            let shape = |name: &str| Some(weights.as_ref()?.get(name).ok()?.shape);
            let has_other = |tensor: &Tensor<'_>| {
                let of = MOMENTS.iter().find_map(|start| tensor.name.strip_prefix(start));
                of.and_then(shape).is_some_and(|shape| shape != tensor.shape)
            };
            if let Some(tensor) = file.tensors().find(has_other) {
                report.add_finding(&path, format!("{} has another shape than its weight", quoted(tensor.name)));
            }
        }
        Ok(())
    }

    /// Weights of the final folder: those of this update, and of its checkpoint, rounded, if they
    /// are rounded. A finished run keeps that checkpoint.
    pub(super) fn check_final(
        &self,
        report: &mut Report,
        folder: &Path,
        (step, finished): (u64, bool),
    ) -> Result<(), FileError> {
        let Some(last) = report.damage_as_finding(folder, self.holds.open(folder))? else { return Ok(()) };
        let checkpoint = folder.with_file_name(checkpoint_name(step));
        let saved = if checkpoint.is_dir() {
            report.damage_as_finding(&checkpoint, self.holds.open(&checkpoint))?
        } else {
            None
        };
        for name in saved.iter().flat_map(TensorFiles::names) {
            // A tensor that is left out is named below.
            let Some((saved, last)) = saved.as_ref().and_then(|saved| saved.get(name).ok()).zip(last.get(name).ok())
            else {
                continue;
            };
            let differs = rounded(&saved, last.dtype)?.is_some_and(|bytes| bytes != last.bytes);
            if differs || saved.shape != last.shape {
                let what = format!("{} is not that of {}", quoted(name), checkpoint_name(step));
                report.add_finding(folder, what);
                return Ok(());
            }
        }
        let Some(update) = step.checked_sub(1).and_then(|at| self.chain.updates.get(at as usize)) else {
            return Ok(());
        };
        let digests = self.digests(|name| digest(last.get(name).ok()?));
        self.compare(report, folder, (Item::Weights(None), step), &digests, (update.weights, &update.parts.weights));
        let trained = self.chain.origin.tensors.iter().filter(|name| !self.reordered.contains(name));
        if self.holds == Holds::Adapter {
            self.check_names(report, last.path(), last.names(), &[""]);
            check_types(report, last.path(), last.files().iter().flat_map(SafeTensors::tensors), &ROUNDED);
        } else {
            if let Some(name) = trained.clone().find(|name| !last.contains(name)) {
                report.add_finding(last.path(), format!("{}, but it is missing", quoted(name)));
            }
            check_types(report, last.path(), trained.clone().filter_map(|name| last.get(name).ok()), &ROUNDED);
        }
        check_one_type(report, last.path(), trained.filter_map(|name| last.get(name).ok()));
        let is_rounded = |name: &String| last.get(name).is_ok_and(|tensor| tensor.dtype != Dtype::F32);
        if saved.is_none() && self.chain.origin.tensors.iter().any(is_rounded) {
            let gone = checkpoint_name(step);
            if finished {
                let what = format!("its weights are rounded, and {gone}, which they are compared with, is missing");
                report.add_finding(folder, what);
            } else {
                report.notes.push(format!("final weights are rounded and {gone} is gone: only a replay compares them"));
            }
        }
        Ok(())
    }

    /// Digests of the trained tensors, in model order, where a file holds them as they are in
    /// memory.
    fn digests(&self, of: impl Fn(&str) -> Option<Digest>) -> Vec<Option<Digest>> {
        let known = |name: &String| if self.reordered.contains(name) { None } else { of(name) };
        self.chain.origin.tensors.iter().map(known).collect()
    }

    /// All of them by their combined digest; if some are unknown, the others by their parts.
    fn compare(
        &self,
        report: &mut Report,
        path: &Path,
        (item, step): (Item, u64),
        digests: &[Option<Digest>],
        (whole, parts): (Digest, &[u32]),
    ) {
        let all: Option<Vec<Digest>> = digests.iter().copied().collect();
        let differs = |(together, recorded): (&[Option<Digest>], &u32)| {
            let known: Option<Vec<Digest>> = together.iter().copied().collect();
            known.is_some_and(|known| part(&known) != *recorded)
        };
        let found = digests.chunks(tensors_per_part(digests.len())).zip(parts).position(differs);
        if found.is_none() && all.is_none_or(|all| combined(&all) == whole) {
            return;
        }
        let tensors = found.map_or(&[][..], |at| self.chain.tensors_of(at));
        let named = tensors.first().map_or(String::new(), |name| format!(" ({})", quoted(name)));
        report.add_finding(path, format!("{} update {step} in the chain{named}", item.is_not_that_of()));
    }

    /// That a file holds the trained tensors and nothing else. Those in another layout have names
    /// that are not known here.
    fn check_names<'a>(&self, report: &mut Report, path: &Path, found: impl Iterator<Item = &'a str>, starts: &[&str]) {
        let tensors = self.chain.origin.tensors.iter().filter(|name| !self.reordered.contains(name));
        let expected: BTreeSet<String> =
            starts.iter().flat_map(|start| tensors.clone().map(move |name| format!("{start}{name}"))).collect();
        let found: BTreeSet<String> = found.map(str::to_string).collect();
        let is_known = |name: &&String| self.reordered.is_empty() || !name.contains(".experts");
        if let Some(name) = expected.symmetric_difference(&found).find(is_known) {
            let what = if found.contains(name) { "which the run did not train" } else { "but it is missing" };
            report.add_finding(path, format!("{}, {what}", quoted(name)));
        }
    }
}

/// That tensors hold numbers of a type that a run writes.
fn check_types<'a>(report: &mut Report, path: &Path, tensors: impl Iterator<Item = Tensor<'a>>, types: &[Dtype]) {
    for tensor in tensors.filter(|tensor| !types.contains(&tensor.dtype)).take(1) {
        let what = format!("{} holds {}, which a run does not write", quoted(tensor.name), tensor.dtype);
        report.add_finding(path, what);
    }
}

/// That trained tensors are all of one type: `save_dtype` rounds all or none.
fn check_one_type<'a>(report: &mut Report, path: &Path, mut tensors: impl Iterator<Item = Tensor<'a>>) {
    let Some(first) = tensors.next() else { return };
    if let Some(other) = tensors.find(|tensor| tensor.dtype != first.dtype) {
        let [(name, dtype), (first, expected)] = [&other, &first].map(|tensor| (quoted(tensor.name), tensor.dtype));
        report.add_finding(path, format!("{name} holds {dtype}, but {first} {expected}: a run writes one type"));
    }
}

/// Tensors of the final folder of a run that were not trained are those of the base, rounded if
/// they are. Expanded ones are compared by a proof alone.
pub fn check_frozen(report: &mut Report, run: &Path, model: &Path) -> Result<(), FileError> {
    let folder = run.join(FINAL);
    let (Some(chain), Some(receipt)) = (report.chain.clone(), report.receipt.clone()) else { return Ok(()) };
    if !receipt.made.finished || Holds::by_config(&receipt.made.config) == Holds::Adapter {
        return Ok(());
    }
    let Some(last) = report.damage_as_finding(&folder, Holds::Model.open(&folder))? else { return Ok(()) };
    let Some(base) = report.damage_as_finding(model, TensorFiles::open(model))? else { return Ok(()) };
    let trained: BTreeSet<&str> = chain.origin.tensors.iter().map(String::as_str).collect();
    let no_experts = receipt.made.reordered.is_empty();
    let is_frozen = |name: &&str| !trained.contains(name) && (no_experts || !name.contains(".experts"));
    for name in last.names().filter(is_frozen) {
        let (found, Ok(own)) = (last.get(name)?, base.get(name)) else {
            report.add_finding(&folder, format!("{} is not a tensor of the base, and was not trained", quoted(name)));
            continue;
        };
        let is_number = ROUNDED.contains(&own.dtype) || own.dtype == found.dtype;
        let is_same = own.shape == found.shape && rounded(&own, found.dtype)?.is_some_and(|bytes| bytes == found.bytes);
        if is_number && !is_same {
            report.add_finding(&folder, format!("{} is not that of the base, and was not trained", quoted(name)));
        }
    }
    Ok(())
}

/// Of a tensor whose bits are those in memory.
fn digest(tensor: Tensor<'_>) -> Option<Digest> {
    (tensor.dtype == Dtype::F32).then(|| Digest::of_bytes(tensor.bytes))
}

/// The bytes of a tensor in another type, as the final folder stores them; none for types that it
/// does not have.
fn rounded(saved: &Tensor<'_>, dtype: Dtype) -> Result<Option<Vec<u8>>, FileError> {
    let halves = |round: fn(f32) -> u16| -> Result<Option<Vec<u8>>, FileError> {
        Ok(Some(saved.to_f32()?.into_iter().flat_map(|value| round(value).to_le_bytes()).collect()))
    };
    match dtype {
        _ if dtype == saved.dtype => Ok(Some(saved.bytes.to_vec())),
        Dtype::F32 => Ok(Some(saved.to_f32()?.into_iter().flat_map(f32::to_le_bytes).collect())),
        Dtype::Bf16 => halves(f32_to_bf16),
        Dtype::F16 => halves(f32_to_f16),
        _ => Ok(None),
    }
}
