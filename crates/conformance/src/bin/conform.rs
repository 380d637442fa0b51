//! The suite without a toolchain: every CPU path and every device of this machine against the reference, on every case.
//!
//! `conform [OP ...] [--on NAME] [--portable]` compares on bits, each case twice, CPU paths with 1, 2 and 7 threads: of some ops only, or on
//! backends whose name holds `NAME` only, or devices without their own matrix units. `conform --table` prints a digest per op and backend.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a report, and how far it is")]

use isobit_conformance::table::Table;
use isobit_conformance::{Case, EveryBackend, Visitor, cases, skipped};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (mut ops, mut on, mut as_table, mut portable) = (Vec::new(), String::new(), false, false);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--table" => as_table = true,
            "--portable" => portable = true,
            "--on" => on = arguments.next().unwrap_or_default(),
            _ => ops.push(argument),
        }
    }
    for skip in skipped() {
        println!("{skip}");
    }
    let same = if as_table { table() } else { compare(ops, &on, portable) };
    if same { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The cases of some ops, or of all; says which one it is at.
struct Some {
    backends: EveryBackend,
    ops: Vec<String>,
    wanted: bool,
}

impl Visitor for Some {
    fn op(&mut self, name: &'static str) {
        self.wanted = self.ops.is_empty() || self.ops.iter().any(|op| op == name);
        if self.wanted {
            eprintln!("{name}");
        }
    }

    fn case<C: Case>(&mut self, case: &C) {
        if self.wanted {
            self.backends.case(case);
        }
    }
}

fn compare(ops: Vec<String>, on: &str, portable: bool) -> bool {
    let backends = if portable { EveryBackend::portable(on) } else { EveryBackend::on(on) };
    let mut some = Some { backends, ops, wanted: false };
    cases::visit_all(&mut some);
    cases::visit_further(&mut some);
    for difference in &some.backends.differences {
        println!("{difference}");
    }
    println!("{} comparisons, {} differences", some.backends.compared, some.backends.differences.len());
    some.backends.compared > 0 && some.backends.differences.is_empty()
}

fn table() -> bool {
    let mut table = Table::new();
    cases::visit_all(&mut table);
    print!("{table}");
    println!("ops that differ from the reference: {:?}", table.differing());
    table.differing().is_empty()
}
