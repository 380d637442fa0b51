//! A run as TOML under canonical names, sorted, with every key written out; and the digest of the
//! keys that can influence the result. Both walk the same list, so the digest covers what is
//! printed.

use super::key::{Key, Section};
use super::run::{Adapter, Device, EvalRows, Every, Fields, Length, Lora, Metric, Run, SaveDtype, Scheduler, Warmup};
use super::value::Value;
use isobit_models::Targets;
use isobit_proof::receipt::config_digest;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

type Lines = BTreeMap<&'static str, Value>;

impl Run {
    /// The resolved config; parsing it gives this run again.
    pub fn to_toml(&self) -> String {
        let mut out = String::new();
        put_section(&mut out, Section::Top, &top(self));
        put_section(&mut out, Section::Adapter, &adapter(&self.adapter));
        for dataset in &self.datasets {
            put_section(&mut out, Section::Datasets, &Lines::from([("path", path(dataset))]));
        }
        put_section(&mut out, Section::Eval, &eval(self));
        put_section(&mut out, Section::Training, &training(self));
        out
    }

    /// BLAKE3, in hex, of everything here that can influence weights, metrics or the best
    /// checkpoint. Left out: folders and files (their contents have digests of their own), devices,
    /// threads, workers, how an update is split into micro-batches, recomputation, saving and
    /// logging.
    pub fn digest(&self) -> String {
        config_digest(&self.influences()).to_string()
    }

    /// Where two runs differ in keys that can influence their results: key, this run's value, the
    /// other run's value.
    pub fn differences(&self, other: &Self) -> Vec<(String, String, String)> {
        let [ours, theirs] = [self, other].map(Self::influences);
        differing(&ours, &theirs).map(|(key, [ours, theirs])| (key, ours, theirs)).collect()
    }

    /// All keys in which two runs differ.
    pub fn all_differences(&self, other: &Self) -> Vec<KeyOfRuns> {
        let found = [true, false].into_iter().flat_map(|influences| {
            let [ours, theirs] = [self, other].map(|run| run.keys(influences));
            let all: Vec<_> = differing(&ours, &theirs).collect();
            all.into_iter().map(move |(key, values)| KeyOfRuns { key, values, influences })
        });
        found.collect()
    }

    /// Dotted keys and values that the digest covers.
    pub fn influences(&self) -> BTreeMap<String, String> {
        let mut all = self.keys(true);
        all.insert("training.rows_per_update".to_string(), self.rows_per_update().to_string());
        all
    }

    /// Dotted keys and values that must be the same on all ranks: those that influence the result,
    /// and those that decide when something is saved.
    pub fn keys_of_ranks(&self) -> BTreeMap<String, String> {
        let saves = |key: &String| key.starts_with("training.save_s");
        let others = self.keys(false).into_iter().filter(|(key, _)| saves(key));
        self.influences().into_iter().chain(others).collect()
    }

    /// Every key with its value, in the order of the sections.
    pub fn all_keys(&self) -> Vec<RunKey> {
        let [yes, no] = [true, false].map(|influences| {
            self.keys(influences).into_iter().map(move |(name, value)| RunKey { name, value, influences })
        });
        let mut all: Vec<RunKey> = yes.chain(no).collect();
        all.sort_by(|a, b| (a.name.contains('.'), &a.name).cmp(&(b.name.contains('.'), &b.name)));
        all
    }

    /// Dotted keys and values: those that influence the result, or the others.
    fn keys(&self, influences: bool) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        let mut put = |section: Section, prefix: &str, lines: Lines| {
            let counts = |name: &str| Key::find(section, name).is_some_and(|key| key.influences == influences);
            let counted = lines.into_iter().filter(|(name, _)| counts(name));
            all.extend(counted.map(|(name, value)| (format!("{prefix}{name}"), value.to_string())));
        };
        put(Section::Top, "", top(self));
        put(Section::Adapter, "adapter.", adapter(&self.adapter));
        put(Section::Eval, "eval.", eval(self));
        put(Section::Training, "training.", training(self));
        for (index, dataset) in self.datasets.iter().enumerate() {
            put(Section::Datasets, &format!("datasets.{index}."), Lines::from([("path", path(dataset))]));
        }
        all
    }
}

/// A key of a run, as a dotted name, and its value as TOML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunKey {
    pub name: String,
    pub value: String,
    /// Whether it can influence the weights.
    pub influences: bool,
}

/// A key in which two runs differ, as a dotted name, and its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyOfRuns {
    pub key: String,
    pub values: [String; 2],
    /// Whether it can influence the weights.
    pub influences: bool,
}

