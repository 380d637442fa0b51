//! Parses device names and opens devices: `cpu`, `auto`, `opencl:0`, `cuda:0`, `hip:0`.

use crate::Failure;
use crate::stderr::tell;
use isobit_autograd::Offload;
use isobit_kernels::cpu::pool::THREADS_MAX;
use isobit_kernels::gpu::{self, Api, MatrixUnits, MemoryLimit, Selector};
use isobit_kernels::{Backend, Cpu, CpuError, Device, Gpu, Path};
use isobit_proof::name::counted;
use isobit_training::config::{self, Run};
use isobit_training::stages::{Open, Stage};
use std::sync::{Arc, OnceLock};

pub(crate) const HINT: &str = "`isobit devices` lists what this machine has";

const ONE_DEVICE: &str = "name one device; a list is for `train`, `plan`, `eval`, `replay`, `prove` and `bench step`";

/// Where `auto` looks for a card, in this order.
const CARDS: [Api; 3] = [Api::Cuda, Api::Hip, Api::OpenCl];

/// A named device, not yet open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chosen {
    Cpu { threads: usize },
    Gpu(Selector),
}

/// How a card is used.
#[derive(Clone, Debug)]
pub(crate) struct Opening {
    /// Most bytes of its memory.
    pub(crate) limit: Option<Arc<MemoryLimit>>,
    /// What is in host memory instead.
    pub(crate) offload: Offload,
    /// Of the host, for what is computed there.
    pub(crate) threads: usize,
    /// Which of its kernels compute.
    pub(crate) units: MatrixUnits,
}

impl Opening {
    /// With everything on the card.
    pub(crate) const PLAIN: Self = Self { limit: None, offload: Offload::NONE, threads: 1, units: MatrixUnits::All };
}

/// Work that runs on any device.
pub(crate) trait Job {
    type Result;
    fn run<B: Backend>(self, backend: B) -> Self::Result;
}

impl Chosen {
    /// The device of a config.
    pub(crate) fn of(run: &Run) -> Result<Self, Failure> {
        let [device] = run.devices[..] else {
            return Err(Failure::usage("the config lists several devices", ONE_DEVICE));
        };
        Self::parse(&device.to_string(), run.threads as usize)
    }

    /// The devices of a config.
    pub(crate) fn all_of(run: &Run) -> Result<Vec<Self>, Failure> {
        let names: Vec<String> = run.devices.iter().map(ToString::to_string).collect();
        Self::parse_list(&names.iter().map(String::as_str).collect::<Vec<_>>(), run.threads as usize)
    }

    /// As a config names it.
    pub(crate) fn in_config(self) -> config::Device {
        match self {
            Self::Cpu { .. } => config::Device::Cpu,
            Self::Gpu(Selector { api, index }) => match api {
                Api::OpenCl => config::Device::OpenCl(index as u32),
                Api::Cuda => config::Device::Cuda(index as u32),
                Api::Hip => config::Device::Hip(index as u32),
            },
        }
    }

    /// `auto` is the first card that works, or the CPU. Zero threads means all cores. More threads
    /// than cores are not started: they would share cores and wait for each other at every op.
    pub(crate) fn parse(name: &str, threads: usize) -> Result<Self, Failure> {
        if threads > THREADS_MAX {
            let message = format!("{threads} threads are requested; the maximum is {THREADS_MAX}");
            return Err(Failure::usage(message, "leave it out, or write 0, for one thread per core"));
        }
        if name.contains(',') {
            return Err(Failure::usage(format!("`{name}` is a list of devices"), ONE_DEVICE));
        }
        if name == "auto"
            && let Some(card) = first_card()
        {
            return Ok(Self::Gpu(card));
        }
        if name == "cpu" || name == "auto" {
            let threads = match (threads, cores()) {
                (0, cores) => cores.unwrap_or(1),
                (threads, Some(cores)) => threads.min(cores),
                (threads, None) => threads,
            };
            return Ok(Self::Cpu { threads: threads.min(THREADS_MAX) });
        }
        let selector: Selector = name.parse().map_err(|message: String| Failure::usage(message, HINT))?;
        if selector.api == Api::Hip {
            gpu::hip::expect_device();
        }
        Ok(Self::Gpu(selector))
    }

