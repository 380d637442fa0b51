//! Computes the memory of a run before anything is loaded: it runs the real build and the real
//! training step on a counting backend, so the plan cannot disagree with the run. Every buffer is
//! identified by the line of code that allocated it; items are groups of such lines.
//!
//! Besides device memory, the plan includes what is offloaded to host memory, what one of several
//! ranks holds there (`ranks/memory.rs`), and host memory for writing a checkpoint (all trained
//! tensors and their moments) and for reading one back (one tensor).

use crate::batch::{Batch, BatchPosition};
use crate::engine::Engine;
use crate::groups::Groups;
use crate::prepare::RunError;
use crate::ranks::memory::{Exchange, Place};
use crate::row::Row;
use crate::stages::Alone;
use crate::step::{StepError, StepSettings, Update};
use crate::trainer::{Placement, Trainer};
use isobit_autograd::{Offload, Parameter, Value};
use isobit_kernels::plan::{Counting, Holder, Holdings, MemoryKind, MemoryLayout, SMALL_MAX, SMALL_STEP_BYTES, Work};
use isobit_models::build::Settings;
use isobit_models::{
    Config, Part, Session, Trained, TrainedTensor, WeightSource, build_placed, build_whole, cache_bytes,
};
use std::collections::BTreeMap;

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Item {
    /// Frozen weights and position tables.
    Weights,
    /// Trained tensors in float32 and their slices.
    Trained,
    Gradients,
    /// Moments of the optimizer.
    Optimizer,
    /// Tensors held by the tape, and the micro-batch itself.
    Activations,
    /// Workspace of ops.
    Workspace,
    /// Host memory of one of several ranks: its shard of the optimizer, and messages.
    Rank,
}

impl Item {
    /// Those of every plan.
    pub const ALL: [Self; 6] =
        [Self::Weights, Self::Trained, Self::Gradients, Self::Optimizer, Self::Activations, Self::Workspace];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Trained => "trained",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Workspace => "workspace",
            Self::Rank => "rank",
        }
    }

    /// Classified by the crate and file that allocated it; trained tensors count as weights until
    /// they are split off by count.
    fn of(holder: &Holder) -> Self {
        let file = holder.file.replace('\\', "/");
        let is_in = |part: &str| file.contains(part);
        match holder.kind {
            _ if is_in("training/src/ranks/") => Self::Rank,
            _ if is_in("models/") || is_in("autograd/src/stream.rs") => Self::Weights,
            MemoryKind::Weight => Self::Trained,
            MemoryKind::Buffer("u8") => Self::Workspace,
            // Sums and tables that ops leave for the host.
            _ if is_in("kernels/") => Self::Workspace,
            _ if is_in("autograd/src/gradients.rs") => Self::Gradients,
            // Numbers on their way to slices.
            _ if is_in("autograd/src/parameters.rs") => Self::Trained,
            _ if is_in("training/src/trainer.rs") || is_in("training/src/host_optimizer.rs") => Self::Optimizer,
            _ => Self::Activations,
        }
    }
}

/// The memory a run needs on its device and on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryPlan {
    /// At the peak.
    pub items: BTreeMap<Item, usize>,
    /// Their sum: the most bytes held at once while the model is built and trained.
    pub bytes_peak: usize,
    /// The same with the gaps between buffers, on a device whose heap is known.
    pub heap_bytes: Option<usize>,
    /// Bytes that stay on the device between steps.
    pub bytes_between_steps: usize,
    /// On the host while a checkpoint is written.
    pub bytes_save: usize,
    /// On device and host together while a run is restored: the model, its moments, and one tensor
    /// of the file.
    pub bytes_resume: usize,
    /// On the device alone, for the model that continues the prompts of a run once it has finished;
    /// zero without prompts. At most so many: they are those of evaluating such a text.
    pub bytes_generate: usize,
    /// The same with the gaps between buffers, on a device whose heap is known.
    pub heap_bytes_generate: Option<usize>,
    /// On the host meanwhile.
    pub host_bytes_generate: usize,
    /// What is offloaded to host memory, at its peak.
    pub host_items: BTreeMap<Item, usize>,
    /// Their sum.
    pub host_bytes_peak: usize,
    pub host_bytes_between_steps: usize,
    /// Number of trained values.
    pub trained_count: usize,
    /// Rows of the updates that were counted.
    pub rows: usize,
    /// Every line of code that held memory at the peak.
    pub holdings: Holdings,
    /// Work of each op in one step.
    pub work: BTreeMap<&'static str, Work>,
}