/// Keys whose values differ; a missing value is a dash.
fn differing<'a>(
    ours: &'a BTreeMap<String, String>,
    theirs: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = (String, [String; 2])> + 'a {
    let keys: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    let shown = |values: &BTreeMap<String, String>, key| values.get(key).map_or("-".to_string(), String::clone);
    let pairs = keys.into_iter().map(move |key| (key.clone(), [shown(ours, key), shown(theirs, key)]));
    pairs.filter(|(_, [ours, theirs])| ours != theirs)
}

fn put_section(out: &mut String, section: Section, lines: &Lines) {
    let put = |out: &mut String| -> std::fmt::Result {
        if section != Section::Top {
            writeln!(out, "\n{}", section.heading())?;
        }
        for (name, value) in lines {
            writeln!(out, "{name} = {value}")?;
        }
        Ok(())
    };
    put(out).expect("writing to a string succeeds");
}

fn text(text: impl Into<String>) -> Value {
    Value::Text(text.into())
}

fn whole(number: impl Into<u64>) -> Value {
    // BOUND: every whole number of a run came from an i64.
    Value::Whole(i64::try_from(number.into()).expect("whole numbers of a config fit in 63 bits"))
}

/// Paths came from TOML strings, so the conversion is lossless.
fn path(path: &Path) -> Value {
    text(path.to_string_lossy())
}

fn top(run: &Run) -> Lines {
    let devices: Vec<String> = run.devices.iter().map(ToString::to_string).collect();
    let mut lines = Lines::from([
        ("base_model", path(&run.base_model)),
        ("data_workers", whole(run.data_workers)),
        ("date", text(&run.date)),
        ("device", if let [device] = &devices[..] { text(device) } else { Value::texts(&devices) }),
        ("output_dir", path(&run.output_dir)),
        ("profile", text(run.profile.name())),
        ("rank_timeout", whole(run.rank_timeout)),
        ("report_to", text(if run.report_to_html { "html" } else { "none" })),
        ("report_to_tensorboard", Value::Switch(run.report_to_tensorboard)),
        ("seed", whole(run.seed)),
        ("threads", whole(run.threads)),
    ]);
    if !run.device_layers.is_empty() {
        lines.insert("device_map", Value::List(run.device_layers.iter().map(|&layers| whole(layers)).collect()));
    }
    if let Some(quantises) = run.load_in_4bit {
        lines.insert("load_in_4bit", Value::Switch(quantises));
    }
    if !run.offload.is_none() {
        lines.insert("offload", Value::texts(&run.offload.names()));
    }
    if !run.generate_prompts.is_empty() {
        lines.insert("generate_prompts", Value::texts(&run.generate_prompts));
        lines.insert("generate_tokens", whole(run.generate_tokens));
    }
    if !run.devices_by_rank.is_empty() {
        let of_rank = |devices: &Vec<Device>| devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        lines.insert("devices_by_rank", Value::texts(&run.devices_by_rank.iter().map(of_rank).collect::<Vec<_>>()));
    }
    lines
}

fn eval(run: &Run) -> Lines {
    let mut lines = match &run.eval.rows {
        EvalRows::None => Lines::from([("val_set_size", whole(0u64))]),
        EvalRows::File(file) => Lines::from([("path", path(file))]),
        EvalRows::Count(rows) => Lines::from([("val_set_size", whole(*rows))]),
        EvalRows::Share(share) => Lines::from([("val_set_size", Value::Number(*share))]),
    };
    put_every(&mut lines, run.eval.every, "eval_strategy", "eval_steps");
    lines.insert("micro_batch_size", whole(run.eval.micro_batch_size));
    lines
}

fn put_every(lines: &mut Lines, every: Every, strategy: &'static str, steps: &'static str) {
    let name = match every {
        Every::Never => "no",
        Every::Epoch => "epoch",
        Every::Steps(_) => "steps",
    };
    lines.insert(strategy, text(name));
    if let Every::Steps(count) = every {
        lines.insert(steps, whole(count));
    }
}

