//! Stored weights and optimizer state against the digests that the chain has of them.
//!
//! A file holds most tensors as they are in memory, and their digests are computed from it as it
//! is. The receipt names those it holds in another layout; only a replay compares these.

use super::Report;
use crate::chain::{Chain, Item, combined, part, tensors_per_part};
use crate::error::FileError;
use crate::layout::{ADAPTER, MODEL, OPTIMIZER, checkpoint_name};
use crate::name::quoted;
use crate::safetensors::{Dtype, SafeTensors, Tensor, TensorFiles};
use isobit_numerics::cast::{f32_to_bf16, f32_to_f16};
use isobit_numerics::digest::Digest;
use std::collections::BTreeSet;
use std::path::Path;

/// Name prefixes of the two moments of a weight.
const MOMENTS: [&str; 2] = ["moment1.", "moment2."];

/// A chain, and the tensors that files hold in another layout.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    pub(super) chain: &'a Chain,
    pub(super) reordered: &'a [String],
}

impl Stored<'_> {
    /// Weights and state of a checkpoint, and that it holds nothing else.
    pub(super) fn check_checkpoint(&self, report: &mut Report, folder: &Path, step: u64) -> Result<(), FileError> {
        let Some(update) = step.checked_sub(1).and_then(|at| self.chain.updates.get(at as usize)) else {
            return Ok(());
        };
        let adapter = folder.join(ADAPTER);
        let path = if adapter.is_file() { adapter } else { folder.join(MODEL) };
        if let Some(file) = report.damage_as_finding(&path, SafeTensors::open(&path))? {
            let digests = self.digests(|name| digest(file.get(name).ok()?));
            self.compare(report, &path, (Item::Weights(None), step), &digests, (update.weights, &update.parts.weights));
            self.check_names(report, &path, file.names(), &[""]);
        }
        let path = folder.join(OPTIMIZER);
        if let Some(file) = report.damage_as_finding(&path, SafeTensors::open(&path))? {
            let moment = |start: &str, name: &str| digest(file.get(&format!("{start}{name}")).ok()?);
            let digests = self.digests(|name| Some(combined(&[moment(MOMENTS[0], name)?, moment(MOMENTS[1], name)?])));
            self.compare(report, &path, (Item::State(None), step), &digests, (update.state, &update.parts.state));
            self.check_names(report, &path, file.names(), &MOMENTS);
        }
        Ok(())
    }

    /// Weights of the final folder: those of this update, and of its checkpoint, rounded, if they
    /// are rounded.
    pub(super) fn check_final(&self, report: &mut Report, folder: &Path, step: u64) -> Result<(), FileError> {
        let Some(last) = report.damage_as_finding(folder, open(folder))? else { return Ok(()) };
        let checkpoint = folder.with_file_name(checkpoint_name(step));
        let saved = if checkpoint.is_dir() { report.damage_as_finding(&checkpoint, open(&checkpoint))? } else { None };
        for name in saved.iter().flat_map(TensorFiles::names) {
            // A folder may leave out what another tensor holds, like a tied head.
            let Some((saved, last)) = saved.as_ref().and_then(|saved| saved.get(name).ok()).zip(last.get(name).ok())
            else {
                continue;
            };
            if rounded(&saved, last.dtype)?.is_some_and(|bytes| bytes != last.bytes) {
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
        if last.path().ends_with(ADAPTER) {
            self.check_names(report, last.path(), last.names(), &[""]);
        }
        let is_rounded = |name: &String| last.get(name).is_ok_and(|tensor| tensor.dtype != Dtype::F32);
        if saved.is_none() && self.chain.origin.tensors.iter().any(is_rounded) {
            let gone = checkpoint_name(step);
            report.notes.push(format!("final weights are rounded and {gone} is gone: only a replay compares them"));
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

    /// That a file holds the trained tensors and nothing else, where it holds them as in memory.
    fn check_names<'a>(&self, report: &mut Report, path: &Path, found: impl Iterator<Item = &'a str>, starts: &[&str]) {
        if !self.reordered.is_empty() {
            return;
        }
        let tensors = &self.chain.origin.tensors;
        let expected: BTreeSet<String> =
            starts.iter().flat_map(|start| tensors.iter().map(move |name| format!("{start}{name}"))).collect();
        let found: BTreeSet<String> = found.map(str::to_string).collect();
        if let Some(name) = expected.symmetric_difference(&found).next() {
            let what = if found.contains(name) { "which the run did not train" } else { "but it is missing" };
            report.add_finding(path, format!("{}, {what}", quoted(name)));
        }
    }
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
        Dtype::Bf16 => halves(f32_to_bf16),
        Dtype::F16 => halves(f32_to_f16),
        _ => Ok(None),
    }
}

fn open(folder: &Path) -> Result<TensorFiles, FileError> {
    let stem = if folder.join(ADAPTER).is_file() { "adapter_model" } else { "model" };
    TensorFiles::open_stem(folder, stem)
}
