//! The suite without a toolchain: compares every CPU path and every device of this machine with the
//! reference on every case.
//!
//! `conform [OP ...] [--on NAME] [--portable]` compares bits, each case twice, CPU paths with 1, 2
//! and 7 threads. It can be limited to some ops, or to backends whose name contains `NAME`;
//! `--portable` compares devices without using their matrix units. `--path PATH --threads N` runs
//! that path alone and opens no device; `--small` skips cases with much work. `conform --table`
//! prints a digest per op and backend.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a report, and how far it is")]

use isobit_conformance::table::Table;
use isobit_conformance::{Case, EveryBackend, Visitor, cases, skipped};
use isobit_kernels::gpu::hip;
use isobit_kernels::{Counting, Cpu, Path};
use std::process::ExitCode;

/// The parsed arguments.
#[derive(Default)]
struct Request {
    ops: Vec<String>,
    on: String,
    table: bool,
    portable: bool,
    small: bool,
    path: Option<Path>,
    threads: usize,
}

impl Request {
    fn new(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut request = Self { threads: 1, ..Self::default() };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match argument.as_str() {
                "--table" => request.table = true,
                "--portable" => request.portable = true,
                "--small" => request.small = true,
                "--on" => request.on = value()?,
                "--path" => request.path = Some(value()?.parse()?),
                "--threads" => request.threads = value()?.parse().map_err(|error| format!("--threads: {error}"))?,
                option if option.starts_with("--") => return Err(format!("unknown option `{option}`")),
                _ => request.ops.push(argument),
            }
        }
        Ok(request)
    }

    fn backends(&self) -> Result<EveryBackend, String> {
        if let Some(path) = self.path {
            let cpu = Cpu::new(self.threads, path).map_err(|error| error.to_string())?;
            return Ok(EveryBackend::of(vec![cpu], Vec::new()));
        }
        Ok(if self.portable { EveryBackend::portable(&self.on) } else { EveryBackend::on(&self.on) })
    }
}

fn main() -> ExitCode {
    if let Some(code) = hip::start(|name| std::env::var_os(name)) {
        return code;
    }
    let same = Request::new(std::env::args().skip(1)).and_then(|request| {
        if request.path.is_none() {
            for skip in skipped() {
                println!("{skip}");
            }
        }
        if request.table { Ok(table()) } else { compare(request) }
    });
    match same {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// The cases of some ops, or of all; prints the current one.
struct Chosen {
    backends: EveryBackend,
    ops: Vec<String>,
    wanted: bool,
    /// Counts the work of a case if only small ones are wanted.
    small: Option<Counting<Cpu>>,
    left_out: usize,
}

impl Chosen {
    /// BOUND: multiply-adds and outputs of a small case.
    const WORK_MAX: u64 = 100_000;

    fn is_small(&self, case: &impl Case) -> bool {
        let Some(counting) = &self.small else { return true };
        counting.forget();
        case.run(counting);
        let work: u64 = counting.work().values().map(|work| work.multiply_adds + work.outputs).sum();
        work <= Self::WORK_MAX
    }
}

impl Visitor for Chosen {
    fn op(&mut self, name: &'static str) {
        self.wanted = self.ops.is_empty() || self.ops.iter().any(|op| op == name);
        if self.wanted {
            eprintln!("{name}");
        }
    }

    fn case<C: Case>(&mut self, case: &C) {
        if !self.wanted {
            return;
        }
        if self.is_small(case) {
            self.backends.case(case);
        } else {
            self.left_out += 1;
        }
    }
}

fn compare(request: Request) -> Result<bool, String> {
    let backends = request.backends()?;
    let counting = || Cpu::new(1, Path::Scalar).map(Counting::new).map_err(|error| error.to_string());
    let small = if request.small { Some(counting()?) } else { None };
    let mut chosen = Chosen { backends, ops: request.ops, wanted: false, small, left_out: 0 };
    cases::visit_all(&mut chosen);
    cases::visit_further(&mut chosen);
    for difference in &chosen.backends.differences {
        println!("{difference}");
    }
    if chosen.left_out > 0 {
        println!("{} cases that are not small were left out", chosen.left_out);
    }
    println!("{} comparisons, {} differences", chosen.backends.compared, chosen.backends.differences.len());
    Ok(chosen.backends.compared > 0 && chosen.backends.differences.is_empty())
}

fn table() -> bool {
    let mut table = Table::new();
    cases::visit_all(&mut table);
    print!("{table}");
    println!("ops that differ from the reference: {:?}", table.differing());
    table.differing().is_empty()
}