impl MemoryPlan {
    /// The peak if host and device share memory: the most of a step, a save between steps, a resume
    /// from a checkpoint, and the texts at the end.
    pub fn bytes_on_host(&self) -> usize {
        let generate = self.bytes_generate + self.host_bytes_generate;
        self.bytes_peak.max(self.bytes_between_steps + self.bytes_save).max(self.bytes_resume).max(generate)
    }

    /// What one of several ranks holds at the peak of its host, which is the device of a run on the
    /// CPU.
    pub fn bytes_of_rank(&self) -> usize {
        let of = |items: &BTreeMap<Item, usize>| items.get(&Item::Rank).copied().filter(|bytes| *bytes > 0);
        of(&self.host_items).or_else(|| of(&self.items)).unwrap_or(0)
    }

    /// What is offloaded to host memory at its peak.
    pub fn bytes_offloaded(&self) -> usize {
        self.host_bytes_peak - self.host_items.get(&Item::Rank).copied().unwrap_or(0)
    }

    /// What the most demanding of several ranks needs, in every memory.
    pub fn of_most_demanding(plans: Vec<Self>, on_host: bool) -> Option<Self> {
        if on_host {
            return plans.into_iter().max_by_key(Self::bytes_on_host);
        }
        let beside = plans.iter().max_by_key(|plan| plan.bytes_beside_device())?.clone();
        let on_device = plans.into_iter().max_by_key(Self::bytes_on_device)?;
        Some(Self {
            host_items: beside.host_items,
            host_bytes_peak: beside.host_bytes_peak,
            host_bytes_between_steps: beside.host_bytes_between_steps,
            bytes_save: beside.bytes_save,
            ..on_device
        })
    }

    /// The peak on a device with memory of its own.
    pub fn bytes_on_device(&self) -> usize {
        self.bytes_peak.max(self.bytes_generate)
    }

    /// The gaps between buffers at that peak, on a device whose heap is known.
    pub fn bytes_of_gaps(&self) -> usize {
        let [step, generate] = [self.heap_bytes, self.heap_bytes_generate].map(|bytes| bytes.unwrap_or(0));
        step.max(generate).saturating_sub(self.bytes_on_device())
    }

    /// Host memory beside a device with memory of its own: the most of a step, a save between
    /// steps, and the texts at the end.
    pub fn bytes_beside_device(&self) -> usize {
        self.host_bytes_peak.max(self.host_bytes_between_steps + self.bytes_save).max(self.host_bytes_generate)
    }
}

/// The updates of a plan, and what is offloaded.
pub struct PlannedUpdate<'a> {
    pub step: &'a StepSettings,
    pub rows: &'a [&'a Row],
    /// Whether rows may hold several documents.
    pub packs: bool,
    /// Gradients of other groups that exist meanwhile.
    pub waiting: usize,
    /// Rows that are evaluated at once; zero if the run does not evaluate.
    pub evaluated: usize,
    /// The longest text that is generated once the run has finished; of no tokens if there is
    /// none.
    pub generated: Generated,
    pub offload: Offload,
    /// The place among ranks that share the groups of an update, if there are several.
    pub rank: Option<Place>,
}

/// Memory needed to train `model` with the planned updates. The source may hold shapes without
/// values (`isobit_models::Shapes`).
pub fn memory<L: MemoryLayout>(
    like: L,
    model: &Config,
    source: &dyn WeightSource,
    settings: &Settings,
    planned: &PlannedUpdate<'_>,
) -> Result<MemoryPlan, RunError> {
    memory_on(&Counting::new(like), model, source, settings, planned)
}

/// The same on such a device as `like`, with nothing in its memory.
pub fn memory_on<L: MemoryLayout>(
    like: &Counting<L>,
    model: &Config,
    source: &dyn WeightSource,
    settings: &Settings,
    planned: &PlannedUpdate<'_>,
) -> Result<MemoryPlan, RunError> {
    let PlannedUpdate { step, rows, packs, waiting, evaluated, generated, offload, rank } = *planned;
    let backend = like.emptied();
    let built = build_whole(&backend, model, source, settings, offload)?;
    let with_moments = rank.is_none_or(|place| !place.is_sharded);
    let trainer = Trainer::placed(backend.clone(), built, Placement::new(offload, with_moments, 1))?;
    let update = Counted { step, rows, packs, waiting, evaluated, hidden: model.hidden, rank };
    let plan = counted(&backend, trainer, |trainer| trainer, &update)?;
    let emptied = backend.emptied();
    Ok(MemoryPlan {
        bytes_generate: generation(&emptied, model, source, settings, generated)?,
        heap_bytes_generate: emptied.heap_bytes(),
        host_bytes_generate: cache_bytes(model, generated.tokens),
        ..plan
    })
}

