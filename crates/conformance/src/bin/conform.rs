//! The suite without a toolchain: every CPU path and every device of this machine against the reference, on every case.
//!
//! `conform` compares on bits, each case twice, CPU paths with 1, 2 and 7 threads. `conform --table` prints a digest per op and
//! backend, side by side.
#![expect(clippy::print_stdout, reason = "a report")]

use isobit_conformance::table::Table;
use isobit_conformance::{EveryBackend, cases, skipped};
use std::process::ExitCode;

fn main() -> ExitCode {
    for skip in skipped() {
        println!("{skip}");
    }
    let same = if std::env::args().any(|argument| argument == "--table") { table() } else { compare() };
    if same { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn compare() -> bool {
    let mut backends = EveryBackend::new();
    cases::visit_all(&mut backends);
    for difference in &backends.differences {
        println!("{difference}");
    }
    println!("{} comparisons, {} differences", backends.compared, backends.differences.len());
    backends.differences.is_empty()
}

fn table() -> bool {
    let mut table = Table::new();
    cases::visit_all(&mut table);
    print!("{table}");
    println!("ops that differ from the reference: {:?}", table.differing());
    table.differing().is_empty()
}
