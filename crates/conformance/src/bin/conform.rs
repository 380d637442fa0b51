//! Compares every CPU path of this machine with the reference on every case and says so: the suite without a toolchain.
#![expect(clippy::print_stdout, reason = "a report")]

use isobit_conformance::{CpuPaths, cases};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut paths = CpuPaths::new();
    cases::visit_all(&mut paths);
    for path in CpuPaths::skipped() {
        println!("skipped: no {path} on this machine");
    }
    for difference in &paths.differences {
        println!("{difference}");
    }
    println!("{} comparisons, {} differences", paths.compared, paths.differences.len());
    if paths.differences.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