/// A text that is generated: tokens of its prompt, which are computed together, and of all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Generated {
    pub prompt: usize,
    pub tokens: usize,
}

/// Bytes to load a model and to generate a text. The samples of a run are made with everything on
/// the device, whatever the run offloads.
fn generation<L: MemoryLayout>(
    backend: &Counting<L>,
    model: &Config,
    source: &dyn WeightSource,
    settings: &Settings,
    Generated { prompt, tokens }: Generated,
) -> Result<usize, RunError> {
    if tokens == 0 {
        return Ok(0);
    }
    let is_adapter = matches!(settings.trained, Trained::Lora(_));
    let trained = if is_adapter { settings.trained.clone() } else { Trained::Nothing };
    let settings = Settings { trained, positions: tokens, ..settings.clone() };
    let built = build_whole(backend, model, source, &settings, Offload::NONE)?;
    let session = || Session::new(backend, &built.model, &built.parameters, settings.profile);
    session().extend(&vec![0; prompt]).map_err(StepError::from)?;
    session().pretending(tokens - 1).extend(&[0]).map_err(StepError::from)?;
    Ok(backend.bytes_peak())
}

/// One device of a list.
pub struct PlannedStage<'a> {
    pub part: Part,
    /// Devices behind this one.
    pub stages_after: usize,
    /// Whether a device before it trains anything.
    pub trained_before: bool,
    pub settings: &'a Settings,
    pub step: &'a StepSettings,
    /// The rows that show the peak.
    pub rows: &'a [&'a Row],
    /// Whether rows may hold several documents.
    pub packs: bool,
    /// Rows of the largest group.
    pub group_rows: usize,
    /// Gradients of other groups that exist meanwhile.
    pub waiting: usize,
    /// Rows that are evaluated at once; zero if the run does not evaluate.
    pub evaluated: usize,
    pub offload: Offload,
    /// The place among ranks that share the groups of an update, if there are several.
    pub rank: Option<Place>,
}

/// Memory that one device of a list needs, for the micro-batches in flight too.
pub fn stage_memory<L: MemoryLayout>(
    like: &Counting<L>,
    model: &Config,
    source: &dyn WeightSource,
    stage: &PlannedStage<'_>,
) -> Result<MemoryPlan, RunError> {
    let (PlannedStage { part, settings, step, rows, .. }, offload) = (stage, stage.offload);
    let backend = like.emptied();
    let built = build_placed(&backend, model, source, settings, part, offload)?;
    let with_moments = stage.rank.is_none_or(|place| !place.is_sharded);
    let trainer = Trainer::placed(backend.clone(), built, Placement::new(offload, with_moments, 1))?;
    let alone = |trainer| Alone { trainer, stages_after: stage.stages_after, trained_before: stage.trained_before };
    let (packs, waiting, evaluated) = (stage.packs, stage.waiting, stage.evaluated);
    let (hidden, rank) = (model.hidden, stage.rank);
    let update = Counted { step, rows, packs, waiting, evaluated, hidden, rank };
    let mut plan = counted(&backend, trainer, alone, &update)?;
    // The batches of a group stay until it is done; those of rows that were not counted are added.
    let before = backend.bytes();
    let place = BatchPosition::of_evaluation(0);
    let batch = Batch::of_part(&backend, &rows[..1], place, part);
    let each = backend.bytes() - before;
    drop(batch);
    let more = each * stage.group_rows.saturating_sub(rows.len() / step.gradient_groups);
    plan.bytes_peak += more;
    plan.heap_bytes = plan.heap_bytes.map(|bytes| bytes + more);
    *plan.items.entry(Item::Activations).or_default() += more;
    Ok(plan)
}

/// Micro-batches with rows so short that their buffers are small show how large the range of small
/// buffers becomes (`heap.rs`): the longest such rows, and these parts of them.
pub const SHORT: [usize; 3] = [1, 2, 4];

/// Tokens of such a row: `width` numbers of all rows of a micro-batch are small.
pub fn short_row(tokens: usize, width: usize, part: usize) -> usize {
    ((SMALL_MAX - 1) / size_of::<f32>() / width.max(1) / part).clamp(2, tokens.max(2))
}

/// What is counted of a run.
struct Counted<'a> {
    step: &'a StepSettings,
    rows: &'a [&'a Row],
    packs: bool,
    waiting: usize,
    evaluated: usize,
    hidden: usize,
    rank: Option<Place>,
}

