//! The suite without a toolchain: compares every CPU path and every device of this machine with the
//! reference on every case.
//!
//! `conform [OP ...] [--on NAME] [--portable]` compares bits, each case twice, CPU paths with 1, 2
//! and 7 threads. It can be limited to some ops, or to backends whose name contains `NAME`;
//! `--portable` compares devices without using their matrix units. `--path PATH --threads N` runs
//! that path alone and opens no device; `--small` skips cases with much work. `conform --table`
//! prints a digest per op and backend.
//!
//! `conform --on gfx906` (or `gfx908`) runs the machine code that clang makes of the kernels in an
//! emulator, each case once. `--seed N` moves what hardware leaves open, `--dialect opencl`
//! compiles the other dialect, `--toolchain clang-object` or `hiprtc` runs code objects, and cases
//! with more work than `--work N` are left out, by name.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a report, and how far it is")]

use isobit_conformance::emulated::{Emulated, work_of};
use isobit_conformance::table::Table;
use isobit_conformance::{Absent, Case, EveryBackend, Visitor, cases, skipped};
use isobit_gcn::{Architecture, Dialect, Settings, Toolchain};
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
    seed: u64,
    dialect: Option<Dialect>,
    toolchain: Option<Toolchain>,
    work_max: Option<u64>,
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
                "--seed" => request.seed = value()?.parse().map_err(|error| format!("--seed: {error}"))?,
                "--dialect" => request.dialect = Some(dialect(&value()?)?),
                "--toolchain" => request.toolchain = Some(toolchain(&value()?)?),
                "--work" => {
                    request.work_max = Some(value()?.parse().map_err(|error| format!("--work: {error}"))?);
                }
                option if option.starts_with("--") => return Err(format!("unknown option `{option}`")),
                _ => request.ops.push(argument),
            }
        }
        let emulates = request.architecture().is_some();
        let choices = request.dialect.is_some() || request.toolchain.is_some() || request.work_max.is_some();
        if !emulates && (request.seed != 0 || choices) {
            return Err("--seed, --dialect, --toolchain and --work want `--on gfx906` or `--on gfx908`".to_string());
        }
        if emulates && (request.table || request.portable || request.small || request.path.is_some()) {
            return Err(format!("--on {} goes with --seed, --dialect, --toolchain and --work only", request.on));
        }
        Ok(request)
    }

    /// The card to emulate, if one is named.
    fn architecture(&self) -> Option<Architecture> {
        self.on.parse().ok()
    }

    fn backends(&self) -> Result<EveryBackend, String> {
        if let Some(path) = self.path {
            let cpu = Cpu::new(self.threads, path).map_err(|error| error.to_string())?;
            return Ok(EveryBackend::of(vec![cpu], Vec::new()));
        }
        Ok(if self.portable { EveryBackend::portable(&self.on) } else { EveryBackend::on(&self.on) })
    }
}

fn dialect(name: &str) -> Result<Dialect, String> {
    let found = Dialect::ALL.into_iter().find(|dialect| dialect.name().eq_ignore_ascii_case(name));
    found.ok_or_else(|| format!("unknown dialect `{name}`: hip and opencl exist"))
}

fn toolchain(name: &str) -> Result<Toolchain, String> {
    let found = Toolchain::ALL.into_iter().find(|toolchain| toolchain.name() == name);
    found.ok_or_else(|| format!("unknown toolchain `{name}`: clang, clang-object and hiprtc exist"))
}

fn main() -> ExitCode {
    if let Some(code) = hip::start(|name| std::env::var_os(name)) {
        return code;
    }
    let same = Request::new(std::env::args().skip(1)).and_then(|request| {
        if let Some(architecture) = request.architecture() {
            return emulate(architecture, request);
        }
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
struct Chosen<V> {
    backends: V,
    ops: Vec<String>,
    wanted: bool,
    /// Counts the work of a case if only small ones are wanted.
    small: Option<Counting<Cpu>>,
    left_out: usize,
}

impl<V> Chosen<V> {
    /// BOUND: multiply-adds and outputs of a small case.
    const WORK_MAX: u64 = 100_000;

    fn is_small(&self, case: &impl Case) -> bool {
        let Some(counting) = &self.small else { return true };
        work_of(counting, case) <= Self::WORK_MAX
    }
}

impl<V: Visitor> Visitor for Chosen<V> {
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

/// Every wanted case on an emulated card.
fn emulate(architecture: Architecture, request: Request) -> Result<bool, String> {
    let dialect = request.dialect.unwrap_or(Dialect::Hip);
    let toolchain = request.toolchain.unwrap_or(Toolchain::Assembly);
    let settings = Settings { dialect, toolchain, seed: request.seed, ..Settings::new(architecture) };
    let work_max = request.work_max.unwrap_or(Emulated::WORK_MAX);
    let backends = Emulated::new(settings, work_max).map_err(|absent| match absent {
        Absent::Missing(why) | Absent::Broken(why) => why,
    })?;
    let mut chosen = Chosen { backends, ops: request.ops, wanted: false, small: None, left_out: 0 };
    cases::visit_all(&mut chosen);
    cases::visit_further(&mut chosen);
    let emulated = chosen.backends;
    for difference in &emulated.differences {
        println!("{difference}");
    }
    for name in &emulated.left_out {
        println!("left out, too much work: {name}");
    }
    println!(
        "{architecture} {dialect} by {}, seed {}: {} cases, {} differences, {} left out, {:.1} million wave instructions",
        toolchain.name(),
        request.seed,
        emulated.compared,
        emulated.differences.len(),
        emulated.left_out.len(),
        emulated.work().steps as f64 / 1e6
    );
    Ok(emulated.compared > 0 && emulated.differences.is_empty())
}

fn table() -> bool {
    let mut table = Table::new();
    cases::visit_all(&mut table);
    print!("{table}");
    println!("ops that differ from the reference: {:?}", table.differing());
    table.differing().is_empty()
}
