//! Two receipts, or the chains of two runs: what differed first, and everything about the inputs
//! that could explain it.

use crate::chain::{Chain, Item};
use crate::hash::Hash;
use crate::name::{counted, harmless, quoted};
use crate::receipt::{DIGESTS_OF_INPUTS, DataFile, IDENTITY, Made, Receipt};
use crate::regular;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

/// Inputs listed by name at most, of each kind.
const LISTED_MAX: usize = 20;
/// Characters of a tensor's name.
const NAME_MAX: usize = 4096;

/// The first update in which two chains differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainDifference {
    pub step: u64,
    pub item: Item,
    /// Trained tensors of the item, if it has any.
    pub tensors: Vec<String>,
}

impl fmt::Display for ChainDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, item, tensors } = self;
        write!(f, "the chains diverge at update {step}: {}", item.name())?;
        match &tensors[..] {
            [] => Ok(()),
            [one] => write!(f, " in {}", harmless(one, NAME_MAX)),
            [first, .., last] => {
                write!(f, " in a tensor from {} to {}", harmless(first, NAME_MAX), harmless(last, NAME_MAX))
            }
        }
    }
}

/// None if the chains are equal as far as both go, or one of them is missing or damaged.
pub(super) fn of_runs(a: &Path, b: &Path) -> Option<ChainDifference> {
    let (a, b) = (Chain::read(a).ok()?, Chain::read(b).ok()?);
    let (update, item) =
        a.updates.iter().zip(&b.updates).find_map(|(a, b)| a.first_difference(b).map(|item| (a, item)))?;
    // Parts have names only if both train the same tensors.
    let part = item.part().filter(|_| a.origin.tensors == b.origin.tensors);
    let tensors = part.map_or(Vec::new(), |part| a.tensors_of(part).to_vec());
    Some(ChainDifference { step: update.step, item, tensors })
}

/// Chains and receipts that are there and cannot be read.
pub(super) fn damaged(runs: [&Path; 2]) -> Vec<String> {
    let of_run = |run: &Path| {
        let chain = regular::if_there(Chain::read(run)).err();
        let receipt = regular::if_there(Receipt::read(run)).err();
        chain.into_iter().chain(receipt).map(|error| error.to_string()).collect::<Vec<_>>()
    };
    runs.into_iter().flat_map(of_run).collect()
}

/// What two runs were made from that differs, in words, besides their configs. Nothing if one of
/// them has no receipt.
pub(super) fn inputs_of_runs(a: &Path, b: &Path) -> Vec<String> {
    let (Ok(a), Ok(b)) = (Receipt::read(a), Receipt::read(b)) else { return Vec::new() };
    let mut said = Vec::new();
    arithmetic(&mut said, &a.made, &b.made);
    inputs(&mut said, &a, &b);
    said
}

/// What differs between two receipts, in words, what decides the result first. If their chains lie
/// beside them, it begins with the update in which they part.
pub fn receipts(a: (&Path, &Receipt), b: (&Path, &Receipt)) -> Vec<String> {
    let folder = |path: &Path| path.parent().map(Path::to_path_buf).unwrap_or_default();
    let chains = of_runs(&folder(a.0), &folder(b.0));
    let (a, b) = (a.1, b.1);
    let (x, y) = (&a.made, &b.made);
    let mut said = Vec::new();
    arithmetic(&mut said, x, y);
    values(&mut said, "config", &x.config, &y.config);
    inputs(&mut said, a, b);
    if x.updates != y.updates {
        said.push(format!("updates: {} against {}", x.updates, y.updates));
    }
    if a.segment != b.segment {
        let shown = |of: Option<u64>| of.map_or("none".to_string(), |updates| updates.to_string());
        said.push(format!("updates of a segment: {} against {}", shown(a.segment), shown(b.segment)));
    }
    let hash = |of: &Receipt| -> BTreeMap<String, Hash> {
        of.result.iter().flatten().map(|(name, record)| (name.clone(), record.blake3)).collect()
    };
    hashes(&mut said, "file of the result", &hash(a), &hash(b));
    if x.link != y.link && said.is_empty() {
        said.push("the chains differ although all inputs are the same: replay both".to_string());
    }
    if x.link != y.link || x.updates != y.updates {
        said.splice(0..0, chains.map(|chains| chains.to_string()));
    }
    if a.digest != b.digest && said.is_empty() {
        said.push("their digests differ, by something that has no name here".to_string());
    }
    said
}

