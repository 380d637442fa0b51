//! Whether a run fits: the worst case of its config against the memory of the device. `plan` prints
//! it, `train` refuses a run that does not fit, `init` looks for the fastest settings that do.

use crate::Failure;
use crate::advice::{self, Advice};
use crate::backend::{Chosen, HINT, open_cpu};
use crate::memory_limits;
use crate::overhead;
use crate::units::size;
use isobit_autograd::Offload;
use isobit_doctor::{NamedCard, named_card};
use isobit_kernels::gpu::{self, Api, Listing, Selector};
use isobit_kernels::plan::{Counting, MemoryLayout};
use isobit_kernels::{Gpu, Path};
use isobit_models::build::Settings;
use isobit_models::{Config, ConfigShapes, Shapes, Trained, WeightSource, Weights};
use isobit_proof::FileError;
use isobit_proof::safetensors::TensorFiles;
use isobit_training::config::Run;
use isobit_training::free_memory::free_memory_beside;
use isobit_training::groups::Groups;
use isobit_training::plan::{
    self, Generated, MemoryPlan, PeakOfUpdate, PlannedUpdate, TOKENS_MAX, least_bytes, longest_rows,
};
use isobit_training::prepare::{RunError, check_positions, loads_in_4bit, model_config, step_settings, trained};
use isobit_training::ranks::memory::Place;
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
    /// Whether the run would be on this machine.
    pub(crate) is_here: bool,
    /// None if the system does not report it.
    pub(crate) available: Option<Available>,
    /// Host memory beside a card.
    pub(crate) host: Option<HostFit>,
    /// Whether plans were never compared with the memory of such a device.
    pub(crate) is_estimate: bool,
}

/// What a command line says of devices, in place of what they say of themselves.
#[derive(Clone, Debug, Default)]
pub(crate) struct Given {
    /// What `--memory` says: one for all devices, or one for each.
    pub(crate) memories: Vec<u64>,
    /// Cards by name, at their places in the list of devices.
    pub(crate) cards: Vec<Option<&'static NamedCard>>,
}

impl Given {
    pub(crate) fn memory(bytes: Option<u64>) -> Self {
        Self { memories: bytes.into_iter().collect(), ..Self::default() }
    }

    /// For a run that is about to start.
    pub(crate) fn of_run(memories: &[u64]) -> Self {
        Self { memories: memories.to_vec(), cards: Vec::new() }
    }

    /// The memory of the device at a place of the list. That of a card is for buffers alone.
    fn available(&self, devices: &[Chosen], at: usize) -> Option<Available> {
        let of_buffers = matches!(devices[at], Chosen::Gpu(_));
        let bytes = memory_limits::of_entry(&self.memories, devices, at);
        bytes.map(|bytes| Available { bytes, of: memory_limits::NAME.to_string(), of_buffers })
    }

    pub(crate) fn card(&self, at: usize) -> Option<&'static NamedCard> {
        self.cards.get(at).copied().flatten()
    }
}

/// The ranks of a run, as a plan sees them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ranks<'a> {
    /// On this machine; they share its memory.
    pub(crate) here: usize,
    pub(crate) all: usize,
    /// Those on this machine before this one.
    pub(crate) index: usize,
    /// Those that the plan is for: it is that of the most demanding one. All if none is named.
    pub(crate) planned: &'a [usize],
}

impl Ranks<'_> {
    pub(crate) const ALONE: Self = Self { here: 1, all: 1, index: 0, planned: &[] };

    /// The places among ranks that a plan has to look at: none of a single process.
    pub(crate) fn places(self, run: &Run) -> Vec<Option<Place>> {
        if self.all < 2 {
            return vec![None];
        }
        let groups = Groups::new(run.rows_per_update() as usize, run.training.gradient_groups as usize);
        let is_sharded = !matches!(trained(run), Trained::Lora(_));
        let first = Place { rank: 0, ranks: self.all, groups, is_sharded, node: 0 };
        first.most_demanding(self.planned).into_iter().map(Some).collect()
    }
}

