//! `docs/ops.md`: op by backend, from the conformance list and the sources.

use super::{NOTICE, Table, code, source};
use crate::repository::root;
use isobit_conformance::{Case, Visitor, cases};
use std::path::{Path, PathBuf};

const KERNELS: &str = "crates/kernels/src";
/// Modules of `cpu/` that multiply int8 blocks, on AMX tiles if the machine has them.
const INT8_BLOCKS: [&str; 3] = ["block", "nest", "int4_block"];
/// Modules of `gpu/` that run NVIDIA's tensor cores.
const TENSOR_CORES: [&str; 2] = ["hopper", "attention_mma"];

const OPENING: &str = "\
# Ops

Every op with its conformance cases, and what computes it. A case runs on every backend of the
machine and is compared with the reference bit for bit: on each CPU path (scalar, AVX2, AVX-512 with
VNNI, AMX) with 1, 2 and 7 threads, and on each OpenCL and CUDA device, every case twice.

*AMX* and *tensor cores* mark ops with a path of their own for these units: int8 tiles on the CPU,
`wgmma` or `mma.sync` on NVIDIA cards, where the card and the shape allow it. Everywhere else the
same op runs the vector or portable code, with the same bits. An op without kernels of its own is
computed by those of the ops it consists of. `docs/devices.md` has the results.
";

pub(super) fn page() -> Result<String, String> {
    let mut table =
        Table::new(&["op", "cases", "reference", "CPU", "AMX", "OpenCL", "CUDA", "tensor cores", "contract"]);
    let ops = listed();
    for (op, cases) in &ops {
        let names = cases.len().to_string();
        let [reference, cpu, host] = ["reference", "cpu", "gpu"].map(|home| module(home, op));
        let parts = made_of(op, host.as_deref(), ops.iter().map(|(op, _)| *op))?;
        let portable = exists(host.as_deref()) && !parts.is_empty();
        let amx = parts.iter().chain([op]).map(|part| uses(module("cpu", part).as_deref(), "cpu", &INT8_BLOCKS));
        let amx = amx.collect::<Result<Vec<_>, _>>()?.contains(&true);
        let contract = format!("[op/{op}.rs](../{KERNELS}/op/{op}.rs)");
        table.row(&[
            code(op),
            names,
            yes(exists(reference.as_deref())),
            yes(exists(cpu.as_deref())),
            yes(amx),
            yes(portable),
            yes(portable),
            yes(uses(host.as_deref(), "gpu", &TENSOR_CORES)?),
            contract,
        ]);
    }
    let all: usize = ops.iter().map(|(_, cases)| cases.len()).sum();
    Ok(format!("{NOTICE}\n{OPENING}\n{}\n{} ops, {all} cases.\n", table.0, ops.len()))
}

fn yes(yes: bool) -> String {
    if yes { "yes" } else { "" }.to_string()
}

/// Ops in the order of the suite, with the names of their cases.
pub(super) fn listed() -> Vec<(&'static str, Vec<String>)> {
    let mut list = List(Vec::new());
    cases::visit_all(&mut list);
    list.0
}

struct List(Vec<(&'static str, Vec<String>)>);

impl Visitor for List {
    fn op(&mut self, name: &'static str) {
        self.0.push((name, Vec::new()));
    }

    fn case<C: Case>(&mut self, case: &C) {
        let (_, cases) = self.0.last_mut().expect("an op was announced");
        cases.push(case.name());
    }
}

/// The file or folder of a stem in a part of `kernels`.
fn module(home: &str, stem: &str) -> Option<PathBuf> {
    let folder = Path::new(KERNELS).join(home);
    let candidates = [folder.join(format!("{stem}.rs")), folder.join(stem)];
    candidates.into_iter().find(|path| root().join(path).exists())
}

fn exists(path: Option<&Path>) -> bool {
    path.is_some()
}

/// The ops whose device code computes this one: itself if it has a file of kernels, else the ops
/// that its module for devices calls.
fn made_of<'a>(op: &'a str, host: Option<&Path>, ops: impl Iterator<Item = &'a str>) -> Result<Vec<&'a str>, String> {
    let has_kernels = |op: &str| root().join("crates/kernels/gpu").join(format!("{op}.cl")).is_file();
    if has_kernels(op) {
        return Ok(vec![op]);
    }
    let mut parts = Vec::new();
    for other in ops.filter(|other| *other != op && has_kernels(other)) {
        if uses(host, "gpu", &[other])? {
            parts.push(other);
        }
    }
    Ok(parts)
}

/// Whether the sources of a module use one of the given neighbouring modules. A missing module is
/// an error: this list must follow it.
fn uses(path: Option<&Path>, home: &str, modules: &[&str]) -> Result<bool, String> {
    for other in modules {
        if module(home, other).is_none() {
            return Err(format!("{KERNELS}/{home} has no `{other}` any more: mend the lists of xtask/src/docs/ops.rs"));
        }
    }
    let Some(path) = path else { return Ok(false) };
    let mut text = String::new();
    for file in files(path)? {
        text.push_str(&source(&file.to_string_lossy())?);
    }
    Ok(modules.iter().any(|other| names(&text, other)))
}

/// Whether code, not comments, contains `super::block` or `block::`.
fn names(text: &str, module: &str) -> bool {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let [from, into] = [format!("super::{module}"), format!("{module}::")];
    code.into_iter().any(|line| {
        [&from, &into].into_iter().any(|word| {
            line.match_indices(word.as_str()).any(|(at, _)| {
                let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
                let before = line[..at].chars().next_back().is_some_and(is_word);
                let after = line[at + word.len()..].chars().next().is_some_and(is_word) && word == &from;
                !before && !after
            })
        })
    })
}

/// A file, or the files of a folder in order.
fn files(path: &Path) -> Result<Vec<PathBuf>, String> {
    let full = root().join(path);
    if full.is_file() {
        return Ok(vec![path.to_path_buf()]);
    }
    let entries = std::fs::read_dir(&full).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(Result::ok)
        .map(|entry| path.join(entry.file_name()))
        .filter(|path| root().join(path).is_file())
        .collect();
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_found_in_code_as_whole_words() {
        assert!(names("use super::block::RightView;\n", "block"));
        assert!(names("    block::run(x);\n", "block"));
        assert!(names("use super::hopper::{self};\n", "hopper"));
        assert!(!names("// block::run\n", "block"));
        assert!(!names("super_block::run(x); use super::blocks;\n", "block"));
    }

    #[test]
    fn an_op_without_kernels_of_its_own_is_made_of_others() {
        let parts =
            |op| made_of(op, module("gpu", op).as_deref(), listed().iter().map(|(op, _)| *op)).expect("sources");
        assert_eq!(parts("linear"), ["product", "low_rank", "bias"]);
        assert_eq!(parts("product"), ["product"]);
    }

    #[test]
    fn every_op_has_cases() {
        let ops = listed();
        assert!(ops.len() > 20);
        assert!(ops.iter().all(|(_, cases)| !cases.is_empty()));
    }
}
