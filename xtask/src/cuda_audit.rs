//! `cargo xtask cuda-audit`: compiles every CUDA program as the host does and checks each launch
//! against the machine code. It needs NVRTC, not a card.
//!
//! There is no list of programs here: the conformance cases run on a card that only compiles
//! (`gpu/cuda/compile_only.rs`), so programs, options, kernel names and arguments are those of the
//! host code. A file that no op compiled, and a kernel that none launched, are findings too.

use crate::arguments::Arguments;
use crate::repository::{now, root};
use isobit_conformance::{Case, Visitor, cases};
use isobit_kernels::gpu::{CompileOnly, CompiledKernel, CompiledProgram};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// The oldest and the newest card with kernels of its own: Ampere and Hopper.
const ARCHITECTURES: [(u32, u32); 2] = [(8, 0), (9, 0)];
/// Attention has a build for every pair of head widths; those of the first cases are the common
/// ones, and a build takes seconds.
const BUILDS_MAX: usize = 6;
const FOLDER: &str = "crates/kernels/gpu";

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let require = arguments.flag("--require");
    let every_kernel = arguments.flag("--kernels");
    let builds_max = if arguments.flag("--every-build") { usize::MAX } else { BUILDS_MAX };
    arguments.finish()?;
    match (compiler(), require) {
        (Ok(()), _) => audit_builds(builds_max, every_kernel),
        (Err(why), true) => Err(why),
        (Err(why), false) => {
            println!("0 programs compiled, 1 step skipped: {why}");
            Ok(())
        }
    }
}

/// Why there is no compiler, if there is none.
pub(crate) fn compiler() -> Result<(), String> {
    CompileOnly::open(ARCHITECTURES[0], 1).map(|_| ())
}

/// Compiles and checks all programs, prints a table, and fails on any finding.
pub(crate) fn audit() -> Result<(), String> {
    audit_builds(BUILDS_MAX, false)
}

fn audit_builds(builds_max: usize, every_kernel: bool) -> Result<(), String> {
    let start = now();
    let compiled: Vec<Result<Compilations, String>> = std::thread::scope(|scope| {
        let threads = ARCHITECTURES.map(|architecture| scope.spawn(move || programs(architecture, builds_max)));
        threads.map(|thread| thread.join().unwrap_or_else(|_| Err("a case panicked".to_string()))).into()
    });
    let (programs, left_out_builds): (Vec<_>, Vec<_>) =
        compiled.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    let programs = programs.concat();
    let findings = [problems(&programs), left_out(&programs, &sources()?)].concat();
    if every_kernel {
        print_kernels(&programs);
    }
    print_programs(&programs);
    let names: BTreeSet<&str> = programs.iter().map(|program| program.name.as_str()).collect();
    println!(
        "{} programs, {} compilations ({} builds left out), {} kernels, {:.1} s",
        names.len(),
        programs.len(),
        left_out_builds.iter().sum::<usize>(),
        programs.iter().map(|program| program.kernels.len()).sum::<usize>(),
        start.elapsed().as_secs_f64()
    );
    for finding in &findings {
        println!("{finding}");
    }
    if findings.is_empty() { Ok(()) } else { Err(format!("{} findings in the CUDA programs", findings.len())) }
}

/// Programs, and the number of builds that were left out.
type Compilations = (Vec<CompiledProgram>, usize);

/// Everything that the cases compile for one architecture.
fn programs(architecture: (u32, u32), builds_max: usize) -> Result<Compilations, String> {
    struct Every<'a>(&'a CompileOnly);
    impl Visitor for Every<'_> {
        fn case<C: Case>(&mut self, case: &C) {
            for device in self.0.devices() {
                case.run(device);
            }
        }
    }
    let card = CompileOnly::open(architecture, builds_max)?;
    let mut every = Every(&card);
    cases::visit_all(&mut every);
    cases::visit_further(&mut every);
    Ok((card.programs(), card.left_out()))
}

/// Stems of all files of device code that are programs, but those for AMD's matrix cores.
fn sources() -> Result<Vec<String>, String> {
    let entries = std::fs::read_dir(root().join(FOLDER)).map_err(|error| format!("{FOLDER}: {error}"))?;
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let is_program = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "cl" || ending == "cu");
    let stems = paths.filter(is_program).filter_map(|path| Some(path.file_stem()?.to_str()?.to_string()));
    let mut stems: Vec<String> = stems.filter(|stem| !stem.ends_with("_mfma")).collect();
    stems.sort();
    Ok(stems)
}