/// The part of an update that shows its peak, on a rank or in a single process.
pub(crate) fn peak_of_update(run: &Run, place: Option<Place>, stages_after: usize) -> PeakOfUpdate {
    let (groups, together) = (run.training.gradient_groups as usize, run.training.micro_batch_size as usize);
    match place {
        Some(place) => PeakOfUpdate::of_rank(place, together, stages_after),
        None => PeakOfUpdate::of_stage(run.rows_per_update() as usize, groups, together, stages_after),
    }
}

/// Host memory that a run on a card needs.
pub(crate) struct HostFit {
    pub(crate) needed: u64,
    /// None if the system does not report it.
    pub(crate) available: Option<Available>,
    /// What it is for.
    what: &'static str,
}

impl HostFit {
    /// The process with its rows, what is offloaded, what a rank keeps, and every checkpoint while
    /// it is written. The host of a card elsewhere is unknown.
    fn of(plan: &MemoryPlan, run: &Run, process: u64, ranks: Ranks<'_>, is_here: bool) -> Self {
        let what = match (ranks.all, run.offload.is_none()) {
            (2.., _) => "what this rank keeps on the host",
            (_, true) => "saving a checkpoint beside the rows of data",
            (_, false) => "what this run offloads",
        };
        // Weights are mapped while they are loaded.
        let available = if is_here { free_beside(overhead::mapped_weight_bytes(run), ranks.here) } else { None };
        let needed = (plan.bytes_beside_device() as u64).saturating_add(process);
        Self { needed, available, what }
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

    /// Whether the device itself has too little, whatever the host has beside it.
    pub(crate) fn device_lacks(&self) -> bool {
        self.plan.is_some() && self.available.as_ref().is_some_and(|available| self.needed > available.bytes)
    }

    /// Settings that would fit, or be faster.
    pub(crate) fn advice(&self, run: &Run, given: &Given, ranks: Ranks<'_>) -> impl Iterator<Item = Advice> {
        advice::of(run, self.need(), move |run| Some(memory_fit(run, given, ranks).ok()?.need()))
    }

    fn need(&self) -> advice::Need {
        let rows = self.plan.as_ref().map_or(1, |plan| plan.rows);
        let work = self.plan.iter().flat_map(|plan| plan.work.values()).map(|work| work.multiply_adds).sum::<u64>();
        let host = self.host.as_ref().map(|host| host.needed);
        let (bytes, work_per_row) = (self.needed, work / rows.max(1) as u64);
        advice::Need { bytes, host, is_list: false, fits: self.fits(), work_per_row }
    }

    /// The failure of a run that does not fit, with the first thing to try.
    pub(crate) fn refusal(&self, first: Option<&Advice>) -> Option<Failure> {
        if self.fits() != Some(false) {
            return None;
        }
        let hint = Some(advice::hint(first));
        let lacking = self.host.as_ref().filter(|host| host.lacks());
        if let Some(HostFit { needed, available: Some(available), what }) = lacking {
            let (needed, there, of) = (size(*needed), size(available.bytes), &available.of);
            let message = format!("{what} needs {needed} of host memory, {there} is available ({of})");
            return Some(Failure { code: 4, message, hint });
        }
        let least = if self.plan.is_none() { "at least " } else { "" };
        let there = self.available.as_ref().map_or("more than any machine has".to_string(), |available| {
            format!("{} is available ({})", size(available.bytes), available.of)
        });
        let message = format!("this run needs {least}{} on {}, {there}", size(self.needed), self.device);
        Some(Failure { code: 4, message: message + &self.items(), hint })
    }

    /// What the memory is for, as a line of its own.
    fn items(&self) -> String {
        let Some(plan) = &self.plan else { return String::new() };
        let items = plan.items.iter().filter(|(_, bytes)| **bytes > 0);
        let items = items.map(|(item, bytes)| format!("{} {}", item.name(), size(*bytes as u64)));
        format!("\n  {}", items.collect::<Vec<_>>().join(", "))
    }
}

/// Refuses a run that does not fit according to the plan, beside the other ranks of this machine.
/// Returns how many numbers it trains; if no plan can be made, the next step reports why.
pub(crate) fn check(run: &Run, ranks: Ranks, given: &Given) -> Result<Option<u64>, Failure> {
    check_evaluation(run)?;
    let Ok(fit) = memory_fit(run, given, ranks) else { return Ok(None) };
    let trained = fit.plan.as_ref().map(|plan| plan.trained_count as u64);
    if fit.fits() != Some(false) {
        return Ok(trained);
    }
    let first = fit.advice(run, given, ranks).next();
    fit.refusal(first.as_ref()).map_or(Ok(trained), Err)
}

/// Refuses to evaluate more at once than a plan lays out. Micro-batches that are as large have
/// answers of their own.
pub(crate) fn check_evaluation(run: &Run) -> Result<(), Failure> {
    let (rows, length) = (evaluated(run) as u64, u64::from(run.training.max_seq_length));
    if rows * length <= TOKENS_MAX || rows <= u64::from(run.training.micro_batch_size) {
        return Ok(());
    }
    let message = format!("evaluating {rows} rows of {length} tokens at once is more than a plan counts");
    Err(Failure { code: 4, message, hint: Some("lower `eval.micro_batch_size`".to_string()) })
}

/// Plans a run for its device: one of this machine, or any device whose memory or name is given.
pub(crate) fn memory_fit(run: &Run, given: &Given, ranks: Ranks<'_>) -> Result<MemoryFit, Failure> {
    memory_limits::check(&given.memories, 1)?;
    check_evaluation(run)?;
    let device = planned(&[Chosen::of(run)?], 0, given, ranks)?;
    let model = model_config(&run.base_model)?;
    let tokens = u64::from(run.training.micro_batch_size) * u64::from(run.training.max_seq_length);
    let least = least_bytes(&model, tokens);
    let on_host = matches!(device.kind, PlannedDevice::Cpu { .. });
    let bound = device.available.as_ref().map(|available| available.bytes);
    // Offloaded activations are bounded by the memory of the host.
    let bound = bound.filter(|_| on_host || !run.offload.activations).unwrap_or(UNKNOWN_MAX);
    let Planned { kind, name, mut available, own, is_here, is_estimate } = device;
    let is_here = is_here && (given.memories.is_empty() || !on_host);
    if tokens > TOKENS_MAX || least > bound {
        let (plan, host, overhead, needed) = (None, None, 0, least);
        return Ok(MemoryFit { plan, device: name, needed, overhead, on_host, is_here, available, host, is_estimate });
    }
    let (plan, host, overhead) = match kind {
        PlannedDevice::Cpu { threads } => {
            let cpu = open_cpu(threads, Path::best())?;
            let plan = worst_case(run, &model, cpu, Offload::NONE, ranks)?;
            let overhead = overhead::of_process(run, threads, plan.bytes_on_host() as u64);
            if given.memories.is_empty() {
                let needed = plan.bytes_on_host() as u64 + overhead;
                let mapped = overhead::mapped_weight_bytes(run);
                let mapped = mapped.saturating_add(overhead::address_space_of_samples(run, &plan, mapped));
                available = free_beside(overhead::address_space(run, mapped, threads, needed), ranks.here);
            }
            (plan, None, overhead)
        }
        PlannedDevice::Gpu { selector, architectures } => {
            let absent = architectures.into_iter().map(|known| Gpu::absent(selector, known));
            let plans = absent.map(|gpu| worst_case(run, &model, gpu, run.offload, ranks));
            let plans: Vec<MemoryPlan> = plans.collect::<Result<_, RunError>>()?;
            let largest = plans.into_iter().max_by_key(MemoryPlan::bytes_on_device);
            let plan = largest.ok_or_else(|| Failure::device("no such device", "`isobit devices` lists them"))?;
            let threads = Chosen::host_threads(run.threads as usize)?;
            let process = overhead::of_process(run, threads, plan.bytes_beside_device() as u64);
            let host = HostFit::of(&plan, run, process, ranks, is_here);
            let overhead = overhead::of_driver(selector.api, std::iter::once(&plan));
            (plan, Some(host), overhead)
        }
    };
    let counted = if on_host { plan.bytes_on_host() } else { plan.bytes_on_device() };
    let (needed, available) = binding_limit(counted as u64, overhead, available, own);
    Ok(MemoryFit { plan: Some(plan), device: name, needed, overhead, on_host, is_here, available, host, is_estimate })
}

/// What is needed, and which memory must hold it: `--memory` holds buffers alone, the memory of a
/// device also what is beside them. If both are limits, the one that leaves less for buffers
/// counts.
pub(crate) fn binding_limit(
    counted: u64,
    beside: u64,
    available: Option<Available>,
    own: Option<Available>,
) -> (u64, Option<Available>) {
    let all = counted.saturating_add(beside);
    let Some(limit) = available.as_ref().filter(|available| available.of_buffers) else { return (all, available) };
    match own.filter(|own| own.bytes.saturating_sub(beside) < limit.bytes) {
        Some(own) => (all, Some(own)),
        None => (counted, available),
    }
}

/// What a plan needs to know about a device. No device is opened: that takes longer than the plan.
pub(crate) struct Planned {
    pub(crate) kind: PlannedDevice,
    pub(crate) name: String,
    pub(crate) available: Option<Available>,
    /// The memory of a card that is here or named, if `--memory` limits the buffers in it.
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
pub(crate) fn planned(devices: &[Chosen], at: usize, given: &Given, ranks: Ranks<'_>) -> Result<Planned, Failure> {
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
    let (mut own, mut is_estimate) = (None, true);
    let (name, architectures, available) = match (listed, said) {
        (Ok(Some(listing)), said) => {
            is_estimate = !is_measured(selector.api, &listing.name);
            let memory = memory_of(&listing);
            own = memory.clone().filter(|_| said.is_some());
            (selector.to_string(), vec![listing.architecture], said.or(memory))
        }
        (_, said @ Some(_)) => {
            let architectures = if selector.api == Api::Cuda { vec![None, Some(HOPPER)] } else { vec![None] };
            (format!("{selector}, which is not in this machine"), architectures, said)
        }
        (listed, None) => {
            let why = listed.err().unwrap_or_else(|| "there is no such device".to_string());
            return Err(Failure::device(format!("{selector}: {why}"), HINT));
        }
    };
    Ok(Planned { kind: PlannedDevice::Gpu { selector, architectures }, name, available, own, is_here, is_estimate })
}

/// Whether plans were compared with what the driver of such a card takes.
fn is_measured(api: Api, name: &str) -> bool {
    named_card(name).is_some_and(|card| card.measured && card.api == api)
}

/// What a card in this machine has for a run: what other programs leave of its memory, if its
/// driver says so.
fn memory_of(listing: &Listing) -> Option<Available> {
    let Listing { name, memory, memory_free, .. } = listing;
    let of = if memory_free.is_some() { format!("free memory of {name}") } else { name.clone() };
    let bytes = memory_free.map_or(*memory, |free| free.min(*memory));
    (*memory > 0).then_some(Available { bytes, of, of_buffers: false })
}

/// A card that need not be in this machine.
fn named(card: &NamedCard, selector: Selector, said: Option<Available>, number: Option<usize>) -> Planned {
    // Two cards of a list have a memory each.
    let name = number.map_or(card.name.clone(), |number| format!("{} {number}", card.name));
    let whole = || Available { bytes: card.memory, of: card.title.clone(), of_buffers: false };
    let own = said.is_some().then(whole);
    let available = said.unwrap_or_else(whole);
    Planned {
        kind: PlannedDevice::Gpu { selector, architectures: vec![card.compute] },
        name,
        available: Some(available),
        own,
        is_here: false,
        is_estimate: !card.measured,
    }
}

/// The worst case of a config: every row of maximum length, on the most demanding rank.
fn worst_case<L: MemoryLayout>(
    run: &Run,
    model: &Config,
    like: L,
    offload: Offload,
    ranks: Ranks<'_>,
) -> Result<MemoryPlan, RunError> {
    check_positions(run, model)?;
    targets::check(model, &trained(run))?;
    let settings = settings(run);
    let row = longest_rows(1, settings.positions);
    let like = Counting::new(like);
    let (evaluated, generated, packs) = (evaluated(run), generated(run, model), run.training.sample_packing);
    with_shapes(run, model, |source| {
        let of_rank = |rank| {
            let peak = peak_of_update(run, rank, 0);
            let step = StepSettings { gradient_groups: peak.groups, ..step_settings(run) };
            let (rows, waiting) = (vec![&row[0]; peak.rows], peak.waiting);
            let planned =
                PlannedUpdate { step: &step, rows: &rows, packs, waiting, evaluated, generated, offload, rank };
            plan::memory_on(&like, model, source, &settings, &planned)
        };
        let plans = ranks.places(run).into_iter().map(of_rank).collect::<Result<Vec<_>, _>>()?;
        Ok(MemoryPlan::of_most_demanding(plans, like.is_host()).expect("a run has a rank"))
    })
}

/// Rows that a run evaluates at once.
pub(crate) fn evaluated(run: &Run) -> usize {
    if run.has_eval() { run.eval.micro_batch_size as usize } else { 0 }
}

/// The longest text that a run generates at its end. A token is a byte of the prompt or more, but
/// for a few at its beginning.
fn generated(run: &Run, model: &Config) -> Generated {
    const BEGINNING: usize = 8;
    let Some(longest) = run.generate_prompts.iter().map(String::len).max() else { return Generated::default() };
    let prompt = longest.saturating_add(BEGINNING).min(model.max_positions);
    let tokens = prompt.saturating_add(run.generate_tokens as usize).min(model.max_positions);
    Generated { prompt, tokens }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_has_what_other_programs_leave() {
        let listing = |memory: u64, memory_free: Option<u64>| Listing {
            selector: "cuda:0".to_string(),
            name: "NVIDIA H200".to_string(),
            runtime: String::new(),
            memory,
            memory_free,
            units: 132,
            architecture: Some(HOPPER),
            objection: None,
        };
        let of = |memory, free| memory_of(&listing(memory, free)).map(|available| (available.bytes, available.of));
        assert_eq!(of(100, Some(60)), Some((60, "free memory of NVIDIA H200".to_string())));
        assert_eq!(of(100, Some(0)), Some((0, "free memory of NVIDIA H200".to_string())));
        assert_eq!(of(100, Some(101)), Some((100, "free memory of NVIDIA H200".to_string())));
        assert_eq!(of(100, None), Some((100, "NVIDIA H200".to_string())));
        assert_eq!(of(0, None), None);
    }

    #[test]
    fn a_card_is_measured_by_its_name_and_its_driver() {
        assert!(is_measured(Api::Cuda, "NVIDIA H200"));
        assert!(!is_measured(Api::OpenCl, "NVIDIA H200"));
        for name in ["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "NVIDIA H200 NVL", ""] {
            assert!(!is_measured(Api::Cuda, name), "{name}");
        }
    }

    #[test]
    fn the_memory_of_a_card_counts_beside_a_limit() {
        let available = |bytes, of: &str| Some(Available { bytes, of: of.to_string(), of_buffers: of == "limit" });
        let settled = |counted, limit, own| {
            let (needed, available) = binding_limit(counted, 5, available(limit, "limit"), available(own, "card"));
            (needed, available.map(|available| available.of))
        };
        assert_eq!(settled(50, 100, 106), (50, Some("limit".to_string())));
        assert_eq!(settled(50, 100, 104), (55, Some("card".to_string())), "with what its driver takes");
        assert_eq!(settled(50, 40, 60), (50, Some("limit".to_string())));
        assert_eq!(settled(50, 40, 20), (55, Some("card".to_string())));
    }
}
