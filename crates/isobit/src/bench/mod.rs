//! `isobit bench`: throughput of kernels on this machine.

mod cases;
mod kernels;

use crate::Failure;
use clap::Subcommand;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Rates of single ops, by path and shape
    Kernels(kernels::Arguments),
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.what {
        What::Kernels(arguments) => kernels::run(arguments),
    }
}
