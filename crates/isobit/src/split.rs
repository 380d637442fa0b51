//! How the layers of a run are divided among a list of devices: as `device_map` says, or by the
//! memory of the cards, from which layers move to where more is left until every device has what it
//! needs.

use crate::Failure;
use crate::advice::{self, Advice};
use crate::backend::{Chosen, Opening, open_cpu};
use crate::fits::{self, Available, Given, Planned, PlannedDevice, Ranks};
use crate::memory_limits;
use crate::overhead;
use crate::units::size;
use isobit_autograd::Offload;
use isobit_kernels::plan::{Counting, MemoryLayout};
use isobit_kernels::{Gpu, Path};
use isobit_models::{Config, Part, Trained, WeightSource};
use isobit_training::config::Run;
use isobit_training::plan::{MemoryPlan, PlannedStage, TOKENS_MAX, longest_rows, stage_memory};
use isobit_training::prepare::{RunError, check_positions, model_config, step_settings, trained};
use isobit_training::ranks::memory::Place;
use isobit_training::stages::{StageDevice, parcels};
use isobit_training::step::StepSettings;
use isobit_training::targets;
use std::collections::{BTreeMap, BTreeSet};

/// The devices of a run and their layers.
pub(crate) struct Split {
    pub(crate) devices: Vec<Chosen>,
    pub(crate) parts: Vec<Part>,
}

impl Split {
    /// For devices that get `layers` each, or numbers by their memory if none are given.
    pub(crate) fn new(devices: Vec<Chosen>, layers: &[u32], model: &Config) -> Result<Self, Failure> {
        let counts = if layers.is_empty() {
            let planned = (0..devices.len()).map(|at| fits::planned(&devices, at, &Given::default(), Ranks::ALONE));
            by_memory(&planned.collect::<Result<Vec<_>, _>>()?, false, model.layers.len())?
        } else {
            given_layers(layers, devices.len(), model.layers.len())?
        };
        Ok(Self { parts: Part::divide(model, &counts), devices })
    }

    /// For a run that is not planned.
    pub(crate) fn unplanned(run: &Run) -> Result<Self, Failure> {
        let model = model_config(&run.base_model)?;
        Self::new(Chosen::all_of(run)?, &run.device_layers, &model)
    }

    /// `cuda:0,cpu`
    pub(crate) fn name(&self) -> String {
        self.devices.iter().map(Chosen::name).collect::<Vec<_>>().join(",")
    }

    /// The devices with their layers, for people.
    pub(crate) fn described(&self) -> String {
        let one = |(device, part): (&Chosen, &Part)| match device {
            Chosen::Cpu { threads } => format!("cpu ({}, threads: {threads})", layers(part)),
            Chosen::Gpu(selector) => format!("{selector} ({})", layers(part)),
        };
        self.devices.iter().zip(&self.parts).map(one).collect::<Vec<_>>().join(", ")
    }

    /// The devices, each opened as `how` says of its place in the list.
    pub(crate) fn stages(&self, how: impl Fn(usize) -> Opening) -> Result<Vec<StageDevice>, Failure> {
        let stage = |(at, (device, part)): (usize, (&Chosen, &Part))| {
            Ok(StageDevice { name: device.name(), layers: part.layers.len(), open: device.opener(how(at))? })
        };
        self.devices.iter().zip(&self.parts).enumerate().map(stage).collect()
    }
}

/// `layers 0 to 13`
pub(crate) fn layers(part: &Part) -> String {
    match part.layers.len() {
        1 => format!("layer {}", part.layers.start),
        _ => format!("layers {} to {}", part.layers.start, part.layers.end - 1),
    }
}

