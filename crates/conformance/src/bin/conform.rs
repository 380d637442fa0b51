//! The suite without a toolchain: compares every CPU path and every device of this machine with the
//! reference on every case.
//!
//! `conform --help` lists the options. Exit codes: 0 same bits, 1 a difference, 2 usage, 6 a device
//! that is not there.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a report, and how far it is")]

use isobit_conformance::emulated::{Emulated, Emulation, SOURCE_WORK_MAX};
use isobit_conformance::table::Table;
use isobit_conformance::{
    Absent, Case, EveryBackend, SMALL_WORK_MAX, Visitor, cases, devices, nearest, skipped, work_of,
};
use isobit_gcn::{Architecture, Dialect, Settings, Toolchain};
use isobit_kernels::gpu::{self, Api};
use isobit_kernels::{Counting, Cpu, Path};
use std::process::ExitCode;

const HELP: &str = "\
Compare every CPU path and every device of this machine with the reference, bit for bit

Usage: conform [OP]... [OPTIONS]

  OP             Ops to compare; default: all
  --on NAME      Only backends whose name contains NAME: cuda:0, opencl, avx2
  --portable     Only devices, and without their matrix units
  --mma-sync     Only devices, and on Hopper with the tensor-core kernels of other NVIDIA devices
  --path PATH    One CPU path (scalar, avx2, avx512, amx), and no device
  --threads N    Its threads [default: 1]
  --small        Skip cases with much work
  --table        Print a digest for each op and backend, as in docs/devices.md; with OP and --on
  --help         Print help

In an emulator of AMD cards, which runs the machine code that clang makes of the kernels:
  --on gfx906    This card, or gfx908, gfx90a, gfx942; each case once
  --seed N       Vary what the hardware leaves unspecified; 0 varies nothing [default: 0]
  --dialect D    hip or opencl [default: hip]
  --toolchain T  clang, clang-object or hiprtc [default: clang]
  --work N       Leave out cases with more multiply-adds and outputs, by name

The CUDA source of the kernels, compiled for the CPU, as a card with tensor cores would run it:
  --on sm80      This card; each case once. With --seed and --work, as above

Exit codes: 0 same bits, 1 a difference, 2 usage, 6 a device that is not there.";

/// Kernels that devices are limited to.
#[derive(Clone, Copy, PartialEq)]
enum Kernels {
    Portable,
    MmaSync,
}

/// The parsed arguments.
#[derive(Default)]
struct Request {
    ops: Vec<String>,
    on: String,
    table: bool,
    kernels: Option<Kernels>,
    small: bool,
    path: Option<Path>,
    threads: Option<usize>,
    seed: u64,
    dialect: Option<Dialect>,
    toolchain: Option<Toolchain>,
    work_max: Option<u64>,
}

/// What went wrong, with the exit code of its kind.
struct Refusal {
    code: u8,
    message: String,
}

impl From<String> for Refusal {
    fn from(message: String) -> Self {
        Self { code: 2, message }
    }
}

