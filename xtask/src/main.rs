//! Chores of the repository. `cargo xtask help` lists them; each has a file.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line chore prints")]
#![expect(clippy::float_arithmetic, reason = "the study measures arithmetic")]

mod amd_assembly;
mod amd_audit;
mod amd_rates;
mod amd_run;
mod arguments;
mod check;
#[cfg(unix)]
mod crash;
mod cuda_audit;
mod demo_model;
mod dependencies;
mod digests;
mod docs;
mod drift;
mod gptq_model;
mod hip_compile;
mod laws;
mod laws_here;
mod memcheck;
mod plan_table;
mod prose;
mod repository;
mod scratch_model;
mod study;
mod study4;
mod study_data;
mod study_product;
mod sweep;
mod sweep_device;
mod tidy;
#[cfg(unix)]
mod torture;

use arguments::Arguments;
use std::process::ExitCode;

const HELP: &str = "\
cargo xtask check [--fast]
    what the build server runs: format, tidy, lint, licences, amd-audit, cuda-audit, test; --fast leaves out the tests
cargo xtask tidy
    hygiene of the repository
cargo xtask docs
    writes the generated pages: docs/cli.md, config.md, models.md, ops.md, the table of devices.md and a line of
    doctor.md
cargo xtask same-bits REVISION
    does the reference give the same bits as at another revision?
cargo xtask bless --reason \"WHY THE BITS ARE NEW\"
    rewrites the golden digests of the reference
cargo xtask sweep [--function NAME] [--path NAME] [--threads N] [--scalar-stride N] [--error-stride N]
    elementary functions over all 2^32 arguments: equal bits on every path, error within the bound;
    --scalar-stride 8 --error-stride 4 leave most of the slow work out
cargo xtask sweep --device opencl:0,cuda:0 [--function NAME] [--threads N]
    the same arguments on devices, against the fastest path of the CPU
cargo xtask laws [--isobit PROGRAM]
    the laws of whole runs on the release binary, as a table: law, cases, differing bits
cargo xtask memcheck [OP ...]
    small conformance cases under valgrind's memcheck, on the scalar and the AVX2 path, 1 and 2 threads (needs valgrind)
cargo xtask amd-audit [--require] [--kernels] [--threads N]
    every GPU program compiled for AMD's devices, its assembly searched for what would change the bits; --require fails if
    there is no compiler for it, --kernels prints the registers and memory of each
cargo xtask cuda-audit [--require] [--kernels] [--every-build]
    every CUDA program compiled as the host compiles it, and every launch of the conformance cases checked against the
    machine code: kernel, parameters, shared memory; needs no card; --require fails if there is no NVRTC, --kernels
    prints the registers and memory of each, --every-build compiles attention for every pair of head widths
cargo xtask hip-compile [--require]
    every GPU program compiled by hipRTC in a child process, without a card, and an architecture that does not exist;
    --require fails where there is no hipRTC
cargo xtask amd-rates [--require]
    the share of an AMD chip's int8 peak that the product kernels can reach, from clang's instructions and published rates
cargo xtask amd-run [--seeds N] [--work N] [--threads N] [--require]
    every conformance case that is small enough, as machine code of gfx906 and gfx908 in an emulator: both dialects, plain
    and with seeds 1 to 5, and code objects of clang and hipRTC (wants clang 19, llvm, lld; hipRTC 5)
cargo xtask demo-model [--isobit PROGRAM]
    trains the model that `isobit demo` carries, from random weights; about two minutes
cargo xtask scratch-model FOLDER
    random weights of 20 million parameters, this repository's text and a config to train them with
cargo xtask gptq-model FOLDER
    a base of four bits with the widths of Qwen3.5-35B-A3B, 4 of its layers (2 GB), and a config to train it with
cargo xtask torture [kills|faults|files|fuzz|mistakes] [--count N] [--seed S] [--jobs N] [--seconds N] [--case N] [--keep FOLDER]
    the release binary under kills and signals, failing system calls (needs strace), hostile files, fuzzed inputs and the
    mistakes of users: about 20 minutes for all; --case repeats one, fuzz needs --target NAME with it; after --seconds
    nothing new begins; --isobit PROGRAM is another binary
cargo xtask crash [--seed S] [--states N] [--walks N]
    power cuts at every moment of a small run on a simulated disk, which loses and tears what was not synced; every change
    to the disk fails once; and planted mistakes are found
cargo xtask crash --kills N [--seed S] [--jobs N] [--case N] [--keep FOLDER]
    N times SIGKILL for the release binary, at random moments, until the folder equals that of an undisturbed run
cargo xtask drift [--every N] [--model FIXTURE]
    flips one bit of one result of every op of an update, in every pass, and says what notices: the recomputation check,
    an audit, replay; fails if a flip that changes a result is not found; --every N tries every N-th call
cargo xtask plan-table [--device cpu|cuda:N] [--isobit PROGRAM] [--folder FOLDER] [--only N | --ranks]
    the memory that `isobit plan` predicts for the runs of docs/memory.md beside what they take, as a Markdown table; fails if a prediction
    is below, or more than 3 % above (32 MB more below a gigabyte); models with random numbers are made in FOLDER;
    with a program built with MPI also runs of several ranks (--ranks: these alone), at most 15 % above
cargo xtask study [--every-shape] [--threads N]
    accuracy of the slice product against float64, as Markdown tables
cargo xtask study --four-bit [--threads N]
    the same for products with 4-bit weights
";

/// Chat templates run in the fuzzer as in the program: their memory is limited.
#[global_allocator]
static ALLOCATOR: isobit_training::allocator::Limited = isobit_training::allocator::Limited;

fn main() -> ExitCode {
    if let Some(code) = isobit_kernels::gpu::start(|name| std::env::var_os(name)) {
        return code;
    }
    let mut arguments = Arguments::new(std::env::args().skip(1));
    run(&mut arguments).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

fn run(arguments: &mut Arguments) -> Result<ExitCode, String> {
    let command = arguments.word("a command").unwrap_or_else(|_| "help".to_string());
    match command.as_str() {
        "check" => return check::run(arguments),
        "tidy" => tidy::run(arguments)?,
        "docs" => docs::run(arguments)?,
        "same-bits" => digests::same_bits(arguments)?,
        "bless" => digests::bless(arguments)?,
        "laws" => laws::run(arguments)?,
        "memcheck" => memcheck::run(arguments)?,
        "amd-audit" => amd_audit::run(arguments)?,
        "cuda-audit" => cuda_audit::run(arguments)?,
        "hip-compile" => hip_compile::run(arguments)?,
        "amd-rates" => amd_rates::run(arguments)?,
        "amd-run" => amd_run::run(arguments)?,
        "scratch-model" => scratch_model::run(arguments)?,
        "gptq-model" => gptq_model::run(arguments)?,
        "plan-table" => plan_table::run(arguments)?,
        "sweep" => sweep::run(arguments)?,
        "study" => study::run(arguments)?,
        #[cfg(unix)]
        "torture" => torture::run(arguments)?,
        #[cfg(unix)]
        "crash" => crash::run(arguments)?,
        "drift" => drift::run(arguments)?,
        "demo-model" => demo_model::run(arguments)?,
        "help" => print!("{HELP}"),
        other => return Err(format!("unknown command `{other}`\n\n{HELP}")),
    }
    Ok(ExitCode::SUCCESS)
}