/// Layers in proportion to the memory of the cards. A CPU beside cards computes more slowly than
/// they do and gets one. The cards get equal numbers if one of them does not report its memory; so
/// does a list without cards.
fn by_memory(planned: &[Planned], adds_up: bool, layers: usize) -> Result<Vec<usize>, Failure> {
    let devices = planned.len();
    if devices > layers {
        let message = format!("{devices} devices are listed, but the model has {layers} layers");
        return Err(Failure::usage(message, format!("name at most {layers} devices: each has a layer at least")));
    }
    let is_card = |at: usize| matches!(planned[at].kind, PlannedDevice::Gpu { .. });
    let mut shares: Vec<Option<u64>> = vec![None; devices];
    for pool in memories(planned, adds_up) {
        // What is said of a card may be more than it has.
        let own = planned[pool.stages[0]].own.as_ref().map_or(u64::MAX, |own| own.bytes);
        let bytes = pool.available.map(|available| available.bytes.min(own));
        for at in &pool.stages {
            shares[*at] = bytes.map(|bytes| bytes / pool.stages.len() as u64);
        }
    }
    let has_cards = (0..devices).any(is_card);
    let is_known = (0..devices).filter(|at| is_card(*at)).all(|at| shares[at].is_some());
    let weights = (0..devices).map(|at| match shares[at] {
        _ if has_cards && !is_card(at) => 0,
        Some(bytes) if has_cards && is_known => bytes.max(1),
        _ => 1,
    });
    Ok(proportional(layers, &weights.collect::<Vec<_>>()))
}

/// A number for each weight, one at least; the first ones get one more where weights are equal.
fn proportional(sum: usize, weights: &[u64]) -> Vec<usize> {
    let mut counts = vec![1; weights.len()];
    for _ in weights.len()..sum {
        // The next one goes to the largest weight per number, with one more (D'Hondt).
        let before = |left: usize, right: usize| {
            let product = |at: usize, other: usize| u128::from(weights[at]) * (counts[other] as u128 + 1);
            product(left, right) >= product(right, left)
        };
        let next = (1..weights.len()).fold(0, |first, at| if before(first, at) { first } else { at });
        counts[next] += 1;
    }
    counts
}

/// The layers that a config gives each device.
fn given_layers(given: &[u32], devices: usize, all: usize) -> Result<Vec<usize>, Failure> {
    if given.len() != devices {
        let message = format!("`device_map` has numbers for {} devices, but {devices} are listed", given.len());
        return Err(Failure::usage(message, "give each device of the list one, or leave it out"));
    }
    let counts: Vec<usize> = given.iter().map(|count| *count as usize).collect();
    let sum = counts.iter().fold(0_usize, |sum, count| sum.saturating_add(*count));
    if sum != all {
        let message = format!("`device_map` divides {sum} layers, but the model has {all}");
        return Err(Failure::usage(message, "make its numbers add up to that, or leave it out"));
    }
    Ok(counts)
}

/// A division with its memory.
pub(crate) struct SplitFit {
    pub(crate) split: Split,
    pub(crate) stages: Vec<StageFit>,
    /// The memories that the devices have; a device listed twice has one.
    pub(crate) pools: Vec<Pool>,
    /// Activations and gradients on their way, on the host.
    pub(crate) bytes_transfer: u64,
    /// The devices as a command line has them, cards by name too.
    pub(crate) names: Vec<String>,
    /// Whether all of them are in this machine.
    pub(crate) is_here: bool,
    /// Whether plans were never compared with the memory of one of the devices.
    pub(crate) is_estimate: bool,
}

pub(crate) struct StageFit {
    pub(crate) device: String,
    pub(crate) plan: MemoryPlan,
}

/// A memory and what the stages on it need together.
pub(crate) struct Pool {
    pub(crate) name: String,
    pub(crate) needed: u64,
    /// What of it is beside buffers: of the process on the host, of the driver on a card.
    pub(crate) overhead: u64,
    pub(crate) available: Option<Available>,
    is_card: bool,
    stages: Vec<usize>,
}

impl Pool {
    /// Bytes that are missing, if any are.
    fn missing(&self) -> Option<u64> {
        let available = self.available.as_ref()?.bytes;
        (self.needed > available).then(|| self.needed - available)
    }

    fn left(&self) -> u64 {
        self.available.as_ref().map_or(u64::MAX, |available| available.bytes.saturating_sub(self.needed))
    }
}

impl SplitFit {
    /// None if a device does not say how much memory it has, and no other lacks any. The host of
    /// cards elsewhere is not asked for.
    pub(crate) fn fits(&self) -> Option<bool> {
        if self.pools.iter().any(|pool| pool.missing().is_some()) {
            return Some(false);
        }
        let mut of_devices = self.pools.iter().filter(|pool| !pool.stages.is_empty());
        of_devices.all(|pool| pool.available.is_some()).then_some(true)
    }

