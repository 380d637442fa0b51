//! Parses device names and opens devices: `cpu`, `auto`, `opencl:0`, `cuda:0`, `hip:0`.

use crate::Failure;
use isobit_kernels::cpu::pool::THREADS_MAX;
use isobit_kernels::gpu::Selector;
use isobit_kernels::{Backend, Cpu, CpuError, Gpu, Path};

const HINT: &str = "`isobit devices` lists what this machine has";

/// A named device, not yet open.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Chosen {
    Cpu { threads: usize },
    Gpu(Selector),
}

/// Work that runs on any device.
pub(crate) trait Job {
    type Result;
    fn run<B: Backend>(self, backend: B) -> Self::Result;
}

impl Chosen {
    /// `auto` is the CPU, which always exists. Zero threads means all cores. More threads than
    /// cores are not started: they would share cores and wait for each other at every op.
    pub(crate) fn parse(name: &str, threads: usize) -> Result<Self, Failure> {
        if threads > THREADS_MAX {
            let message = format!("{threads} threads are requested; the maximum is {THREADS_MAX}");
            return Err(Failure::usage(message, "leave it out, or write 0, for one thread per core"));
        }
        if name == "cpu" || name == "auto" {
            let threads = match (threads, cores()) {
                (0, cores) => cores.unwrap_or(1),
                (threads, Some(cores)) => threads.min(cores),
                (threads, None) => threads,
            };
            return Ok(Self::Cpu { threads: threads.min(THREADS_MAX) });
        }
        name.parse().map(Self::Gpu).map_err(|message: String| Failure::usage(message, HINT))
    }

    /// Computing threads; with a GPU, the one that waits for it.
    pub(crate) fn threads(&self) -> usize {
        match self {
            Self::Cpu { threads } => *threads,
            Self::Gpu(_) => 1,
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "the program chooses the thread count where the config leaves it open")]
fn cores() -> Option<usize> {
    std::thread::available_parallelism().ok().map(std::num::NonZero::get)
}

pub(crate) fn open_cpu(threads: usize, path: Path) -> Result<Cpu, Failure> {
    Cpu::new(threads, path).map_err(|error| match error {
        CpuError::PathMissing(_) => {
            let available: Vec<_> = Path::available().iter().map(|path| path.name()).collect();
            Failure::device(error.to_string(), format!("it has: {}", available.join(", ")))
        }
        CpuError::Threads(_) => Failure::usage(error.to_string(), "choose a number of threads in that range"),
        CpuError::TooFewThreads(_) => Failure {
            code: 4,
            message: error.to_string(),
            hint: Some(
                "ask for fewer threads, or raise the limits on memory and processes (`ulimit -v`, `ulimit -u`)"
                    .to_string(),
            ),
        },
    })
}

pub(crate) fn on_device<J: Job>(chosen: &Chosen, job: J) -> Result<J::Result, Failure> {
    match *chosen {
        Chosen::Cpu { threads } => Ok(job.run(open_cpu(threads, Path::best())?)),
        Chosen::Gpu(selector) => {
            let gpu = Gpu::open(selector);
            Ok(job.run(gpu.map_err(|failure| Failure::device(failure.to_string(), HINT))?))
        }
    }
}
