//! The program `isobit`; all code is in the library, so that `docs/cli.md` is generated from the
//! same definitions that parse the command line.

use std::process::ExitCode;

/// Chat templates come with models and run here: their memory is limited.
#[global_allocator]
static ALLOCATOR: isobit_training::allocator::Limited = isobit_training::allocator::Limited;

fn main() -> ExitCode {
    isobit::main()
}