fn training(run: &Run) -> Lines {
    let training = &run.training;
    let mut lines = Lines::from([
        ("adam_beta1", Value::Number(training.adam_beta1)),
        ("adam_beta2", Value::Number(training.adam_beta2)),
        ("adam_epsilon", Value::Number(training.adam_epsilon)),
        ("allow_untrainable_rows", Value::Switch(training.allow_untrainable_rows)),
        ("assistant_only_loss", Value::Switch(training.assistant_only_loss)),
        ("completion_only_loss", Value::Switch(training.completion_only_loss)),
        ("early_stopping_patience", whole(training.early_stopping_patience)),
        ("gradient_accumulation_steps", whole(training.gradient_accumulation_steps)),
        ("gradient_checkpointing", text(training.recomputation.name())),
        ("gradient_groups", whole(training.gradient_groups)),
        ("learning_rate", Value::Number(training.learning_rate)),
        ("load_best_model_at_end", Value::Switch(training.load_best_model_at_end)),
        ("logging_steps", whole(training.logging_steps)),
        ("lr_scheduler_type", text(training.scheduler.name())),
        ("max_grad_norm", Value::Number(training.max_grad_norm)),
        ("max_seq_length", whole(training.max_seq_length)),
        ("metric_for_best", text(training.metric_for_best.name())),
        ("micro_batch_size", whole(training.micro_batch_size)),
        ("sample_packing", Value::Switch(training.sample_packing)),
        ("save_dtype", text(training.save_dtype.name())),
        ("save_total_limit", whole(training.save_total_limit)),
        ("weight_decay", Value::Number(training.weight_decay)),
    ]);
    put_every(&mut lines, training.save, "save_strategy", "save_steps");
    // Newer than the digests of runs that can still be resumed: present only if set.
    if training.drop_special_token_rows {
        lines.insert("drop_special_token_rows", Value::Switch(true));
    }
    if !training.chat_template_kwargs.is_empty() {
        lines.insert("chat_template_kwargs", Value::Table(training.chat_template_kwargs.clone()));
    }
    if let Fields::Named { prompt, completion } = &training.fields {
        lines.extend([("prompt_field", text(prompt)), ("completion_field", text(completion))]);
    }
    match training.length {
        Length::Epochs(epochs) => lines.insert("num_epochs", Value::Number(epochs)),
        Length::Steps(steps) => lines.insert("max_steps", whole(steps)),
    };
    match training.warmup {
        Warmup::Steps(steps) => lines.insert("warmup_steps", whole(steps)),
        Warmup::Share(share) => lines.insert("warmup_ratio", Value::Number(share)),
    };
    if let Scheduler::CosineWithMinLr { rate } = training.scheduler {
        lines.insert("min_lr_rate", Value::Number(rate));
    }
    lines
}

fn adapter(adapter: &Adapter) -> Lines {
    match adapter {
        Adapter::Full => Lines::from([("type", text("full"))]),
        Adapter::LastBlocks(count) => Lines::from([("type", text("last_blocks")), ("last_blocks", whole(*count))]),
        Adapter::Lora(lora) => lora_lines(lora),
    }
}

fn lora_lines(lora: &Lora) -> Lines {
    let ranks = lora.rank_pattern.iter().map(|(name, rank)| (name.clone(), whole(*rank)));
    let alphas = lora.alpha_pattern.iter().map(|(name, alpha)| (name.clone(), Value::Number(*alpha)));
    let mut lines = Lines::from([
        ("alpha_pattern", Value::Table(alphas.collect())),
        ("exclude_modules", Value::texts(&lora.exclude_modules)),
        ("layers_to_transform", Value::List(lora.layers_to_transform.iter().map(|&layer| whole(layer)).collect())),
        ("lora_alpha", Value::Number(lora.alpha)),
        ("lora_dropout", Value::Number(lora.dropout)),
        ("lora_r", whole(lora.r)),
        (
            "lora_target_modules",
            match &lora.targets {
                Targets::AllLinear => text("all-linear"),
                Targets::Names(names) => Value::texts(names),
                Targets::Pattern(pattern) => text(pattern),
            },
        ),
        ("lora_target_parameters", Value::texts(&lora.target_parameters)),
        ("rank_pattern", Value::Table(ranks.collect())),
        ("type", text("lora")),
        ("use_rslora", Value::Switch(lora.use_rslora)),
    ]);
    if !lora.modules_to_save.is_empty() {
        lines.insert("modules_to_save", Value::texts(&lora.modules_to_save));
    }
    lines.extend(lora.resume_from.as_deref().map(|folder| ("resume_from", path(folder))));
    lines
}

impl Scheduler {
    pub const NAMES: [&'static str; 5] = ["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr"];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::ConstantWithWarmup => "constant_with_warmup",
            Self::Linear => "linear",
            Self::Cosine => "cosine",
            Self::CosineWithMinLr { .. } => "cosine_with_min_lr",
        }
    }
}

impl SaveDtype {
    pub const ALL: [Self; 3] = [Self::Float32, Self::Bfloat16, Self::Float16];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
            Self::Float16 => "float16",
        }
    }
}

impl Metric {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loss => "loss",
        }
    }
}
