//! Whether a run fits: the worst case of its config against the memory of the device. `plan` prints
//! it, `train` refuses a run that does not fit, `init` looks for the fastest settings that do.

use crate::Failure;
use crate::advice;
use crate::backend::{Chosen, open_cpu};
use crate::failure::failed;
use crate::memory_limits;
use crate::overhead;
use crate::units::size;
use isobit_autograd::{Offload, Policy};
use isobit_doctor::NamedCard;
use isobit_kernels::gpu::{self, Api, Selector};
use isobit_kernels::plan::MemoryLayout;
use isobit_kernels::{Gpu, Path};
use isobit_models::build::Settings;
use isobit_models::{Config, ConfigShapes, Shapes, WeightSource, Weights};
use isobit_proof::FileError;
use isobit_proof::safetensors::TensorFiles;
use isobit_training::config::{Adapter, Device, Run};
use isobit_training::free_memory::free_memory_beside;
use isobit_training::plan::{
    MemoryPlan, PeakOfUpdate, PlannedUpdate, TOKENS_MAX, least_bytes, longest_rows, offloaded_memory,
};
use isobit_training::prepare::{RunError, check_positions, loads_in_4bit, model_config, step_settings, trained};
use isobit_training::step::StepSettings;
use isobit_training::targets;

/// Assumed memory of a machine that does not report it: more than any such machine has.
const UNKNOWN_MAX: u64 = 1 << 42;
/// Compute capability of Hopper, whose tensor core kernels need more memory than other devices.
const HOPPER: (u32, u32) = (9, 0);

/// The memory a run needs, and the memory its device has.
pub(crate) struct MemoryFit {
    /// None if the run is too large to count: `needed` is then a lower bound.
    pub(crate) plan: Option<MemoryPlan>,
    pub(crate) device: String,
    /// Bytes that the device must hold, with those beside the plan unless only buffers are limited.
    pub(crate) needed: u64,
    /// Bytes beside the plan: of the process on the host, of the driver on a card.
    pub(crate) overhead: u64,
    /// Whether the run is in the memory of the host.
    pub(crate) on_host: bool,
    /// None if the system does not report it.
    pub(crate) available: Option<Available>,
    /// Host memory beside a card, if anything is offloaded.
    pub(crate) host: Option<HostFit>,
    /// Whether the device is of a kind that plans were never compared with.
    pub(crate) is_estimate: bool,
}

/// What a command line says of devices, in place of what they say of themselves.
#[derive(Clone, Debug, Default)]
pub(crate) struct Given {
    /// What `--memory` says: one for all devices, or one for each.
    pub(crate) memories: Vec<u64>,
    /// Whether the run is to start here, so that a card must also have what it needs.
    pub(crate) starts_here: bool,
    /// Cards by name, at their places in the list of devices.
    pub(crate) cards: Vec<Option<&'static NamedCard>>,
}

impl Given {
    pub(crate) fn memory(bytes: Option<u64>) -> Self {
        Self { memories: bytes.into_iter().collect(), ..Self::default() }
    }

    /// For a run that is about to start.
    pub(crate) fn of_run(memories: &[u64]) -> Self {
        Self { memories: memories.to_vec(), starts_here: true, cards: Vec::new() }
    }

    /// The memory of the device at a place of the list. That of a card is for buffers alone.
    fn available(&self, devices: &[Chosen], at: usize) -> Option<Available> {
        let of_buffers = matches!(devices[at], Chosen::Gpu(_));
        let bytes = memory_limits::of_entry(&self.memories, devices, at);
        bytes.map(|bytes| Available { bytes, of: memory_limits::NAME.to_string(), of_buffers })
    }

    fn card(&self, at: usize) -> Option<&'static NamedCard> {
        self.cards.get(at).copied().flatten()
    }
}

/// The ranks of a run, as a plan sees them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ranks {
    /// On this machine; they share its memory.
    pub(crate) here: usize,
    pub(crate) all: usize,
}