impl Request {
    fn new(mut arguments: impl Iterator<Item = String>) -> Result<Self, Refusal> {
        let mut request = Self::default();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match argument.as_str() {
                "--table" => request.table = true,
                "--portable" => request.limit_to(Kernels::Portable)?,
                "--mma-sync" => request.limit_to(Kernels::MmaSync)?,
                "--small" => request.small = true,
                "--on" => request.on = value()?,
                "--path" => request.path = Some(value()?.parse()?),
                "--threads" => {
                    request.threads = Some(value()?.parse().map_err(|error| format!("--threads: {error}"))?);
                }
                "--seed" => request.seed = value()?.parse().map_err(|error| format!("--seed: {error}"))?,
                "--dialect" => request.dialect = Some(dialect(&value()?)?),
                "--toolchain" => request.toolchain = Some(toolchain(&value()?)?),
                "--work" => {
                    let work =
                        value()?.parse::<std::num::NonZero<u64>>().map_err(|error| format!("--work: {error}"))?;
                    request.work_max = Some(work.get());
                }
                option if option.starts_with('-') => {
                    return Err(format!("unknown option `{option}`: `conform --help` lists them").into());
                }
                _ => request.ops.push(known(argument)?),
            }
        }
        request.check()?;
        Ok(request)
    }

    fn limit_to(&mut self, kernels: Kernels) -> Result<(), String> {
        if self.kernels.replace(kernels).is_some_and(|before| before != kernels) {
            return Err("--portable and --mma-sync name different kernels: take one".to_string());
        }
        Ok(())
    }

    /// Options that say nothing together are refused.
    fn check(&self) -> Result<(), String> {
        let reopens = self.kernels.is_some();
        let alone = !self.on.is_empty() || reopens;
        if self.path.is_some() && alone {
            return Err("--path goes without --on, --portable and --mma-sync: it names one CPU path".to_string());
        }
        if self.threads == Some(0) {
            return Err("--threads takes 1 or more".to_string());
        }
        if self.path.is_none() && self.threads.is_some() {
            return Err("--threads needs --path; without it 1, 2 and 7 threads are compared".to_string());
        }
        if self.table && (reopens || self.small || self.path.is_some()) {
            return Err("--table goes with ops and --on only".to_string());
        }
        let emulates = self.architecture().is_some() || self.is_source();
        let settings = self.dialect.is_some() || self.toolchain.is_some() || self.work_max.is_some();
        if !emulates && (self.seed != 0 || settings) {
            let cards = emulated_cards();
            return Err(format!("--seed, --dialect, --toolchain and --work need an emulated card: --on {cards}"));
        }
        if emulates && (self.table || self.kernels == Some(Kernels::MmaSync) || self.small) {
            let name = &self.on;
            return Err(format!("--on {name} goes with --portable, --seed, --dialect, --toolchain and --work only"));
        }
        if self.is_source() && (reopens || self.dialect.is_some() || self.toolchain.is_some()) {
            return Err("--on sm80 goes with --seed and --work only".to_string());
        }
        Ok(())
    }

    /// Whether CUDA source is to be run on the CPU.
    fn is_source(&self) -> bool {
        self.on == "sm80"
    }

    /// The card to emulate, if one is named.
    fn architecture(&self) -> Option<Architecture> {
        self.on.parse().ok()
    }

    fn backends(&self) -> Result<EveryBackend, Refusal> {
        if let Some(path) = self.path {
            let cpu = Cpu::new(self.threads.unwrap_or(1), path);
            let cpu = cpu.map_err(|error| Refusal { code: 6, message: error.to_string() })?;
            return Ok(EveryBackend::of(vec![cpu], Vec::new()));
        }
        let backends = match self.kernels {
            Some(Kernels::Portable) => EveryBackend::portable(&self.on),
            Some(Kernels::MmaSync) => EveryBackend::mma_sync(&self.on),
            None => EveryBackend::on(&self.on),
        };
        if backends.is_empty() {
            return Err(Refusal { code: 6, message: absent(&self.on) });
        }
        Ok(backends)
    }
}

