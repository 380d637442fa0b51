//! The high form: a complete run. Nothing here stands for "the default", and nothing below it reads
//! flags or files.
#![expect(clippy::float_arithmetic, reason = "the length of a run in epochs is a float, on the host")]

use super::value::Value;
use isobit_autograd::{Offload, Policy};
use isobit_models::Targets;
use isobit_numerics::slices::Profile;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    pub base_model: PathBuf,
    pub output_dir: PathBuf,
    pub seed: u64,
    /// More than one: the layers are divided among them, in this order.
    pub devices: Vec<Device>,
    /// Layers of each device of a list; empty: divided by memory.
    pub device_layers: Vec<u32>,
    pub profile: Profile,
    /// Whether linear layers are quantised while the base is loaded; None: if those of the adapter
    /// that the run starts from were.
    pub load_in_4bit: Option<bool>,
    /// 0: every core of the machine.
    pub threads: u32,
    pub data_workers: u32,
    /// Seconds after which a rank that does not answer counts as lost.
    pub rank_timeout: u32,
    /// What a card keeps in host memory.
    pub offload: Offload,
    /// The devices of each rank; empty: `devices`, on every rank.
    pub devices_by_rank: Vec<Vec<Device>>,
    /// `YYYY-MM-DD`, for chat templates.
    pub date: String,
    pub report_to_tensorboard: bool,
    /// Whether the page `report.html` is rewritten at every save.
    pub report_to_html: bool,
    /// Continued before and after training, for people to compare.
    pub generate_prompts: Vec<String>,
    /// The most tokens of each such text.
    pub generate_tokens: u32,
    /// At least one file.
    pub datasets: Vec<PathBuf>,
    pub eval: Eval,
    pub training: Training,
    pub adapter: Adapter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Auto,
    Cpu,
    OpenCl(u32),
    Cuda(u32),
    Hip(u32),
}

impl fmt::Display for Device {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => write!(out, "auto"),
            Self::Cpu => write!(out, "cpu"),
            Self::OpenCl(index) => write!(out, "opencl:{index}"),
            Self::Cuda(index) => write!(out, "cuda:{index}"),
            Self::Hip(index) => write!(out, "hip:{index}"),
        }
    }
}

/// Where the text of a row is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fields {
    /// Under names that identify the format, detected per file.
    Detected,
    Named {
        prompt: String,
        completion: String,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Eval {
    pub rows: EvalRows,
    pub every: Every,
    pub micro_batch_size: u32,
}

/// The evaluation data.
#[derive(Clone, Debug, PartialEq)]
pub enum EvalRows {
    None,
    File(PathBuf),
    /// This many rows held out of the training data.
    Count(u64),
    /// A share of the training data, above 0 and below 1, held out.
    Share(f64),
}

/// How often something happens, counted in updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Every {
    Never,
    Steps(u64),
    Epoch,
}

impl Every {
    /// Whether it is due after `step` completed updates.
    pub fn is_due(self, step: u64, steps: Steps) -> bool {
        match self {
            Self::Never => false,
            Self::Steps(every) => step > 0 && step.is_multiple_of(every),
            Self::Epoch => step > 0 && (step.is_multiple_of(steps.per_epoch) || step == steps.total),
        }
    }
}

#[expect(clippy::struct_excessive_bools, reason = "each is a key of the config that people know as true or false")]
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    pub max_seq_length: u32,
    pub sample_packing: bool,
    pub fields: Fields,
    pub assistant_only_loss: bool,
    pub completion_only_loss: bool,
    pub allow_untrainable_rows: bool,
    pub drop_special_token_rows: bool,
    /// Variables of the chat template.
    pub chat_template_kwargs: BTreeMap<String, Value>,
    pub micro_batch_size: u32,
    pub gradient_accumulation_steps: u32,
    pub gradient_groups: u32,
    pub length: Length,
    pub learning_rate: f64,
    pub scheduler: Scheduler,
    pub warmup: Warmup,
    pub weight_decay: f64,
    pub adam_beta1: f64,
    pub adam_beta2: f64,
    pub adam_epsilon: f64,
    /// 0: no clipping.
    pub max_grad_norm: f64,
    /// The setting `gradient_checkpointing`.
    pub recomputation: Policy,
    pub save: Every,
    pub save_dtype: SaveDtype,
    /// 0: every checkpoint is kept.
    pub save_total_limit: u32,
    pub logging_steps: u64,
    pub load_best_model_at_end: bool,
    pub metric_for_best: Metric,
    /// 0: never stop early.
    pub early_stopping_patience: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Length {
    Epochs(f64),
    Steps(u64),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scheduler {
    Constant,
    ConstantWithWarmup,
    Linear,
    Cosine,
    CosineWithMinLr { rate: f64 },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Warmup {
    Steps(u64),
    /// A share of all updates, rounded up.
    Share(f64),
}

/// How the final folder stores numbers. Checkpoints are always float32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveDtype {
    Float32,
    Bfloat16,
    Float16,
}

/// What decides which checkpoint is best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// The evaluation loss; lower is better.
    Loss,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Adapter {
    Lora(Box<Lora>),
    /// Every weight.
    Full,
    /// Every weight of the last blocks.
    LastBlocks(u32),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    pub r: u32,
    pub alpha: f64,
    pub dropout: f64,
    pub targets: Targets,
    /// Tensors that do not belong to a linear module.
    pub target_parameters: Vec<String>,
    pub use_rslora: bool,
    /// Empty: all.
    pub layers_to_transform: Vec<u32>,
    pub rank_pattern: BTreeMap<String, u32>,
    pub alpha_pattern: BTreeMap<String, f64>,
    pub exclude_modules: Vec<String>,
    /// Modules that are trained whole: the head, the embedding table.
    pub modules_to_save: Vec<String>,
    /// The adapter to start from.
    pub resume_from: Option<PathBuf>,
}

/// How long a run is, in updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps {
    pub per_epoch: u64,
    pub total: u64,
}

impl Run {
    /// Rows of one update: the only thing about the micro-batch split that can influence a result.
    pub fn rows_per_update(&self) -> u64 {
        u64::from(self.training.micro_batch_size) * u64::from(self.training.gradient_accumulation_steps)
    }

    /// Number of updates for that many training rows (sequences, when packed). The last, shorter
    /// group of an epoch still makes an update: `per_epoch = max(⌈rows / rows_per_update⌉, 1)`,
    /// `total = max_steps`, or `⌈epochs · per_epoch⌉`.
    pub fn steps(&self, row_count: u64) -> Steps {
        let per_epoch = row_count.div_ceil(self.rows_per_update()).max(1);
        let total = match self.training.length {
            Length::Steps(steps) => steps,
            // BOUND: epochs are at most 10⁶ and float to integer saturates, so a huge product stays
            // a number.
            Length::Epochs(epochs) => (libm::ceil(epochs * per_epoch as f64) as u64).max(1),
        };
        Steps { per_epoch, total }
    }

    pub fn has_eval(&self) -> bool {
        self.eval.rows != EvalRows::None
    }
}