/// What the identities have besides the digests of inputs, which are compared one by one.
fn arithmetic(said: &mut Vec<String>, x: &Made, y: &Made) {
    for key in IDENTITY.into_iter().filter(|key| !DIGESTS_OF_INPUTS.contains(key)) {
        let value = |made: &Made| made.identity.get(key).map_or("none".to_string(), |value| harmless(value, 64));
        if value(x) != value(y) {
            said.push(format!("{key}: {} against {}", value(x), value(y)));
        }
    }
}

/// Base, tokenizer, data and program.
fn inputs(said: &mut Vec<String>, a: &Receipt, b: &Receipt) {
    let (x, y) = (&a.made, &b.made);
    hashes(said, "base tensor", &x.base.tensors, &y.base.tensors);
    for (kind, x, y) in [("base file", &x.base.files, &y.base.files), ("tokenizer file", &x.tokenizer, &y.tokenizer)] {
        let hash = |files: &BTreeMap<String, crate::hash::FileRecord>| -> BTreeMap<String, Hash> {
            files.iter().map(|(name, record)| (name.clone(), record.blake3)).collect()
        };
        hashes(said, kind, &hash(x), &hash(y));
    }
    for (at, (x, y)) in x.data.iter().zip(&y.data).enumerate() {
        said.extend(data_files(at + 1, x, y));
    }
    if x.data.len() != y.data.len() {
        said.push(format!("data files: {} against {}", x.data.len(), y.data.len()));
    }
    if a.program != b.program {
        said.push(format!("program: {} against {}", harmless(&a.program, 40), harmless(&b.program, 40)));
    }
}

/// Digests of groups of lines are compared only if both have equally many lines in a group.
fn data_files(number: usize, x: &DataFile, y: &DataFile) -> Option<String> {
    let what = match x.first_difference(y) {
        None if x == y => return None,
        None => "the same hash, but other lines or another use or size".to_string(),
        Some(lines) if x.lines_per_digest == y.lines_per_digest => format!("{lines} is the first that differs"),
        Some(_) => format!("{} against {}", counted(x.line_count, "line"), y.line_count),
    };
    Some(format!("data file {number} ({}): {what}", harmless(&x.used_for, 40)))
}

fn values(said: &mut Vec<String>, kind: &str, a: &BTreeMap<String, String>, b: &BTreeMap<String, String>) {
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let shown = |value: Option<&String>| value.map_or("not set".to_string(), |value| harmless(value, 160));
    for name in names.into_iter().filter(|name| a.get(*name) != b.get(*name)) {
        said.push(format!("{kind} {}: {} against {}", quoted(name), shown(a.get(name)), shown(b.get(name))));
    }
}

fn hashes(said: &mut Vec<String>, kind: &str, a: &BTreeMap<String, Hash>, b: &BTreeMap<String, Hash>) {
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let differing: Vec<&String> = names.into_iter().filter(|name| a.get(*name) != b.get(*name)).collect();
    for name in differing.iter().take(LISTED_MAX) {
        let what = match (a.contains_key(*name), b.contains_key(*name)) {
            (true, true) => "differs",
            (true, false) => "only in A",
            _ => "only in B",
        };
        said.push(format!("{kind} {}: {what}", quoted(name)));
    }
    if differing.len() > LISTED_MAX {
        said.push(format!("{kind}s: {} more", differing.len() - LISTED_MAX));
    }
}