impl Ranks {
    pub(crate) const ALONE: Self = Self { here: 1, all: 1 };
}

pub(crate) struct HostFit {
    pub(crate) needed: u64,
    /// None if the system does not report it.
    pub(crate) available: Option<Available>,
}

impl HostFit {
    /// Of a card that offloads, or of a rank on one. The host of a card elsewhere is unknown.
    fn of(plan: &MemoryPlan, offload: Offload, ranks: Ranks, is_here: bool) -> Option<Self> {
        if offload.is_none() && ranks.all < 2 {
            return None;
        }
        let offloaded = if offload.is_none() { 0 } else { plan.bytes_beside_device() };
        let available = if is_here { free(ranks.here) } else { None };
        Some(Self { needed: (offloaded + plan.bytes_ranks) as u64, available })
    }

    pub(crate) fn lacks(&self) -> bool {
        self.available.as_ref().is_some_and(|available| self.needed > available.bytes)
    }
}

#[derive(Clone)]
pub(crate) struct Available {
    pub(crate) bytes: u64,
    /// The source of the figure.
    pub(crate) of: String,
    /// Whether it limits buffers, and not all that a device has.
    pub(crate) of_buffers: bool,
}

/// The free memory of this machine, for each of its ranks.
pub(crate) fn free(ranks_here: usize) -> Option<Available> {
    free_beside(0, ranks_here)
}

/// The same for a process that maps so many bytes without using as much memory.
pub(crate) fn free_beside(mapped: u64, ranks_here: usize) -> Option<Available> {
    free_memory_beside(mapped).map(|free| {
        let mut available = Available { bytes: free.bytes, of: free.of.to_string(), of_buffers: false };
        available.share(ranks_here);
        available
    })
}

impl Available {
    /// What is left for each of the ranks of this machine.
    fn share(&mut self, ranks_here: usize) {
        if ranks_here > 1 {
            self.bytes /= ranks_here as u64;
            self.of = format!("{}, shared by {ranks_here} ranks", self.of);
        }
    }
}

impl MemoryFit {
    pub(crate) fn fits(&self) -> Option<bool> {
        if self.plan.is_none() || self.host.as_ref().is_some_and(HostFit::lacks) {
            return Some(false);
        }
        self.available.as_ref().map(|available| self.needed <= available.bytes)
    }

    /// The failure of a run that does not fit.
    pub(crate) fn refusal(&self, run: &Run, given: &Given, ranks: Ranks) -> Option<Failure> {
        if self.fits() != Some(false) {
            return None;
        }
        let fits = |run: &Run| memory_fit(run, given, ranks).is_ok_and(|fit| fit.fits() == Some(true));
        if let Some(HostFit { needed, available: Some(available) }) = self.host.as_ref().filter(|host| host.lacks()) {
            let (needed, there, of) = (size(*needed), size(available.bytes), &available.of);
            let what = if ranks.all > 1 { "what this rank keeps on the host" } else { "what this run offloads" };
            let message = format!("{what} needs {needed} of host memory, {there} is available ({of})");
            return Some(Failure { code: 4, message, hint: Some(hint(run, fits)) });
        }
        let least = if self.plan.is_none() { "at least " } else { "" };
        let there = self.available.as_ref().map_or("more than any machine has".to_string(), |available| {
            format!("{} is available ({})", size(available.bytes), available.of)
        });
        let message = format!("this run needs {least}{} on {}, {there}", size(self.needed), self.device);
        Some(Failure { code: 4, message, hint: Some(hint(run, fits)) })
    }
}

