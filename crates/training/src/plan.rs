//! Memory of a run before anything is loaded: the real build and the real training step on the
//! backend that counts, so the plan cannot disagree with the run. Every buffer is known by the line
//! of code that asked for it; items are groups of such lines.
//!
//! Beside the device's memory stands what the host holds while a checkpoint is written, all trained
//! tensors and their moments, and while one is read back: one tensor.

use crate::prepare::RunError;
use crate::row::Row;
use crate::step::{StepSettings, Trainer};
use isobit_kernels::plan::{Counting, Holder, Holdings, Kind, MemoryLayout, Work};
use isobit_models::build::Settings;
use isobit_models::{Config, WeightSource, build};
use std::collections::BTreeMap;

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Item {
    /// Frozen weights and the tables of positions.
    Weights,
    /// Trained tensors in float32 and their slices.
    Trained,
    Gradients,
    /// Moments of the optimizer.
    Optimizer,
    /// What the tape holds, and the micro-batch itself.
    Activations,
    /// Room that ops work in.
    Workspace,
}

impl Item {
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
        }
    }

    /// By the crate and file that asked; trained tensors are among the weights until they are told
    /// apart by their number.
    fn of(holder: &Holder) -> Self {
        let file = holder.file.replace('\\', "/");
        let is_in = |part: &str| file.contains(part);
        match holder.kind {
            _ if is_in("models/") => Self::Weights,
            Kind::Weight => Self::Trained,
            Kind::Buffer("u8") => Self::Workspace,
            _ if is_in("autograd/src/parameters.rs") => Self::Gradients,
            _ if is_in("training/src/step.rs") => Self::Optimizer,
            _ => Self::Activations,
        }
    }
}

/// What a run needs on its device and beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryPlan {
    /// At the moment when it is most.
    pub items: BTreeMap<Item, usize>,
    /// Their sum: the most bytes that are held at once while the model is built and trained.
    pub bytes_peak: usize,
    /// What stays on the device from step to step.
    pub bytes_between_steps: usize,
    /// On the host while a checkpoint is written.
    pub bytes_save: usize,
    /// On the device and the host together while a run is put where it was: the model, its moments,
    /// and one tensor of the file.
    pub bytes_resume: usize,
    /// Numbers that are trained.
    pub trained_count: usize,
    /// Every line of code that held memory at the peak.
    pub holdings: Holdings,
    /// What the ops of one step do.
    pub work: BTreeMap<&'static str, Work>,
}

impl MemoryPlan {
    /// The most bytes if host and device are the same memory: a step, a save between steps, or
    /// going on from a checkpoint.
    pub fn bytes_on_host(&self) -> usize {
        self.bytes_peak.max(self.bytes_between_steps + self.bytes_save).max(self.bytes_resume)
    }
}

/// Memory of training `model` with updates over `rows`. The source need not have numbers
/// (`isobit_models::Shapes`).
pub fn memory<L: MemoryLayout>(
    like: L,
    model: &Config,
    source: &dyn WeightSource,
    settings: &Settings,
    step: &StepSettings,
    rows: &[&Row],
) -> Result<MemoryPlan, RunError> {
    let backend = Counting::new(like);
    let built = build(&backend, model, source, settings)?;
    let trained_count: usize = built.parameters.iter().map(|(_, parameter)| parameter.length()).sum();
    let largest = built.parameters.iter().map(|(_, parameter)| parameter.length()).max().unwrap_or(0);
    let mut trainer = Trainer::new(backend.clone(), built);
    let bytes_built = backend.bytes();
    trainer.step(rows, 1, 0.0, step)?;
    let before = backend.work();
    // The second step finds the buffers of the first, as all further ones do.
    trainer.step(rows, 2, 0.0, step)?;
    let holdings = backend.held_at_peak();
    Ok(MemoryPlan {
        items: items(&holdings, trained_count * size_of::<f32>()),
        bytes_peak: backend.bytes_peak(),
        bytes_between_steps: backend.bytes(),
        bytes_save: 3 * trained_count * size_of::<f32>(),
        bytes_resume: bytes_built + largest * size_of::<f32>(),
        trained_count,
        holdings,
        work: since(&before, backend.work()),
    })
}

/// Groups what was held. Of the weights, `trained` bytes are values that are trained.
fn items(holdings: &Holdings, trained: usize) -> BTreeMap<Item, usize> {
    let mut items: BTreeMap<Item, usize> = Item::ALL.into_iter().map(|item| (item, 0)).collect();
    for (holder, bytes) in holdings {
        *items.entry(Item::of(holder)).or_default() += bytes;
    }
    // Less than all of them are there if the peak is while the model is built.
    let trained = trained.min(items[&Item::Weights]);
    *items.entry(Item::Weights).or_default() -= trained;
    *items.entry(Item::Trained).or_default() += trained;
    items
}

/// What was done after `before`.
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

/// BOUND: tokens of a micro-batch that are counted. The plan lays a batch out on the host, some
/// bytes a token; a run of more tokens would need terabytes for any model.
pub const TOKENS_MAX: u64 = 1 << 27;

/// Less than any step over a micro-batch of `tokens` needs: under every policy the input of each
/// block is kept.
pub fn least_bytes(model: &Config, tokens: u64) -> u64 {
    let each = model.hidden.saturating_mul(model.layers.len()).saturating_mul(size_of::<f32>());
    tokens.saturating_mul(each as u64)
}

/// Rows of a step as long as they may be, of zeros: the worst case of a config.
pub fn longest_rows(count: usize, tokens: usize) -> Vec<Row> {
    vec![Row::document(vec![0; tokens], vec![true; tokens]); count]
}