impl Counted<'_> {
    /// An update over `rows`, as a single process or a rank makes it: gradients of earlier groups
    /// wait, and are added at the end. Returns the work that was done before its own.
    fn take<L: MemoryLayout, E: Engine>(
        &self,
        backend: &Counting<L>,
        engine: &mut E,
        exchange: Option<&Exchange>,
        rows: &[&Row],
        number: u64,
    ) -> Result<BTreeMap<&'static str, Work>, StepError> {
        let update = Update::new(rows, number);
        update.check()?;
        let mut leaf = |_, group| engine.group_gradients(&update, group, self.step).map(|(gradients, _)| gradients);
        let waiting = (0..self.waiting).map(|_| leaf(0, 0..1)).collect::<Result<Vec<_>, _>>()?;
        let before = backend.work();
        let messages = exchange.map(|exchange| exchange.while_computing(backend));
        let groups = Groups::new(rows.len(), self.step.gradient_groups);
        let sum = groups.reduce(&mut leaf, &mut |left, right| engine.add(left, right))?;
        let sum = sum.expect("every group has a row");
        let mut sum = waiting.into_iter().rev().try_fold(sum, |sum, left| engine.add(left, sum))?;
        if let Some((exchange, messages)) = exchange.zip(messages) {
            exchange.update(backend, engine, sum, messages, (number, self.step))?;
        } else {
            engine.combine(&mut sum)?;
            engine.clip_and_apply(&mut sum, number, 0.0, self.step)?;
        }
        Ok(before)
    }
}

/// Counts two steps of an engine around `trainer`; on a device whose heap is known also steps over
/// shorter rows. With packing, also a step over short documents; with evaluation, one after it.
fn counted<L: MemoryLayout, E: Engine>(
    backend: &Counting<L>,
    trainer: Trainer<Counting<L>>,
    engine: impl FnOnce(Trainer<Counting<L>>) -> E,
    update: &Counted<'_>,
) -> Result<MemoryPlan, RunError> {
    let Counted { step, rows, packs, evaluated, hidden, rank, .. } = *update;
    let lengths: Vec<usize> = trainer.tensors().iter().map(TrainedTensor::length).collect();
    let (trained_count, largest) = (lengths.iter().sum::<usize>(), lengths.iter().max().copied().unwrap_or(0));
    let on_device = |parameter: &Parameter<_>| match parameter.value {
        Value::Device(_) => parameter.length(),
        Value::Host(_) => 0,
    };
    let values: usize = trainer.parameters.iter().map(|(_, parameter)| on_device(parameter)).sum();
    let bytes_built = backend.bytes();
    let exchange = rank.map(|place| Exchange::new(place, &lengths, trainer.model.tied_table().is_some()));
    let mut engine = engine(trainer);
    let exchange = exchange.as_ref();
    let shard = exchange.map(|exchange| exchange.shard(backend));
    update.take(backend, &mut engine, exchange, rows, 1)?;
    // The second step reuses the buffers of the first, as all later steps do.
    let before = update.take(backend, &mut engine, exchange, rows, 2)?;
    let work = since(&before, backend.work());
    let mut of_other_rows = |number: u64, made: &dyn Fn(usize) -> Row| {
        let made: Vec<Row> = rows.iter().map(|row| made(row.tokens().len())).collect();
        update.take(backend, &mut engine, exchange, &made.iter().collect::<Vec<_>>(), number).map(drop)
    };
    if backend.heap_bytes().is_some() {
        for (number, part) in (3..).zip(SHORT) {
            let short = |tokens| short_row(tokens, hidden * step.micro_batch_size, part);
            of_other_rows(number, &|tokens| longest_rows(1, short(tokens)).remove(0))?;
        }
    }
    if packs {
        of_other_rows(9, &of_short_documents)?;
    }
    let (mut between, mut host_between) = (0, 0);
    if evaluated > 0 {
        let evaluated_rows = vec![rows[0]; evaluated];
        engine.evaluate_rows(&evaluated_rows, 0..evaluated, step.profile, evaluated)?;
        // Slices of trained weights are made again, and are there if a save follows.
        (between, host_between) = (backend.bytes(), backend.host_bytes());
        update.take(backend, &mut engine, exchange, rows, 10)?;
    }
    let holdings = backend.held_at_peak();
    let (between, host_between) = (between.max(backend.bytes()), host_between.max(backend.host_bytes()));
    drop(shard);
    Ok(MemoryPlan {
        host_items: items(&backend.host_held_at_peak(), 0),
        host_bytes_peak: backend.host_bytes_peak(),
        host_bytes_between_steps: host_between,
        bytes_generate: 0,
        heap_bytes_generate: None,
        host_bytes_generate: 0,
        items: items(&holdings, values * size_of::<f32>()),
        bytes_peak: backend.bytes_peak(),
        // Row lengths that the plan did not try may need one more step of the small buffers.
        heap_bytes: backend.heap_bytes().map(|bytes| bytes + SMALL_STEP_BYTES),
        bytes_between_steps: between,
        bytes_save: exchange.map_or(3 * trained_count * size_of::<f32>(), Exchange::save_bytes),
        bytes_resume: bytes_built + largest * size_of::<f32>() + exchange.map_or(0, Exchange::resume_bytes),
        trained_count,
        rows: rows.len(),
        holdings,
        work,
    })
}