/// One thing to try: settings that give the same weights and fit, if there are any.
pub(crate) fn hint(run: &Run, fits: impl Fn(&Run) -> bool) -> String {
    let mut smaller = run.clone();
    let mut sets = String::new();
    if run.training.micro_batch_size > 1 {
        // Both keys: the rows per update stay the same, and with them the weights.
        let rows = run.rows_per_update();
        advice::follow(&mut smaller, 1);
        smaller.training.micro_batch_size = 1;
        smaller.training.gradient_accumulation_steps = rows as u32;
        sets = format!("--set training.micro_batch_size=1 --set training.gradient_accumulation_steps={rows}");
    }
    if !sets.is_empty() && fits(&smaller) {
        return format!("`{sets}` fits and gives the same weights");
    }
    if run.training.recomputation != Policy::Full {
        smaller.training.recomputation = Policy::Full;
        sets = format!("{sets} --set training.gradient_checkpointing=full").trim_start().to_string();
        if fits(&smaller) {
            return format!("`{sets}` fits and gives the same weights");
        }
    }
    let all = Offload { optimizer: true, activations: true, weights: true };
    if run.offload != all && run.devices.iter().any(|device| *device != Device::Cpu) {
        smaller.offload = all;
        if fits(&smaller) {
            let sets = format!("{sets} --set offload=optimizer,activations,weights");
            return format!("`{}` fits and gives the same weights", sets.trim_start());
        }
    }
    if matches!(run.adapter, Adapter::Lora(_)) {
        "even one row at a time does not fit: lower `max_seq_length`, set `load_in_4bit = true`, or take a smaller base model"
            .to_string()
    } else {
        "even one row at a time does not fit: train an adapter (`type = \"lora\"` under [adapter]), or lower `max_seq_length`"
            .to_string()
    }
}

/// Refuses a run that does not fit according to the plan, beside the other ranks of this machine.
/// If no plan can be made, the next step reports why.
pub(crate) fn check(run: &Run, ranks: Ranks, given: &Given) -> Result<(), Failure> {
    let Ok(fit) = memory_fit(run, given, ranks) else { return Ok(()) };
    let Some(refusal) = fit.refusal(run, given, ranks) else { return Ok(()) };
    Err(with_way_out(refusal))
}

/// The refusal of a run that may be started nevertheless.
pub(crate) fn with_way_out(refusal: Failure) -> Failure {
    let hint = refusal.hint.map(|hint| format!("{hint}; `--no-plan` starts it anyway"));
    Failure { hint, ..refusal }
}

/// Plans a run for its device: one of this machine, or any device whose memory or name is given.
pub(crate) fn memory_fit(run: &Run, given: &Given, ranks: Ranks) -> Result<MemoryFit, Failure> {
    memory_limits::check(&given.memories, 1)?;
    let device = planned(&[Chosen::of(run)?], 0, given, ranks)?;
    let model = model_config(&run.base_model).map_err(|error| failed(&error))?;
    let together = evaluated(run).max(run.training.micro_batch_size as usize) as u64;
    let tokens = together * u64::from(run.training.max_seq_length);
    let least = least_bytes(&model, u64::from(run.training.micro_batch_size) * u64::from(run.training.max_seq_length));
    let on_host = matches!(device.kind, PlannedDevice::Cpu { .. });
    let bound = device.available.as_ref().map(|available| available.bytes);
    // Offloaded activations are bounded by the memory of the host.
    let bound = bound.filter(|_| on_host || !run.offload.activations).unwrap_or(UNKNOWN_MAX);
    let Planned { kind, name, mut available, own, is_here, is_estimate } = device;
    if tokens > TOKENS_MAX || least > bound {
        let (plan, host, overhead, needed) = (None, None, 0, least);
        return Ok(MemoryFit { plan, device: name, needed, overhead, on_host, available, host, is_estimate });
    }
    let (plan, host, overhead) = match kind {
        PlannedDevice::Cpu { threads } => {
            let cpu = open_cpu(threads, Path::best())?;
            let plan = plan(run, &model, cpu, Offload::NONE, ranks).map_err(|error| failed(&error))?;
            let overhead = overhead::of_process(run, model.vocabulary, threads, plan.bytes_on_host() as u64);
            if given.memories.is_empty() {
                let needed = (plan.bytes_on_host() + plan.bytes_ranks) as u64 + overhead;
                let mapped = overhead::of_weight_files(run);
                available = free_beside(overhead::of_address_space(run, mapped, threads, needed), ranks.here);
            }
            (plan, None, overhead)
        }
        PlannedDevice::Gpu { selector, architectures } => {
            let absent = architectures.into_iter().map(|known| Gpu::absent(selector, known));
            let plans = absent.map(|gpu| plan(run, &model, gpu, run.offload, ranks));
            let plans: Vec<MemoryPlan> = plans.collect::<Result<_, _>>().map_err(|error| failed(&error))?;
            let largest = plans.into_iter().max_by_key(|plan| plan.bytes_peak);
            let plan = largest.ok_or_else(|| Failure::device("no such device", "`isobit devices` lists them"))?;
            let host = HostFit::of(&plan, run.offload, ranks, is_here);
            let overhead = overhead::of_driver(selector.api, std::iter::once(&plan));
            (plan, host, overhead)
        }
    };
    let counted = if on_host { plan.bytes_on_host() + plan.bytes_ranks } else { plan.bytes_peak };
    let (needed, available) = against(counted as u64, overhead, available, own);
    Ok(MemoryFit { plan: Some(plan), device: name, needed, overhead, on_host, available, host, is_estimate })
}

