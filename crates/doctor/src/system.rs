//! The system around the cards: kernel, its command line, ROCm's files, OpenCL's list of drivers.

use crate::tree::Tree;
use std::path::Path;

/// BOUND: folders and files that are looked at.
const ENTRIES_MAX: usize = 64;

pub(crate) fn kernel(tree: &Tree) -> Option<String> {
    tree.line("/proc/sys/kernel/osrelease")
}

/// Words of the kernel's command line that matter to cards. Others may be secrets, and a report may
/// be shown to anybody.
pub(crate) fn command_line(tree: &Tree) -> Vec<String> {
    const NAMES: [&str; 6] = ["iommu", "amd_iommu", "intel_iommu", "pcie_acs", "amdgpu", "pci"];
    let text = tree.text("/proc/cmdline").unwrap_or_default();
    let matters = |word: &&str| word.split(['=', '.']).next().is_some_and(|name| NAMES.contains(&name));
    text.split_whitespace().filter(matters).map(str::to_string).collect()
}

/// ROCm's version: that of `/opt/rocm`, or of the last folder beside it.
pub(crate) fn rocm(tree: &Tree) -> Option<String> {
    let version = |folder: &str| tree.line(format!("/opt/{folder}/.info/version"));
    version("rocm").or_else(|| {
        let names = tree.names("/opt").into_iter().filter(|name| name.starts_with("rocm-")).take(ENTRIES_MAX);
        names.filter_map(|name| version(&name)).last()
    })
}

/// Version of a driver that does not come with the kernel.
pub(crate) fn amdgpu(tree: &Tree) -> Option<String> {
    tree.line("/sys/module/amdgpu/version")
}

/// OpenCL's drivers: the libraries that its loader would open.
pub(crate) fn opencl(tree: &Tree) -> Vec<String> {
    const FOLDER: &str = "/etc/OpenCL/vendors";
    let files = tree
        .names(FOLDER)
        .into_iter()
        .filter(|name| Path::new(name).extension().is_some_and(|kind| kind == "icd"))
        .take(ENTRIES_MAX);
    files.filter_map(|name| tree.line(format!("{FOLDER}/{name}"))).collect()
}