fn problems(programs: &[CompiledProgram]) -> Vec<String> {
    let of = |program: &CompiledProgram| {
        let at = format!("{} {} {}", program.architecture, program.name, program.options.join(" "));
        program.problems.iter().map(move |problem| format!("{at}: {problem}")).collect::<Vec<_>>()
    };
    programs.iter().flat_map(of).collect()
}

/// Files that no op compiled and kernels that no op launched, on any card. A program may hold a
/// file of another one for its functions, so it is enough that one program launches a kernel.
fn left_out(programs: &[CompiledProgram], sources: &[String]) -> Vec<String> {
    let mut launched: BTreeMap<&str, (bool, &str)> = BTreeMap::new();
    for program in programs {
        for kernel in &program.kernels {
            launched.entry(&kernel.name).or_insert((false, &program.name)).0 |= kernel.launched;
        }
    }
    let compiled = |stem: &&String| programs.iter().any(|program| program.name == **stem);
    let files = sources.iter().filter(|stem| !compiled(stem));
    let mut found: Vec<_> = files.map(|stem| format!("{stem}: no conformance case compiles it")).collect();
    let kernels = launched.iter().filter(|(_, (launched, _))| !launched);
    found.extend(kernels.map(|(kernel, (_, program))| format!("{program}: no conformance case launches `{kernel}`")));
    found
}

/// One line per program and architecture: the largest of its kernels and builds.
fn print_programs(programs: &[CompiledProgram]) {
    println!("program                 card    builds  kernels  registers  spilled bytes  shared bytes");
    let mut lines: BTreeMap<(&str, &str), Vec<&CompiledProgram>> = BTreeMap::new();
    for program in programs {
        lines.entry((&program.name, &program.architecture)).or_default().push(program);
    }
    for ((name, architecture), builds) in lines {
        let kernels: BTreeSet<_> = builds.iter().flat_map(|build| &build.kernels).map(|kernel| &kernel.name).collect();
        let most = |of: fn(&CompiledKernel) -> usize| {
            builds.iter().flat_map(|build| build.kernels.iter().map(of)).max().unwrap_or(0)
        };
        println!(
            "{name:<23} {architecture:<7} {:>6}  {:>7}  {:>9}  {:>13}  {:>12}",
            builds.len(),
            kernels.len(),
            most(|kernel| kernel.registers),
            most(|kernel| kernel.spilled),
            most(|kernel| kernel.shared + kernel.dynamic),
        );
    }
}

fn print_kernels(programs: &[CompiledProgram]) {
    println!("card    program and options, kernel: registers, spilled bytes, shared bytes");
    for program in programs {
        let (card, name, options) = (&program.architecture, &program.name, program.options.join(" "));
        for kernel in &program.kernels {
            let CompiledKernel { name: kernel, registers, spilled, shared, dynamic, .. } = kernel;
            println!("{card:<7} {name} {options}, {kernel}: {registers}, {spilled}, {shared} + {dynamic}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_case_reaches_is_a_finding() {
        let kernel = |name: &str, launched| CompiledKernel { name: name.to_string(), launched, ..Default::default() };
        let program = |architecture: &str, kernels| CompiledProgram {
            name: "add".to_string(),
            architecture: architecture.to_string(),
            options: vec!["-DSLICES=2".to_string()],
            kernels,
            problems: vec!["has no kernel `add`, which the host launches".to_string()],
        };
        let programs = [
            program("sm_80", vec![kernel("add_elements", false), kernel("add_more", false)]),
            program("sm_90", vec![kernel("add_elements", true), kernel("add_more", false)]),
        ];
        let sources = ["add", "scale"].map(str::to_string);
        assert_eq!(
            left_out(&programs, &sources),
            ["scale: no conformance case compiles it", "add: no conformance case launches `add_more`"]
        );
        assert_eq!(problems(&programs)[0], "sm_80 add -DSLICES=2: has no kernel `add`, which the host launches");
        assert_eq!(problems(&programs).len(), 2);
    }
}