/// What is needed, and which memory must hold it: `--memory` holds buffers alone, the memory of a
/// device also what is beside them. If both are limits, the one that is exceeded counts.
pub(crate) fn against(
    counted: u64,
    beside: u64,
    available: Option<Available>,
    own: Option<Available>,
) -> (u64, Option<Available>) {
    let all = counted.saturating_add(beside);
    let only_buffers = available.as_ref().is_some_and(|available| available.of_buffers);
    let exceeds = available.as_ref().is_some_and(|available| counted > available.bytes);
    match own.filter(|own| only_buffers && !exceeds && all > own.bytes) {
        Some(own) => (all, Some(own)),
        None => (if only_buffers { counted } else { all }, available),
    }
}

/// What a plan needs to know about a device. No device is opened: that takes longer than the plan.
pub(crate) struct Planned {
    pub(crate) kind: PlannedDevice,
    pub(crate) name: String,
    pub(crate) available: Option<Available>,
    /// The memory of a card in which a limited run is about to start.
    pub(crate) own: Option<Available>,
    /// Whether it is in this machine.
    pub(crate) is_here: bool,
    /// Whether plans were never compared with the memory of such a device.
    pub(crate) is_estimate: bool,
}

pub(crate) enum PlannedDevice {
    Cpu {
        threads: usize,
    },
    /// Plans for the most demanding of these architectures.
    Gpu {
        selector: Selector,
        architectures: Vec<Option<(u32, u32)>>,
    },
}

/// The device at a place of the list.
pub(crate) fn planned(devices: &[Chosen], at: usize, given: &Given, ranks: Ranks) -> Result<Planned, Failure> {
    let said = given.available(devices, at);
    let selector = match devices[at] {
        Chosen::Cpu { threads } => {
            let (name, available) = ("the CPU".to_string(), said.or_else(|| free(ranks.here)));
            let kind = PlannedDevice::Cpu { threads };
            return Ok(Planned { kind, name, available, own: None, is_here: true, is_estimate: false });
        }
        Chosen::Gpu(selector) => selector,
    };
    if let Some(card) = given.card(at) {
        return Ok(named(card, selector, said, (given.cards.len() > 1).then_some(at + 1)));
    }
    let listed = gpu::list(selector.api).map(|all| all.into_iter().nth(selector.index));
    let is_here = matches!(listed, Ok(Some(_)));
    let mut own = None;
    let (name, architectures, available) = match (listed, said) {
        (Ok(Some(listing)), said) => {
            let memory = Available { bytes: listing.memory, of: listing.name, of_buffers: false };
            let memory = Some(memory).filter(|memory| memory.bytes > 0);
            own = memory.clone().filter(|_| given.starts_here && said.is_some());
            (selector.to_string(), vec![listing.architecture], said.or(memory))
        }
        (_, said @ Some(_)) => {
            let architectures = if selector.api == Api::Cuda { vec![None, Some(HOPPER)] } else { vec![None] };
            (format!("{selector}, which is not in this machine"), architectures, said)
        }
        (listed, None) => {
            let why = listed.err().unwrap_or_else(|| "there is no such device".to_string());
            let hint = "name the card (`--device mi50`, once for each rank), or give `--memory SIZE`, to plan for one \
                        that is not here; `isobit devices` lists those that are";
            return Err(Failure::device(format!("{selector}: {why}"), hint));
        }
    };
    // NVIDIA's driver was measured on one card; others differ by what their context takes.
    let is_estimate = selector.api != Api::Cuda;
    Ok(Planned { kind: PlannedDevice::Gpu { selector, architectures }, name, available, own, is_here, is_estimate })
}

