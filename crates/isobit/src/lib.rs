//! The program: parses the command line, hands over to one file per command, turns errors into
//! messages and exit codes.
#![expect(clippy::float_arithmetic, reason = "rates are printed")]

mod adapter;
mod backend;
mod bench;
mod chat;
mod data;
mod demo;
mod devices;
mod diff;
mod ending;
mod eval;
mod exit_codes;
mod failure;
mod fits;
mod generate;
mod init;
mod input;
mod model;
mod models;
mod plan;
mod progress;
mod shell;
mod stderr;
mod train;
mod units;

use crate::failure::Failure;

pub use exit_codes::EXIT_CODES;

use clap::{CommandFactory, Parser, Subcommand};
use isobit_kernels::buffer::OutOfMemory;
use isobit_kernels::float_state;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;

/// Fine-tune language models to the same weights, bit for bit, on every machine.
#[derive(Debug, Parser)]
#[command(name = "isobit", version, disable_help_subcommand = true, after_help = exit_codes::sentence())]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// What the command line takes: every command and flag, with its help.
pub fn command() -> clap::Command {
    Arguments::command()
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The whole story in about a minute: train, kill, resume, compare
    Demo(demo::Arguments),
    /// Write a commented config for a model folder and a data file
    Init(init::Arguments),
    /// Fine-tune a model as a config says, or go on with a run
    Train(train::Arguments),
    /// Memory that a config needs, by item, before anything is loaded
    Plan(plan::Arguments),
    /// Loss, perplexity and accuracy on data files
    Eval(eval::Arguments),
    /// Continue texts
    Generate(generate::Arguments),
    /// Talk with a model
    Chat(chat::Arguments),
    /// Look at data as training would see it
    Data(data::Arguments),
    /// List the families of models and what each supports
    Models(models::Arguments),
    /// List what this machine can compute on
    Devices(devices::Arguments),
    /// Compare two adapters, checkpoints, models or runs, bit for bit
    Diff(diff::Arguments),
    /// Measure throughput
    Bench(bench::Arguments),
    /// Print completions for a shell
    Completions(shell::CompletionArguments),
    /// Print the manual page, or write one for every command
    Man(shell::ManArguments),
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    // A preloaded library may have changed how this process rounds.
    float_state::restore();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(refusal) => return refused(&refusal),
    };
    let result = catch_unwind(AssertUnwindSafe(|| run(arguments.command)));
    let result = result.unwrap_or_else(|thrown| match thrown.downcast_ref::<OutOfMemory>() {
        Some(OutOfMemory { bytes }) => Err(Failure::out_of_memory(*bytes)),
        None => resume_unwind(thrown),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.tell();
            if !failure.message.is_empty() && json_is_wanted(std::env::args_os()) {
                failure.tell_event();
            }
            ExitCode::from(failure.code)
        }
    }
}

/// A command line that is not run: help and version are results, all else is a usage error.
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

/// Whether the command line asks for JSON: read from the words themselves, since a usage error
/// leaves nothing else.
fn json_is_wanted(words: impl Iterator<Item = std::ffi::OsString>) -> bool {
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
        Command::Diff(arguments) => diff::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Completions(arguments) => shell::completions(&arguments, crate::command()),
        Command::Man(arguments) => shell::man(&arguments, crate::command()),
    }
}
