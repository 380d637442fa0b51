//! Chores of the repository. `cargo xtask help` lists them; each has a file.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line chore prints")]
#![expect(clippy::float_arithmetic, reason = "the study measures arithmetic")]

mod arguments;
mod study;
mod study_data;
mod study_product;

use arguments::Arguments;
use std::process::ExitCode;

const HELP: &str = "\
cargo xtask study [--every-shape] [--threads N]
    accuracy of the slice product against float64, as Markdown tables
";

fn main() -> ExitCode {
    let mut arguments = Arguments::new(std::env::args().skip(1));
    let command = arguments.word("a command").unwrap_or_default();
    let result = match command.as_str() {
        "study" => study::run(&mut arguments),
        "help" | "" => {
            println!("{HELP}");
            Ok(())
        }
        other => Err(format!("unknown command `{other}`\n\n{HELP}")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