/// A card that need not be in this machine.
fn named(card: &NamedCard, selector: Selector, said: Option<Available>, number: Option<usize>) -> Planned {
    // Two cards of a list have a memory each.
    let name = number.map_or(card.name.clone(), |number| format!("{} {number}", card.name));
    let whole = || Available { bytes: card.memory, of: card.title.clone(), of_buffers: false };
    let available = said.unwrap_or_else(whole);
    Planned {
        kind: PlannedDevice::Gpu { selector, architectures: vec![card.compute] },
        name,
        available: Some(available),
        own: None,
        is_here: false,
        is_estimate: !card.measured,
    }
}

/// The worst case of a config: every row of maximum length.
fn plan<L: MemoryLayout>(
    run: &Run,
    model: &Config,
    like: L,
    offload: Offload,
    ranks: Ranks,
) -> Result<MemoryPlan, RunError> {
    check_positions(run, model)?;
    targets::check(model, &trained(run))?;
    let settings = settings(run);
    let step = step_settings(run);
    let peak = PeakOfUpdate::new(run.rows_per_update() as usize, step.gradient_groups, step.micro_batch_size);
    let step = StepSettings { gradient_groups: peak.groups, ..step };
    let row = longest_rows(1, settings.positions);
    let rows = vec![&row[0]; peak.rows];
    let (waiting, evaluated, ranks) = (peak.waiting, evaluated(run), ranks.all);
    let planned = PlannedUpdate { step: &step, rows: &rows, waiting, evaluated, offload, ranks };
    with_shapes(run, model, |source| offloaded_memory(like, model, source, &settings, &planned))
}

/// Rows that a run evaluates at once.
pub(crate) fn evaluated(run: &Run) -> usize {
    if run.has_eval() { run.eval.micro_batch_size as usize } else { 0 }
}

/// How a run builds its model.
pub(crate) fn settings(run: &Run) -> Settings {
    let positions = run.training.max_seq_length as usize;
    Settings { trained: trained(run), profile: run.profile, positions, seed: run.seed }
}

/// Passes on the shapes of the model's weights: from its files, or, if there are none, from its
/// config alone.
pub(crate) fn with_shapes<R>(
    run: &Run,
    model: &Config,
    work: impl FnOnce(&dyn WeightSource) -> Result<R, RunError>,
) -> Result<R, RunError> {
    match weights(run, model)? {
        Some(weights) => work(&Shapes::Of(&weights)),
        None => work(&ConfigShapes::new(model)?.load_in_4bit(loads_in_4bit(run)?)?),
    }
}

/// The weights of the model; none if its folder holds no weight file.
pub(crate) fn weights(run: &Run, model: &Config) -> Result<Option<Weights>, RunError> {
    match TensorFiles::open(&run.base_model) {
        Ok(files) => Ok(Some(Weights::new(files, model)?.load_in_4bit(loads_in_4bit(run)?)?)),
        Err(FileError::Missing { path }) if path.ends_with("model.safetensors") => Ok(None),
        Err(error) => Err(error.into()),
    }
}
