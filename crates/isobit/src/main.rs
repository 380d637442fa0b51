//! The program: parses the command line, hands over to one file per command, turns errors into messages and exit codes.
#![expect(clippy::print_stderr, reason = "the program is the only place that prints")]
#![expect(clippy::float_arithmetic, reason = "rates are printed")]

mod bench;
mod devices;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Fine-tune language models to the same weights, bit for bit, on every machine.
#[derive(Debug, Parser)]
#[command(name = "isobit", version, disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List what this machine can compute on
    Devices(devices::Arguments),
    /// Measure throughput
    Bench(bench::Arguments),
}

/// What went wrong, with the exit code of its kind.
#[derive(Debug)]
struct Failure {
    code: u8,
    message: String,
    hint: Option<String>,
}

impl Failure {
    fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code: 2, message: message.into(), hint: Some(hint.into()) }
    }

    fn device(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code: 6, message: message.into(), hint: Some(hint.into()) }
    }

    fn output(error: &std::io::Error) -> Self {
        Self { code: 7, message: format!("cannot write the result: {error}"), hint: None }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        Command::Devices(arguments) => devices::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {}", failure.message);
            if let Some(hint) = failure.hint {
                eprintln!("hint: {hint}");
            }
            ExitCode::from(failure.code)
        }
    }
}