    pub(crate) fn cards_lack(&self) -> bool {
        self.pools.iter().any(|pool| pool.is_card && pool.missing().is_some())
    }

    /// Settings that would fit, or be faster.
    pub(crate) fn advice(&self, run: &Run, given: &Given, ranks: Ranks<'_>) -> impl Iterator<Item = Advice> {
        advice::of(run, self.need(), move |run| Some(split_fit(run, given, ranks).ok()?.need()))
    }

    fn need(&self) -> advice::Need {
        let is_device = |pool: &&Pool| !pool.stages.is_empty();
        let bytes = self.pools.iter().filter(is_device).map(|pool| pool.needed).max().unwrap_or(0);
        let host = self.pools.iter().find(|pool| !is_device(pool)).map(|pool| pool.needed);
        advice::Need { bytes, host, is_list: true, fits: self.fits(), work_per_row: 0 }
    }

    /// The failure of a run that does not fit, with the first thing to try.
    pub(crate) fn refusal(&self, first: Option<&Advice>) -> Option<Failure> {
        let short = self.pools.iter().filter(|pool| pool.missing().is_some()).map(|pool| {
            let there = pool.available.as_ref().map_or(String::new(), |available| {
                format!(", {} is available ({})", size(available.bytes), available.of)
            });
            format!("{} needs {}{there}", pool.name, size(pool.needed))
        });
        let short: Vec<String> = short.collect();
        if short.is_empty() {
            return None;
        }
        let message = format!("this run does not fit as {}: {}", self.counts(), short.join("; "));
        Some(Failure { code: 4, message, hint: Some(advice::hint(first)) })
    }

    /// What the run takes of the memory that a device computes in, and what there is of it.
    pub(crate) fn memory_of(&self, device: Chosen) -> Option<(u64, Option<Available>)> {
        let holds = |pool: &&Pool| match pool.stages.first() {
            // Host memory beside cards.
            None => device.is_cpu(),
            Some(at) if device.is_cpu() => self.split.devices[*at].is_cpu(),
            Some(at) => self.split.devices[*at] == device,
        };
        self.pools.iter().find(holds).map(|pool| (pool.needed, pool.available.clone()))
    }

    /// Numbers that all stages train.
    pub(crate) fn trained_count(&self) -> u64 {
        self.stages.iter().map(|stage| stage.plan.trained_count as u64).sum()
    }

    /// `14 + 14 layers`
    pub(crate) fn counts(&self) -> String {
        let counts = self.split.parts.iter().map(|part| part.layers.len().to_string());
        format!("{} layers", counts.collect::<Vec<_>>().join(" + "))
    }
}

/// Plans a run for its list of devices. What is `given` of them need not be in this machine.
pub(crate) fn split_fit(run: &Run, given: &Given, ranks: Ranks<'_>) -> Result<SplitFit, Failure> {
    let devices = Chosen::all_of(run)?;
    memory_limits::check(&given.memories, devices.len())?;
    fits::check_evaluation(run)?;
    let planned = (0..devices.len()).map(|at| fits::planned(&devices, at, given, ranks));
    let planned = planned.collect::<Result<Vec<_>, _>>()?;
    // Numbers for each entry of one device add up; one number is said of it once.
    let adds_up = given.memories.len() > 1;
    let model = model_config(&run.base_model)?;
    let counts = if run.device_layers.is_empty() {
        by_memory(&planned, adds_up, model.layers.len())?
    } else {
        given_layers(&run.device_layers, devices.len(), model.layers.len())?
    };
    check_positions(run, &model)?;
    targets::check(&model, &trained(run))?;
    let tokens = u64::from(run.training.micro_batch_size) * u64::from(run.training.max_seq_length);
    if tokens > TOKENS_MAX {
        let message = format!("a micro-batch of {tokens} tokens fits no device");
        return Err(Failure { code: 4, message, hint: Some("lower `micro_batch_size`".to_string()) });
    }
    let fit = fits::with_shapes(run, &model, |source| {
        let known = BTreeMap::new();
        let mut plans = Plans { run, model: &model, source, planned: &planned, adds_up, ranks, known };
        plans.settled(counts, run.device_layers.is_empty(), tokens)
    });
    let (counts, stages, pools) = fit?;
    let parts = Part::divide(&model, &counts);
    let bytes_transfer = transfer(run, &model, tokens, devices.len());
    let is_estimate = planned.iter().any(|device| device.is_estimate);
    let is_here = planned.iter().all(|device| device.is_here);
    let name = |(at, device): (usize, &Chosen)| given.card(at).map_or(device.name(), |card| card.name.clone());
    let names = devices.iter().enumerate().map(name).collect();
    Ok(SplitFit { split: Split { devices, parts }, stages, pools, bytes_transfer, names, is_here, is_estimate })
}