/// An op of the suite, or which one was meant.
fn known(name: String) -> Result<String, String> {
    struct Names(Vec<&'static str>);
    impl Visitor for Names {
        fn op(&mut self, name: &'static str) {
            self.0.push(name);
        }
        fn case<C: Case>(&mut self, _: &C) {}
    }
    let mut ops = Names(Vec::new());
    cases::visit_all(&mut ops);
    if ops.0.contains(&name.as_str()) {
        return Ok(name);
    }
    let hint = nearest(&name, &ops.0)
        .map_or_else(|| format!("the ops are {}", ops.0.join(", ")), |op| format!("did you mean `{op}`?"));
    Err(format!("unknown op `{name}`: {hint}"))
}

/// Why no backend has such a name: the reason of the device, or the names there are.
fn absent(name: &str) -> String {
    let all = devices();
    let reasons = all.iter().filter_map(|(device, opened)| match opened {
        Err(Absent::Missing(why) | Absent::Broken(why)) if name.starts_with(device.as_str()) => Some(why),
        _ => None,
    });
    if let Some(why) = reasons.into_iter().next() {
        return format!("{name}: {why}");
    }
    let paths = Path::available().into_iter().map(|path| format!("cpu/{path}"));
    let present = all.iter().filter(|(_, opened)| opened.is_ok()).map(|(device, _)| device.clone());
    format!(
        "no backend here has `{name}` in its name: there are {}; emulated cards are {}",
        paths.chain(present).collect::<Vec<_>>().join(", "),
        emulated_cards()
    )
}

fn emulated_cards() -> String {
    let amd: Vec<_> = Architecture::ALL.into_iter().map(Architecture::name).collect();
    format!("{} or sm80", amd.join(", "))
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
    if let Some(code) = gpu::start(|name| std::env::var_os(name)) {
        return code;
    }
    if std::env::args().any(|argument| ["--help", "-h"].contains(&argument.as_str())) {
        println!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let same = Request::new(std::env::args().skip(1)).and_then(|request| {
        if let Some(architecture) = request.architecture() {
            return emulate_amd(architecture, request);
        }
        if request.is_source() {
            return run_source(request);
        }
        if request.path.is_none() {
            if request.on.starts_with(Api::Hip.name()) {
                gpu::hip::expect_device();
            }
            for skip in skipped() {
                // A table is saved as it is printed.
                if request.table { eprintln!("{skip}") } else { println!("{skip}") }
            }
        }
        if request.table { table(&request) } else { compare(request) }
    });
    match same {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(Refusal { code, message }) => {
            eprintln!("error: {message}");
            ExitCode::from(code)
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
    fn is_small(&self, case: &impl Case) -> bool {
        let Some(counting) = &self.small else { return true };
        work_of(counting, case) <= SMALL_WORK_MAX
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

fn compare(request: Request) -> Result<bool, Refusal> {
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

/// Every wanted case on an emulated card; prints what differs and what was left out.
fn emulate<S: Emulation>(settings: S, request: Request, work_max: u64) -> Result<Emulated<S>, Refusal> {
    let work_max = request.work_max.unwrap_or(work_max);
    let backends = Emulated::new(settings, work_max).map_err(|absent| match absent {
        Absent::Missing(message) | Absent::Broken(message) => Refusal { code: 6, message },
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
    Ok(emulated)
}

/// What became of the cases, as text, and whether all are the same.
fn outcome<S: Emulation>(emulated: &Emulated<S>) -> (String, bool) {
    let (compared, differences) = (emulated.compared, emulated.differences.len());
    let text = format!("{compared} cases, {differences} differences, {} left out", emulated.left_out.len());
    (text, compared > 0 && differences == 0)
}

fn emulate_amd(architecture: Architecture, request: Request) -> Result<bool, Refusal> {
    let dialect = request.dialect.unwrap_or(Dialect::Hip);
    let toolchain = request.toolchain.unwrap_or(Toolchain::Assembly);
    let seed = request.seed;
    let portable = request.kernels == Some(Kernels::Portable);
    let settings = Settings { dialect, toolchain, seed, portable, ..Settings::new(architecture) };
    let emulated = emulate(settings, request, SMALL_WORK_MAX)?;
    let (text, same) = outcome(&emulated);
    let instructions = emulated.work() / 1000;
    let name = toolchain.name();
    println!("{architecture} {dialect} by {name}, seed {seed}: {text}, {instructions} thousand wave instructions");
    Ok(same)
}

/// Every wanted case in CUDA source on the CPU.
fn run_source(request: Request) -> Result<bool, Refusal> {
    let seed = request.seed;
    let emulated = emulate(isobit_simt::Settings { seed, ..Default::default() }, request, SOURCE_WORK_MAX)?;
    let (text, same) = outcome(&emulated);
    println!("sm_80 source on the CPU, seed {seed}: {text}, {} thousand thread switches", emulated.work() / 1000);
    Ok(same)
}

/// The rows of the table: some ops, or all.
struct Rows {
    table: Table,
    ops: Vec<String>,
    wanted: bool,
}

impl Visitor for Rows {
    fn op(&mut self, name: &'static str) {
        self.wanted = self.ops.is_empty() || self.ops.iter().any(|op| op == name);
        if self.wanted {
            self.table.op(name);
        }
    }

    fn case<C: Case>(&mut self, case: &C) {
        if self.wanted {
            self.table.case(case);
        }
    }
}

fn table(request: &Request) -> Result<bool, Refusal> {
    let table = Table::on(&request.on);
    if table.is_empty() {
        return Err(Refusal { code: 6, message: absent(&request.on) });
    }
    let mut rows = Rows { table, ops: request.ops.clone(), wanted: false };
    cases::visit_all(&mut rows);
    print!("{}", rows.table);
    println!("ops that differ from the reference: {:?}", rows.table.differing());
    Ok(rows.table.differing().is_empty())
}