    /// One device, or the devices that divide the layers among them: `cuda:0,cpu`. Stages on the
    /// CPU share its threads.
    pub(crate) fn parse_list(names: &[&str], threads: usize) -> Result<Vec<Self>, Failure> {
        check_entries(names)?;
        if names.len() > 1 && names.contains(&"auto") {
            let hint = "name each device of the list; `isobit devices` shows what is here";
            return Err(Failure::usage("auto cannot be listed with other devices", hint));
        }
        let mut all = names.iter().map(|name| Self::parse(name, threads)).collect::<Result<Vec<_>, _>>()?;
        let stages = all.iter().filter(|chosen| matches!(chosen, Self::Cpu { .. })).count();
        let on_cpu = all.iter_mut().filter_map(|chosen| match chosen {
            Self::Cpu { threads } => Some(threads),
            Self::Gpu(_) => None,
        });
        for (at, threads) in on_cpu.enumerate() {
            *threads = (*threads / stages + usize::from(at < *threads % stages)).max(1);
        }
        Ok(all)
    }

    /// The device as a stage opens it: a card on the stage's own thread, since it must stay there.
    pub(crate) fn opener(self, how: Opening) -> Result<Open, Failure> {
        Ok(match self {
            Self::Cpu { threads } => {
                let cpu = open_cpu(threads, Path::best())?;
                Box::new(move |stage: Stage<'_>| {
                    stage.run(cpu);
                    Ok(())
                })
            }
            Self::Gpu(selector) => Box::new(move |stage: Stage<'_>| {
                let gpu = Gpu::open_with(selector, how.units)?;
                if let Some(limit) = &how.limit {
                    gpu.limit_memory(limit);
                }
                stage.with_offload(how.offload, how.threads).run(gpu);
                Ok(())
            }),
        })
    }

    /// The name that a config or `--device` would use.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Cpu { .. } => "cpu".to_string(),
            Self::Gpu(selector) => selector.to_string(),
        }
    }

    /// Refuses a card that is not there, or does not work.
    pub(crate) fn check_there(self) -> Result<(), Failure> {
        match self {
            Self::Cpu { .. } => Ok(()),
            Self::Gpu(selector) => {
                Gpu::open(selector).map(drop).map_err(|failure| Failure::device(failure.to_string(), HINT))
            }
        }
    }

    pub(crate) fn is_cpu(&self) -> bool {
        matches!(self, Self::Cpu { .. })
    }

    /// Threads of the host for what is computed there beside a card.
    pub(crate) fn host_threads(threads: usize) -> Result<usize, Failure> {
        Ok(Self::parse("cpu", threads)?.threads())
    }

    /// Computing threads; with a GPU, the one that waits for it.
    pub(crate) fn threads(&self) -> usize {
        match self {
            Self::Cpu { threads } => *threads,
            Self::Gpu(_) => 1,
        }
    }
}

/// A list in which a device is missing is refused, not shortened.
pub(crate) fn check_entries(names: &[&str]) -> Result<(), Failure> {
    if names.len() > 1 && names.contains(&"") {
        let message = format!("--device {}: an entry of the list is empty", names.join(","));
        return Err(Failure::usage(message, "name each device of the list: cuda:0,cpu"));
    }
    Ok(())
}

/// The first card that works. Looked for once: opening a card takes a while.
fn first_card() -> Option<Selector> {
    static CARD: OnceLock<Option<Selector>> = OnceLock::new();
    *CARD.get_or_init(|| first_working(device_count, opens))
}