/// Groups the holdings into items. `trained` bytes of the weights are trained values.
fn items(holdings: &Holdings, trained: usize) -> BTreeMap<Item, usize> {
    let mut items: BTreeMap<Item, usize> = Item::ALL.into_iter().map(|item| (item, 0)).collect();
    for (holder, bytes) in holdings {
        *items.entry(Item::of(holder)).or_default() += bytes;
    }
    // Fewer are present if the peak occurs while the model is built.
    let trained = trained.min(items[&Item::Weights]);
    *items.entry(Item::Weights).or_default() -= trained;
    *items.entry(Item::Trained).or_default() += trained;
    items
}

/// Work done since `before`.
fn since(
    before: &BTreeMap<&'static str, Work>,
    mut after: BTreeMap<&'static str, Work>,
) -> BTreeMap<&'static str, Work> {
    for (op, work) in &mut after {
        let before = before.get(op).copied().unwrap_or_default();
        work.calls -= before.calls;
        work.multiply_adds -= before.multiply_adds;
        work.outputs -= before.outputs;
    }
    after.retain(|_, work| work.calls > 0);
    after
}

/// BOUND: largest number of tokens of a micro-batch that is counted. The plan lays out a batch on
/// the host at a few bytes per token; a run with more tokens would need terabytes for any model.
pub const TOKENS_MAX: u64 = 1 << 27;

/// A lower bound for any step over a micro-batch of `tokens`: every policy keeps the input of each
/// block.
pub fn least_bytes(model: &Config, tokens: u64) -> u64 {
    let each = model.hidden.saturating_mul(model.layers.len()).saturating_mul(size_of::<f32>());
    tokens.saturating_mul(each as u64)
}

/// The part of an update that shows its peak: groups and rows of each to compute, and the gradients
/// of other groups that wait meanwhile. Two micro-batches of a group are enough, since further ones
/// reuse their buffers, and so are two groups that are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeakOfUpdate {
    pub groups: usize,
    pub rows: usize,
    pub waiting: usize,
}

impl PeakOfUpdate {
    pub fn new(rows: usize, groups: usize, micro_batch_size: usize) -> Self {
        Self::of_stage(rows, groups, micro_batch_size, 0)
    }

    /// On a device with `stages_after` behind it, which holds a micro-batch for each of them too.
    pub fn of_stage(rows: usize, groups: usize, micro_batch_size: usize, stages_after: usize) -> Self {
        let at_once = Groups::new(rows, groups).gradients_at_once();
        Self::of(at_once, rows.div_ceil(groups), micro_batch_size, stages_after)
    }

    /// On one of several ranks.
    pub fn of_rank(place: Place, micro_batch_size: usize, stages_after: usize) -> Self {
        Self::of(place.gradients_at_once(), place.group_rows(), micro_batch_size, stages_after)
    }

    fn of(at_once: usize, group_rows: usize, micro_batch_size: usize, stages_after: usize) -> Self {
        let groups = at_once.min(2);
        let rows = groups * group_rows.min((stages_after + 2) * micro_batch_size);
        Self { groups, rows, waiting: at_once - groups }
    }
}

/// Rows of zeros, each of the maximum length: the worst case of a config.
pub fn longest_rows(count: usize, tokens: usize) -> Vec<Row> {
    vec![Row::document(vec![0; tokens], vec![true; tokens]); count]
}

/// A row of the shortest documents that have a target: ops pad each of them.
pub fn of_short_documents(tokens: usize) -> Row {
    let starts = (0..tokens).step_by(2).chain([tokens]).collect();
    Row::new(vec![0; tokens], vec![true; tokens], starts)
}
