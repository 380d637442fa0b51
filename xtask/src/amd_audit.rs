//! `cargo xtask amd-audit`: compiles every GPU program for AMD's devices and checks the assembly
//! for anything that would change the bits. It needs clang, not a device.

use crate::amd_assembly::{Kernel, kernels};
use crate::arguments::Arguments;
use crate::repository::{command, now, root};
use isobit_gcn::{COMPILERS, Dialect, compiler};
use isobit_kernels::gpu::HEADER_NAMES;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const DEVICES: [&str; 4] = ["gfx906", "gfx908", "gfx90a", "gfx942"];
/// Slices of the profiles x2 and x3.
pub(crate) const SLICES: [u32; 2] = [2, 3];
/// The header that depends on them.
const SLICES_HEADER: &str = "slices.h";
const FOLDER: &str = "crates/kernels/gpu";
/// Programs and the file that the host puts before them, besides the headers of all.
const SHARED: [(&str, &str); 3] =
    [("attention_mfma", "attention_mfma.cl"), ("head_loss", "head_gradient.h"), ("product4_mfma", "product_mfma.cl")];

pub(crate) const NO_COMPILER: &str = "no clang that compiles for amdgcn";

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let require = arguments.flag("--require");
    let every_kernel = arguments.flag("--kernels");
    let threads = arguments.number("--threads", 2)?;
    arguments.finish()?;
    match (compiler(), require) {
        (Some(compiler), _) => audit(compiler, threads, every_kernel),
        (None, true) => Err(format!("{NO_COMPILER}; tried {}", COMPILERS.join(", "))),
        (None, false) => {
            println!("0 audited, 1 skipped: {NO_COMPILER}; tried {}", COMPILERS.join(", "));
            Ok(())
        }
    }
}

/// The header that comes first in a dialect.
fn header(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::OpenCl => "opencl.h",
        Dialect::Hip => "cuda.h",
    }
}

/// One program for one device.
struct Job<'a> {
    program: &'a str,
    source: &'a Path,
    device: &'static str,
    dialect: Dialect,
    slices: u32,
}

impl fmt::Display for Job<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}.cl, {} slices", self.device, self.dialect, self.program, self.slices)
    }
}

/// A folder that is removed when the audit ends.
struct Temporary(PathBuf);