/// The parcels of all links, whose pages the drivers of cards lock; after them a trained table that
/// is both embedding and head travels as a whole.
fn transfer(run: &Run, model: &Config, tokens: u64, devices: usize) -> u64 {
    let number = (model.hidden * size_of::<f32>()) as u64;
    let tokens = tokens.max(fits::evaluated(run) as u64 * u64::from(run.training.max_seq_length));
    let messages = (tokens * number).saturating_mul((1..devices).map(parcels).sum::<usize>() as u64);
    let is_copied = model.tied && trained(run) == Trained::Full;
    messages.saturating_add(if is_copied { model.vocabulary as u64 * number } else { 0 })
}

/// Plans of devices with consecutive layers.
struct Plans<'a> {
    run: &'a Run,
    model: &'a Config,
    source: &'a dyn WeightSource,
    planned: &'a [Planned],
    /// Whether the memories of entries that are one device add up.
    adds_up: bool,
    ranks: Ranks<'a>,
    /// By device and layers.
    known: BTreeMap<(usize, usize, usize), MemoryPlan>,
}

type Settled = (Vec<usize>, Vec<StageFit>, Vec<Pool>);

impl Plans<'_> {
    /// Moves layers until all devices have enough memory, or no move helps.
    fn settled(&mut self, mut counts: Vec<usize>, may_move: bool, tokens: u64) -> Result<Settled, RunError> {
        let mut tried = BTreeSet::from([counts.clone()]);
        loop {
            let stages = self.stages(&counts)?;
            let pools = self.pools(&stages, tokens);
            let next = if may_move { moved(&counts, &stages, &pools) } else { None };
            match next.filter(|next| tried.insert(next.clone())) {
                Some(next) => counts = next,
                None => return Ok((counts, stages, pools)),
            }
        }
    }

    fn stages(&mut self, counts: &[usize]) -> Result<Vec<StageFit>, RunError> {
        let (mut stages, mut trained_before) = (Vec::new(), false);
        for (at, part) in Part::divide(self.model, counts).into_iter().enumerate() {
            let key = (at, part.layers.start, part.layers.end);
            if !self.known.contains_key(&key) {
                let plan = self.stage(at, &part, trained_before)?;
                self.known.insert(key, plan);
            }
            let plan = self.known[&key].clone();
            trained_before |= plan.trained_count > 0;
            stages.push(StageFit { device: self.planned[at].name.clone(), plan });
        }
        Ok(stages)
    }

    fn stage(&self, at: usize, part: &Part, trained_before: bool) -> Result<MemoryPlan, RunError> {
        match &self.planned[at].kind {
            PlannedDevice::Cpu { threads } => {
                let cpu = open_cpu(*threads, Path::best()).map_err(|failure| RunError::Target {
                    what: failure.message,
                    hint: failure.hint.unwrap_or_default(),
                })?;
                self.on(cpu, at, part, trained_before, Offload::NONE)
            }
            PlannedDevice::Gpu { selector, architectures } => {
                let mut largest: Option<MemoryPlan> = None;
                for known in architectures {
                    let gpu = Gpu::absent(*selector, *known);
                    let plan = self.on(gpu, at, part, trained_before, self.run.offload)?;
                    largest = largest.filter(|largest| largest.bytes_peak >= plan.bytes_peak).or(Some(plan));
                }
                Ok(largest.expect("a device has an architecture, known or not"))
            }
        }
    }

    /// The worst case of a config: every row of maximum length, on the most demanding rank.
    fn on<L: MemoryLayout>(
        &self,
        like: L,
        at: usize,
        part: &Part,
        trained_before: bool,
        offload: Offload,
    ) -> Result<MemoryPlan, RunError> {
        let (run, settings) = (self.run, fits::settings(self.run));
        let (like, stages_after) = (Counting::new(like), self.planned.len() - 1 - at);
        let row = longest_rows(1, settings.positions);
        let of_rank = |rank: Option<Place>| {
            let peak = fits::peak_of_update(run, rank, stages_after);
            let groups = run.training.gradient_groups as usize;
            let group_rows = rank.map_or_else(|| (run.rows_per_update() as usize).div_ceil(groups), Place::group_rows);
            let step = StepSettings { gradient_groups: peak.groups, ..step_settings(run) };
            let stage = PlannedStage {
                part: part.clone(),
                stages_after,
                trained_before,
                settings: &settings,
                step: &step,
                rows: &vec![&row[0]; peak.rows],
                packs: run.training.sample_packing,
                group_rows,
                waiting: peak.waiting,
                evaluated: fits::evaluated(run),
                offload,
                rank,
            };
            stage_memory(&like, self.model, self.source, &stage)
        };
        let plans = self.ranks.places(run).into_iter().map(of_rank).collect::<Result<Vec<_>, _>>()?;
        Ok(MemoryPlan::of_most_demanding(plans, like.is_host()).expect("a run has a rank"))
    }

    fn of_cards<'b>(&self, stages: &'b [StageFit]) -> impl Iterator<Item = &'b MemoryPlan> {
        let is_card = |at: usize| matches!(self.planned[at].kind, PlannedDevice::Gpu { .. });
        stages.iter().enumerate().filter(move |(at, _)| is_card(*at)).map(|(_, stage)| &stage.plan)
    }

    /// Host memory of what cards offload and save and of what ranks keep and send, in a list
    /// without a CPU.
    fn add_host(&self, pools: &mut Vec<Pool>, stages: &[StageFit], tokens: u64) {
        if pools.iter().any(|pool| !pool.is_card) {
            return;
        }
        let cards = || self.of_cards(stages);
        let transfer = transfer(self.run, self.model, tokens, self.planned.len());
        let step = cards().map(|plan| plan.host_bytes_peak as u64).sum::<u64>().saturating_add(transfer);
        let save: usize = cards().map(|plan| plan.host_bytes_between_steps + plan.bytes_save).sum();
        let are_here = self.planned.iter().all(|device| device.is_here);
        // Weights are mapped while this is planned.
        let available = if are_here { fits::free(self.ranks.here) } else { None };
        let counted = step.max(save as u64);
        let process = overhead::of_process(self.run, self.threads(), counted);
        let needed = counted.saturating_add(process);
        let name = "host memory".to_string();
        pools.push(Pool { name, needed, overhead: process, available, is_card: false, stages: Vec::new() });
    }

    /// Threads of the process: those of each CPU of the list, and one that drives each card.
    fn threads(&self) -> usize {
        let of = |planned: &Planned| match planned.kind {
            PlannedDevice::Cpu { threads } => threads,
            PlannedDevice::Gpu { .. } => 1,
        };
        self.planned.iter().map(of).sum()
    }

    fn pools(&self, stages: &[StageFit], tokens: u64) -> Vec<Pool> {
        let mut pools = memories(self.planned, self.adds_up);
        let saved: usize = stages.iter().map(|stage| stage.plan.bytes_save).sum();
        // What cards offload, and what ranks keep and send, is in the memory of the CPU.
        let keeps = !self.run.offload.is_none() || self.ranks.all > 1;
        let kept = |bytes: fn(&MemoryPlan) -> usize| -> usize {
            if keeps { self.of_cards(stages).map(bytes).sum() } else { 0 }
        };
        for pool in &mut pools {
            let plans = || pool.stages.iter().map(|at| &stages[*at].plan);
            let sum = |bytes: fn(&MemoryPlan) -> usize| -> usize { plans().map(bytes).sum() };
            let step = sum(|plan| plan.bytes_peak) as u64;
            let first = &self.planned[pool.stages[0]];
            let (counted, beside) = if let PlannedDevice::Gpu { selector, .. } = &first.kind {
                (step, overhead::of_driver(selector.api, plans()))
            } else {
                let transfer = transfer(self.run, self.model, tokens, self.planned.len());
                let step = step + kept(|plan| plan.host_bytes_peak) as u64;
                let save = sum(|plan| plan.bytes_between_steps) + kept(|plan| plan.host_bytes_between_steps) + saved;
                let counted = (step + transfer).max(save as u64).max(sum(|plan| plan.bytes_resume) as u64);
                (counted, overhead::of_process(self.run, self.threads(), counted))
            };
            let is_said = pool.available.as_ref().is_some_and(|available| available.of == memory_limits::NAME);
            if matches!(first.kind, PlannedDevice::Cpu { .. }) && !is_said {
                let on_cpu = pool.stages.iter().filter_map(|at| match self.planned[*at].kind {
                    PlannedDevice::Cpu { threads } => Some(threads + 1),
                    PlannedDevice::Gpu { .. } => None,
                });
                // Weights are mapped while this is planned.
                let mapped = overhead::address_space(self.run, 0, on_cpu.sum(), counted + beside);
                pool.available = fits::free_beside(mapped, self.ranks.here);
            }
            (pool.needed, pool.available) =
                fits::binding_limit(counted, beside, pool.available.take(), first.own.clone());
            pool.overhead = pool.needed.saturating_sub(counted);
        }
        self.add_host(&mut pools, stages, tokens);
        pools
    }
}

