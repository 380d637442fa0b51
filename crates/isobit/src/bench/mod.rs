//! `isobit bench`: throughput of kernels and of a training step on this machine.

mod breakdown;
mod cases;
mod kernels;
mod step;

use crate::Failure;
use clap::Subcommand;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Measure the rates of single ops, by path and shape
    Kernels(kernels::Arguments),
    /// Measure the speed and memory of a training step
    Step(step::Arguments),
}

pub(crate) use breakdown::Stopwatch;
pub(crate) use step::peak_resident_bytes;

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.what {
        What::Kernels(arguments) => kernels::run(arguments),
        What::Step(arguments) => step::run(arguments),
    }
}
