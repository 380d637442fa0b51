//! From the name of a device to an open one: `cpu`, `auto`, `opencl:0`, `cuda:0`.

use crate::Failure;
use isobit_kernels::gpu::Selector;
use isobit_kernels::{Backend, Cpu, Gpu, Path};

const HINT: &str = "`isobit devices` lists what this machine has";

/// A device by name, not yet open.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Chosen {
    Cpu { threads: usize },
    Gpu(Selector),
}

/// Work for whatever device it is.
pub(crate) trait Job {
    type Result;
    fn run<B: Backend>(self, backend: B) -> Self::Result;
}

impl Chosen {
    /// `auto` is the CPU: it is always there. Zero threads are all cores.
    pub(crate) fn parse(name: &str, threads: usize) -> Result<Self, Failure> {
        if name == "cpu" || name == "auto" {
            return Ok(Self::Cpu { threads: if threads == 0 { cores() } else { threads } });
        }
        if name == "hip" || name.starts_with("hip:") {
            let message =
                format!("{name}: there is no HIP runtime in this build yet; AMD cards are reached through OpenCL");
            return Err(Failure::device(message, "name it `opencl:N`; `isobit devices` lists what this machine has"));
        }
        name.parse().map(Self::Gpu).map_err(|message: String| Failure::usage(message, HINT))
    }
}

#[expect(clippy::disallowed_methods, reason = "the program chooses the thread count where the config leaves it open")]
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

pub(crate) fn on_device<J: Job>(chosen: &Chosen, job: J) -> Result<J::Result, Failure> {
    match *chosen {
        Chosen::Cpu { threads } => {
            let cpu = Cpu::new(threads, Path::best());
            Ok(job.run(cpu.map_err(|error| Failure::device(error.to_string(), HINT))?))
        }
        Chosen::Gpu(selector) => {
            let gpu = Gpu::open(selector);
            Ok(job.run(gpu.map_err(|failure| Failure::device(failure.to_string(), HINT))?))
        }
    }
}