/// A memory for each device, with the entries of the list that are on it.
fn memories(planned: &[Planned], adds_up: bool) -> Vec<Pool> {
    let mut pools: Vec<Pool> = Vec::new();
    for (at, planned) in planned.iter().enumerate() {
        let Some(pool) = pools.iter_mut().find(|pool| pool.name == planned.name) else {
            let (name, available) = (planned.name.clone(), planned.available.clone());
            let is_card = matches!(planned.kind, PlannedDevice::Gpu { .. });
            pools.push(Pool { name, needed: 0, overhead: 0, available, is_card, stages: vec![at] });
            continue;
        };
        pool.stages.push(at);
        if let (true, Some(all), Some(more)) = (adds_up, &mut pool.available, &planned.available) {
            all.bytes = all.bytes.saturating_add(more.bytes);
        }
    }
    pools
}

/// Moves layers from the memory that lacks most to the one that has most left, that of a card if
/// one has room.
fn moved(counts: &[usize], stages: &[StageFit], pools: &[Pool]) -> Option<Vec<usize>> {
    let short = pools.iter().filter(|pool| pool.missing().is_some()).max_by_key(|pool| pool.missing())?;
    let from = *short.stages.iter().max_by_key(|at| counts[**at])?;
    if counts[from] < 2 {
        return None;
    }
    // The bytes of a layer are less than this, so not too many are moved at once.
    let each = (stages[from].plan.bytes_peak / counts[from]).max(1) as u64;
    let has_room = |pool: &&Pool| !pool.stages.is_empty() && pool.missing().is_none();
    // A card before a CPU, as long as it has room for a layer.
    let rank = |pool: &&Pool| (pool.is_card && pool.left() >= each, pool.left());
    let rich = pools.iter().filter(has_room).max_by_key(rank)?;
    let to = *rich.stages.iter().min_by_key(|at| counts[**at])?;
    let count = (short.missing()? / each).clamp(1, counts[from] as u64 - 1) as usize;
    let mut next = counts.to_vec();
    next[from] -= count;
    next[to] += count;
    Some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_dealt_out_by_memory() {
        assert_eq!(proportional(28, &[1, 1]), [14, 14]);
        assert_eq!(proportional(5, &[1, 1, 1]), [2, 2, 1]);
        assert_eq!(proportional(2, &[0, 0]), [1, 1]);
        // 24 and 8 GiB; what other programs take of one of two equal cards; a CPU beside cards.
        assert_eq!(proportional(28, &[24 << 30, 8 << 30]), [21, 7]);
        assert_eq!(proportional(28, &[(32 << 30) - (600 << 20), 32 << 30]), [14, 14]);
        assert_eq!(proportional(28, &[u64::MAX, 0]), [27, 1]);
        assert_eq!(proportional(29, &[5, 0, 5]), [14, 1, 14]);
    }

    #[test]
    fn a_map_has_a_number_for_every_device() {
        assert_eq!(given_layers(&[1, 3], 2, 4).expect("one number each"), [1, 3]);
        for (devices, all) in [(1, 4), (3, 4), (2, 5)] {
            assert_eq!(given_layers(&[1, 3], devices, all).expect_err("another list").code, 2, "{devices} devices");
        }
    }
}
