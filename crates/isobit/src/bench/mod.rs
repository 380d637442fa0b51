//! `isobit bench`: throughput of kernels and of a training step on this machine.

mod breakdown;
mod cases;
mod kernels;
mod step;

use crate::Failure;
use crate::backend::Chosen;
use clap::Subcommand;
use isobit_kernels::gpu::MatrixUnits;

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

/// Which kernels of a card are measured.
#[derive(Debug, clap::Args)]
pub(crate) struct UnitsArguments {
    /// Use the tensor-core kernels of other NVIDIA cards on a Hopper card too
    #[arg(long, requires = "device")]
    mma_sync: bool,
    /// Use only the kernels of cards without tensor or matrix cores
    #[arg(long, requires = "device", conflicts_with = "mma_sync")]
    portable: bool,
}

impl UnitsArguments {
    fn units(&self, devices: &[Chosen]) -> Result<MatrixUnits, Failure> {
        let units = match self {
            Self { mma_sync: true, .. } => MatrixUnits::MmaSync,
            Self { portable: true, .. } => MatrixUnits::Portable,
            Self { .. } => MatrixUnits::All,
        };
        if units != MatrixUnits::All && devices.iter().all(|device| matches!(device, Chosen::Cpu { .. })) {
            return Err(Failure::usage("a CPU has no kernels of cards", "name a card: --device cuda:0"));
        }
        Ok(units)
    }
}

pub(crate) use breakdown::Stopwatch;
pub(crate) use step::peak_resident_bytes;

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.what {
        What::Kernels(arguments) => kernels::run(arguments),
        What::Step(arguments) => step::run(arguments),
    }
}