/// The first card that works and those after it, which are not opened. Only those of its API:
/// others may list the same cards again.
pub(crate) fn listed_cards() -> Vec<Selector> {
    let after = |Selector { api, index }| (index..device_count(api)).map(move |index| Selector { api, index });
    first_card().into_iter().flat_map(after).collect()
}

/// Opens the card, unless it is known.
pub(crate) fn works(card: Selector) -> bool {
    first_card() == Some(card) || opens(card)
}

fn device_count(api: Api) -> usize {
    gpu::list(api).map_or(0, |listings| listings.len())
}

fn opens(card: Selector) -> bool {
    gpu::is_gpu(card) && Gpu::open(card).is_ok()
}

/// The first card that works, given how many devices each API has.
pub(crate) fn first_working(count: impl Fn(Api) -> usize, works: impl Fn(Selector) -> bool) -> Option<Selector> {
    let all = CARDS.into_iter().flat_map(|api| (0..count(api)).map(move |index| Selector { api, index }));
    all.into_iter().find(|card| works(*card))
}

#[expect(clippy::disallowed_methods, reason = "the program chooses the thread count where the config leaves it open")]
pub(crate) fn cores() -> Option<usize> {
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

/// Opens the device and runs a job on it. Says which device it is, unless `quiet`.
pub(crate) fn on_device<J: Job>(chosen: &Chosen, quiet: bool, job: J) -> Result<J::Result, Failure> {
    on_limited_device(chosen, MatrixUnits::All, None, quiet, job)
}

/// The same with some of a card's matrix units and at most `limit` bytes of its memory.
pub(crate) fn on_limited_device<J: Job>(
    chosen: &Chosen,
    units: MatrixUnits,
    limit: Option<u64>,
    quiet: bool,
    job: J,
) -> Result<J::Result, Failure> {
    let say = |device: &str| {
        if !quiet {
            tell(&format!("device: {device}"));
        }
    };
    match *chosen {
        Chosen::Cpu { threads } => {
            let cpu = open_cpu(threads, Path::best())?;
            say(&format!("cpu, {}, {}", counted(threads as u64, "thread"), cpu.path()));
            Ok(job.run(cpu))
        }
        Chosen::Gpu(selector) => {
            let gpu = Gpu::open_with(selector, units).map_err(|failure| Failure::device(failure.to_string(), HINT))?;
            say(&gpu.name());
            if let Some(bytes) = limit {
                gpu.limit_memory(&Arc::new(MemoryLimit::new(bytes)));
            }
            Ok(job.run(gpu))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_card_that_works() {
        let card = |text: &str| text.parse::<Selector>().expect("a device");
        let of = |ready: &[&str]| first_working(|_| 2, |found| ready.iter().any(|name| card(name) == found));
        assert_eq!(of(&["opencl:0", "opencl:1", "cuda:1"]), Some(card("cuda:1")));
        assert_eq!(of(&["opencl:1", "hip:1"]), Some(card("hip:1")));
        assert_eq!(of(&["opencl:1"]), Some(card("opencl:1")));
        assert_eq!(of(&[]), None);
        assert_eq!(first_working(|_| 0, |_| true), None);
    }

    #[test]
    fn stages_on_the_cpu_share_its_threads() {
        let shares = |names: &[&str], threads: usize| -> Vec<usize> {
            let all = Chosen::parse_list(names, threads).expect("devices");
            all.iter().map(Chosen::threads).collect()
        };
        let all = cores().unwrap_or(1).min(THREADS_MAX);
        assert_eq!(shares(&["cpu"], 0), [all]);
        assert_eq!(shares(&["cpu", "cpu"], 0), [all.div_ceil(2), (all / 2).max(1)]);
        assert_eq!(shares(&["cpu", "cpu", "cpu"], 1), [1, 1, 1]);
        assert_eq!(shares(&["cuda:0", "cpu"], 1), [1, 1]);
        assert!(Chosen::parse_list(&["auto", "cpu"], 1).is_err() && Chosen::parse("cpu,cpu", 1).is_err());
    }
}
