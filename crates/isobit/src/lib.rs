//! The program: parses the command line, dispatches to one file per command, and turns errors into
//! messages and exit codes.
#![expect(clippy::float_arithmetic, reason = "rates are printed")]

mod adapter;
mod advice;
mod audit;
mod audit_fit;
mod auto;
mod backend;
mod bench;
mod chat;
mod data;
mod demo;
mod descent;
mod devices;
mod diff;
mod disk;
mod doctor;
mod ending;
mod eval;
mod exit_codes;
mod export;
mod failure;
mod fits;
mod generate;
mod init;
mod input;
mod memory_limits;
mod model;
mod models;
mod output_path;
mod overhead;
mod plan;
mod plan_output;
mod progress;
mod prove;
mod prove_output;
mod ranks;
mod replay;
mod report;
mod samples;
mod shell;
mod split;
mod stack;
mod stderr;
mod train;
mod units;
mod verify;
mod watcher;

use crate::failure::Failure;

pub use exit_codes::EXIT_CODES;

use clap::{CommandFactory, Parser, Subcommand};
use isobit_kernels::float_state;
use isobit_kernels::gpu;
use isobit_training::{allocator, signal};
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

/// Fine-tune language models to the same weights, bit for bit, on every machine.
#[derive(Debug, Parser)]
#[command(name = "isobit", version, disable_help_subcommand = true, after_help = exit_codes::sentence())]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// The command line definition: every command and flag, with its help.
pub fn command() -> clap::Command {
    Arguments::command()
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train, kill, resume and compare a small embedded model, in seconds
    Demo(demo::Arguments),
    /// Write a commented config for a model folder and a data file
    Init(init::Arguments),
    /// Fine-tune a model with a config, or resume a run
    Train(train::Arguments),
    /// Show the memory a config needs, by item, before anything is loaded
    Plan(plan::Arguments),
    /// Measure loss, perplexity and accuracy on data files
    Eval(eval::Arguments),
    /// Generate text from prompts
    Generate(generate::Arguments),
    /// Chat with a model
    Chat(chat::Arguments),
    /// Inspect data as training would see it
    Data(data::Arguments),
    /// List model families and what each supports
    Models(models::Arguments),
    /// List the devices of this machine
    Devices(devices::Arguments),
    /// Examine this machine: devices, drivers, combinations that are known not to work
    Doctor(doctor::Arguments),
    /// Check a run or its final folder against its receipt, in seconds
    Verify(verify::Arguments),
    /// Execute updates of a run again and compare every bit
    Replay(replay::Arguments),
    /// Replay a run, or segments of it, and write a statement that others can check
    Prove(prove::Arguments),
    /// Compare two adapters, checkpoints, models or runs, bit for bit
    Diff(diff::Arguments),
    /// Write a model for other programs: merged with its adapter, or as GGUF
    Export(export::Arguments),
    /// Write a run, or several and their first difference, as one HTML page
    Report(report::Arguments),
    /// Measure the throughput of kernels and training steps
    Bench(bench::Arguments),
    /// Print shell completions
    Completions(shell::CompletionArguments),
    /// Print the manual page, or write one for every command
    Man(shell::ManArguments),
}

/// Whether the process started with another float state than the IEEE-754 defaults.
static FLOAT_STATE_CHANGED: AtomicBool = AtomicBool::new(false);

fn float_state_changed() -> bool {
    FLOAT_STATE_CHANGED.load(Ordering::Relaxed)
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    stack::with_enough(started)
}

fn started() -> ExitCode {
    // A preloaded library may have changed the rounding mode of this process.
    FLOAT_STATE_CHANGED.store(float_state::restore(), Ordering::Relaxed);
    allocator::return_freed_blocks();
    signal::ignore_file_size_limit();
    if let Some(code) = gpu::start(|name| std::env::var_os(name)) {
        return code;
    }
    gpu::exit_guard::arm();
    let code = ended();
    gpu::exit_guard::disarm();
    code
}

/// Runs the command, and says how it ended.
fn ended() -> ExitCode {
    let arguments = match Arguments::try_parse_from(with_help_as_flag(std::env::args_os().collect())) {
        Ok(arguments) => arguments,
        Err(refusal) => return refused(&refusal),
    };
    match Failure::catch(|| run(arguments.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.say();
            ExitCode::from(failure.code)
        }
    }
}

/// `help train` asks for `train --help`.
fn with_help_as_flag(mut words: Vec<OsString>) -> Vec<OsString> {
    if words.get(1).is_some_and(|word| word == "help") {
        words.remove(1);
        words.push("--help".into());
    }
    words
}

/// Handles a command line that is not run: help and version are results, everything else is a usage
/// error.
fn refused(refusal: &clap::Error) -> ExitCode {
    let printed = refusal.print().and_then(|()| std::io::stdout().flush());
    if refusal.use_stderr() {
        if json_is_wanted(std::env::args_os()) {
            // The first paragraph is the error; the usage follows.
            let text = refusal.render().to_string();
            let message = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
            Failure { code: 2, message: message.to_string(), hint: None }.tell_event();
        }
        return ExitCode::from(2);
    }
    printed.map_or_else(|error| ExitCode::from(Failure::output(&error).code), |()| ExitCode::SUCCESS)
}

/// Whether the command line requests JSON: read from the raw words, since a usage error leaves
/// nothing else.
fn json_is_wanted(words: impl Iterator<Item = OsString>) -> bool {
    words.take_while(|word| word != "--").any(|word| word == "--json")
}

fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Init(arguments) => init::run(&arguments),
        Command::Train(arguments) => train::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Eval(arguments) => eval::run(&arguments),
        Command::Generate(arguments) => generate::run(&arguments),
        Command::Chat(arguments) => chat::run(&arguments),
        Command::Data(arguments) => data::run(&arguments),
        Command::Models(arguments) => models::run(&arguments),
        Command::Devices(arguments) => devices::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Prove(arguments) => prove::run(&arguments),
        Command::Diff(arguments) => diff::run(&arguments),
        Command::Export(arguments) => export::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Completions(arguments) => shell::completions(&arguments, crate::command()),
        Command::Man(arguments) => shell::man(&arguments, crate::command()),
    }
}