impl Temporary {
    fn new() -> Result<Self, String> {
        let path = std::env::temp_dir().join(format!("isobit-amd-audit-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Anything left behind is in the temporary folder.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Compiles and checks every program, prints the tables, and fails on any finding.
pub(crate) fn audit(compiler: &str, threads: usize, every_kernel: bool) -> Result<(), String> {
    let start = now();
    let folder = Temporary::new()?;
    let programs = programs()?;
    let mut sources = Vec::new();
    for program in &programs {
        let profiles = if uses_slices(compiler, &folder.0, program)? { &SLICES[..] } else { &SLICES[..1] };
        for dialect in Dialect::ALL {
            let path = folder.0.join(format!("{program}.{dialect}"));
            write(&path, &source(program, dialect, &[])?)?;
            sources.push((program.as_str(), dialect, profiles, path));
        }
    }
    let mut jobs = Vec::new();
    for (program, dialect, profiles, source) in &sources {
        for device in DEVICES.into_iter().filter(|device| runs_on(program, device)) {
            let job = |slices: &u32| Job { program, source, device, dialect: *dialect, slices: *slices };
            jobs.extend(profiles.iter().map(job));
        }
    }
    let results = in_parallel(&jobs, threads, |job| read(compiler, job));

    let mut problems = Vec::new();
    for (job, result) in jobs.iter().zip(&results) {
        match result {
            Err(error) => problems.push(format!("{job}: {error}")),
            Ok(kernels) => problems.extend(kernels.iter().flat_map(|kernel| {
                kernel.findings.iter().map(move |finding| format!("{job}: {}: {finding}", kernel.name))
            })),
        }
    }
    if every_kernel {
        print_kernels(&jobs, &results);
    }
    print_devices(&jobs, &results);
    print_scratch(&jobs, &results);
    println!(
        "{} programs, {} compilations with {compiler}, {:.1} s",
        programs.len(),
        2 * jobs.len(),
        start.elapsed().as_secs_f64()
    );
    for problem in &problems {
        println!("{problem}");
    }
    if problems.is_empty() { Ok(()) } else { Err(format!("{} places that may change the bits", problems.len())) }
}

/// Whether a device has what a program needs: those named `*_mfma` use matrix cores.
pub(crate) fn runs_on(program: &str, device: &str) -> bool {
    !program.ends_with("_mfma") || isobit_kernels::gpu::hip::has_mfma(device)
}

/// Names of all programs.
pub(crate) fn programs() -> Result<Vec<String>, String> {
    let entries = std::fs::read_dir(root().join(FOLDER)).map_err(|error| format!("{FOLDER}: {error}"))?;
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let programs = paths.filter(|path| path.extension().is_some_and(|ending| ending == "cl"));
    let mut names: Vec<String> = programs.filter_map(|path| path.file_stem()?.to_str().map(str::to_string)).collect();
    names.sort();
    if names.is_empty() { Err(format!("{FOLDER}: no programs")) } else { Ok(names) }
}

/// The program as assembled by the runtimes: the dialect, the headers in order, then the file
/// itself.
pub(crate) fn source(program: &str, dialect: Dialect, without: &[&str]) -> Result<String, String> {
    let read = |path: String| std::fs::read_to_string(root().join(&path)).map_err(|error| format!("{path}: {error}"));
    let mut text = read(format!("{FOLDER}/{}", header(dialect)))?;
    for header in HEADER_NAMES.iter().filter(|header| !without.contains(header)) {
        text.push_str(&read(format!("{FOLDER}/{header}"))?);
    }
    let before = SHARED.iter().filter(|(user, _)| *user == program).map(|(_, file)| (*file).to_string());
    let file = if program == "attention_mfma" { "attention" } else { program };
    for file in before.chain([format!("{file}.cl")]) {
        text.push_str(&read(format!("{FOLDER}/{file}"))?);
    }
    Ok(text)
}

/// Whether the profile matters: a program that compiles without the slices header is the same for
/// all profiles.
fn uses_slices(compiler: &str, folder: &Path, program: &str) -> Result<bool, String> {
    let path = folder.join(format!("{program}.without"));
    write(&path, &source(program, Dialect::OpenCl, &[SLICES_HEADER])?)?;
    let path = path.display().to_string();
    let mut line = Dialect::OpenCl.options(DEVICES[0]);
    line.extend(["-fsyntax-only".to_string(), path]);
    let line: Vec<&str> = line.iter().map(String::as_str).collect();
    let output = command(&root(), compiler, &line).output().map_err(|error| format!("{compiler}: {error}"))?;
    Ok(!output.status.success())
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

fn read(compiler: &str, job: &Job) -> Result<Vec<Kernel>, String> {
    let compiled = |marks: Option<&str>| {
        let mut line = job.dialect.options(job.device);
        line.push(format!("-DSLICES={}", job.slices));
        line.extend(marks.map(str::to_string));
        line.extend(["-S".to_string(), "-o".to_string(), "-".to_string(), job.source.display().to_string()]);
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        let output = command(&root(), compiler, &line).output().map_err(|error| format!("{compiler}: {error}"))?;
        if !output.status.success() {
            return Err(format!("it does not compile\n{}", String::from_utf8_lossy(&output.stderr)));
        }
        String::from_utf8(output.stdout).map_err(|error| error.to_string())
    };
    kernels(&compiled(None)?, &compiled(Some("-DAUDIT"))?)
}

/// The results in the order of the jobs.
pub(crate) fn in_parallel<J: Sync, R: Send>(jobs: &[J], threads: usize, work: impl Fn(&J) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                while let Some((index, job)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, jobs.get(at)?)))
                {
                    let answer = work(job);
                    done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((index, answer));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, answer)| answer).collect()
}

type Results = [Result<Vec<Kernel>, String>];

fn print_devices(jobs: &[Job], results: &Results) {
    println!(
        "device  dialect  kernels  dot4  divisions  roots  integer divisions  VGPRs  SGPRs  local bytes  scratch bytes  verdict"
    );
    for device in DEVICES {
        for dialect in Dialect::ALL {
            let here = || jobs.iter().zip(results).filter(|(job, _)| job.device == device && job.dialect == dialect);
            let kernels: Vec<&Kernel> = here().filter_map(|(_, result)| result.as_ref().ok()).flatten().collect();
            let failed = here().filter(|(_, result)| result.is_err()).count();
            let findings: usize = kernels.iter().map(|kernel| kernel.findings.len()).sum::<usize>() + failed;
            let sum = |of: fn(&Kernel) -> usize| kernels.iter().map(|kernel| of(kernel)).sum::<usize>();
            let most = |of: fn(&Kernel) -> u32| kernels.iter().map(|kernel| of(kernel)).max().unwrap_or(0);
            println!(
                "{device:<7} {dialect:<7} {:>8} {:>5} {:>10} {:>6} {:>18} {:>6} {:>6} {:>12} {:>14}  {}",
                kernels.len(),
                sum(|kernel| kernel.dot4),
                sum(|kernel| kernel.divisions),
                sum(|kernel| kernel.roots),
                sum(|kernel| kernel.integer_divisions),
                most(|kernel| kernel.vgprs),
                most(|kernel| kernel.sgprs),
                most(|kernel| kernel.local),
                most(|kernel| kernel.scratch),
                if findings == 0 { "clean".to_string() } else { format!("{findings} FINDINGS") }
            );
        }
    }
}

fn print_kernels(jobs: &[Job], results: &Results) {
    println!(
        "device  dialect  slices  kernel                           VGPRs  SGPRs  local bytes  scratch bytes  dot4  divisions  roots  integer divisions"
    );
    for (job, result) in jobs.iter().zip(results) {
        for kernel in result.as_deref().unwrap_or_default() {
            println!(
                "{:<7} {:<7} {:>7}  {:<32} {:>5} {:>6} {:>12} {:>14} {:>5} {:>10} {:>6} {:>18}",
                job.device,
                job.dialect,
                job.slices,
                kernel.name,
                kernel.vgprs,
                kernel.sgprs,
                kernel.local,
                kernel.scratch,
                kernel.dot4,
                kernel.divisions,
                kernel.roots,
                kernel.integer_divisions
            );
        }
    }
    println!();
}

/// Spilled registers cost time, not bits: reported, not an error.
fn print_scratch(jobs: &[Job], results: &Results) {
    for (job, result) in jobs.iter().zip(results) {
        for kernel in result.as_deref().unwrap_or_default().iter().filter(|kernel| kernel.scratch > 0) {
            println!("{job}: {} has {} bytes of scratch", kernel.name, kernel.scratch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_header_of_the_folder_is_used() {
        for entry in std::fs::read_dir(root().join(FOLDER)).expect("the programs") {
            let name = entry.expect("an entry").file_name().into_string().expect("a plain name");
            let dialect = Dialect::ALL.iter().any(|dialect| header(*dialect) == name);
            let is_header = Path::new(&name).extension().is_some_and(|ending| ending == "h");
            let shared = SHARED.iter().any(|(_, file)| *file == name);
            assert!(!is_header || dialect || shared || HEADER_NAMES.contains(&name.as_str()), "{name}");
        }
    }

    #[test]
    fn answers_keep_the_order_of_the_jobs() {
        let jobs: Vec<usize> = (0..100).collect();
        assert_eq!(in_parallel(&jobs, 3, |job| job * 2), jobs.iter().map(|job| job * 2).collect::<Vec<_>>());
    }
}
