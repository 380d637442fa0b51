//! Every config key, one row each: section, canonical name, aliases, type, default, whether it can
//! influence the result, and what it is for. Parsing, resolving, printing, the digest, `init` and
//! `docs/config.md` all read this table.

use super::foreign;
use super::suggest::nearest;
use super::value::Value;
use crate::data::DATE_DEFAULT;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Section {
    Top,
    Adapter,
    Datasets,
    Eval,
    Training,
}

impl Section {
    pub const NAMED: [Self; 4] = [Self::Adapter, Self::Datasets, Self::Eval, Self::Training];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Top => "",
            Self::Adapter => "adapter",
            Self::Datasets => "datasets",
            Self::Eval => "eval",
            Self::Training => "training",
        }
    }

    /// As written in a file; empty for the top level.
    pub const fn heading(self) -> &'static str {
        match self {
            Self::Top => "",
            Self::Adapter => "[adapter]",
            Self::Datasets => "[[datasets]]",
            Self::Eval => "[eval]",
            Self::Training => "[training]",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    Switch,
    SwitchOrText,
    Whole,
    /// Accepts whole numbers and turns them into floats.
    Number,
    /// Kept as typed: a whole number is a count, a fraction a share.
    CountOrShare,
    Text,
    Texts,
    TextOrTexts,
    Wholes,
    TableOfWholes,
    /// Whole numbers by name, or in the order of another key.
    Counts,
    TableOfNumbers,
    /// Values of any type.
    Table,
}

/// The value of a key that is not given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fallback {
    /// None: it must be given.
    Required,
    /// An empty list or table, or no choice.
    Unset,
    Off,
    On,
    Integer(u64),
    Float(f64),
    Str(&'static str),
    /// Depends on other keys, as described.
    Depends(&'static str),
}

pub struct Key {
    pub section: Section,
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub kind: ValueKind,
    pub default: Fallback,
    /// Whether it can influence weights, metrics or the choice of the best checkpoint, and so
    /// belongs to the digest.
    pub influences: bool,
    pub help: &'static str,
}

const YES: bool = true;
const NO: bool = false;

const fn key(
    section: Section,
    name: &'static str,
    aliases: &'static [&'static str],
    kind: ValueKind,
    default: Fallback,
    influences: bool,
    help: &'static str,
) -> Key {
    Key { section, name, aliases, kind, default, influences, help }
}

use Fallback::{Depends, Float, Integer, Off, On, Required, Str, Unset};

use Section::{Adapter, Datasets, Eval, Top, Training};
use ValueKind::{
    CountOrShare, Counts, Number, Switch, SwitchOrText, Table, TableOfNumbers, TableOfWholes, Text, TextOrTexts, Texts,
    Whole, Wholes,
};

/// Seconds that ranks wait for each other, unless a config says otherwise.
pub const RANK_TIMEOUT_DEFAULT: u32 = 600;

/// Paths do not influence the result: the contents of the files do, and they have their own
/// digests.
#[rustfmt::skip]
pub const KEYS: &[Key] = &[
    key(Top, "base_model", &["model_name_or_path", "model"], Text, Required, NO, "folder of the model in Hugging Face layout"),
    key(Top, "data_workers", &["dataloader_num_workers", "workers"], Whole, Integer(1), NO, "threads that prepare data"),
    key(Top, "date", &[], Text, Str(DATE_DEFAULT), YES, "date that chat templates take as today, YYYY-MM-DD"),
    key(Top, "device", &["devices"], TextOrTexts, Str("cpu"), NO, "cpu, opencl:0, cuda:0, hip:0, or auto: the first card that works and as many more as the run needs, else the CPU; a list divides the layers among its devices"),
    key(Top, "device_map", &[], Counts, Unset, NO, "layers of each device of a list: { \"cuda:0\" = 14, cpu = 14 }, or [14, 14] in its order; unset: in proportion to the memory of the cards, one for a CPU beside them, moved until all fit"),
    key(Top, "devices_by_rank", &[], Texts, Unset, NO, "the device of each MPI rank, instead of `device`: [\"cuda:0\", \"cpu\"]"),
    key(Top, "generate_prompts", &[], Texts, Unset, NO, "prompts that are continued greedily by the model before and after training, for samples.json and the report"),
    key(Top, "generate_tokens", &[], Whole, Integer(64), NO, "the most tokens of each such text"),
    key(Top, "load_in_4bit", &[], Switch, Depends("false; with resume_from, as that adapter was trained"), YES, "quantise the linear layers of a 16- or 32-bit base to 4 bits while it is loaded, for LoRA"),
    key(Top, "offload", &[], TextOrTexts, Unset, NO, "what a card keeps in host memory, same bits: [\"optimizer\", \"activations\", \"weights\"] or any of them"),
    key(Top, "output_dir", &[], Text, Required, NO, "folder of the run"),
    key(Top, "profile", &[], Text, Str("x2"), YES, "x2, or x3 for the accuracy of float32"),
    key(Top, "rank_timeout", &[], Whole, Integer(RANK_TIMEOUT_DEFAULT as u64), NO, "seconds after which an MPI rank that does not answer counts as lost"),
    key(Top, "report_to", &[], TextOrTexts, Str("none"), NO, "none, html, tensorboard, or a list of them; html rewrites the page report.html in output_dir at every save"),
    key(Top, "report_to_tensorboard", &["tensorboard"], Switch, Off, NO, "also write TensorBoard event files"),
    key(Top, "seed", &[], Whole, Integer(42), YES, "seed of data order, dropout and new adapter weights"),
    key(Top, "threads", &["num_threads"], Whole, Integer(0), NO, "compute threads; 0: one per core, which is also the maximum"),

    key(Datasets, "path", &["file"], Text, Required, NO, "training data: a JSONL, CSV, TSV or Parquet file"),

    key(Eval, "eval_strategy", &["evaluation_strategy", "strategy"], Text, Depends("\"steps\" with eval_steps; else \"epoch\" if there are rows to evaluate on, \"no\" if not"), YES, "no, steps or epoch"),
    key(Eval, "eval_steps", &["steps"], Whole, Unset, YES, "evaluate every N updates"),
    key(Eval, "micro_batch_size", &["per_device_eval_batch_size", "eval_batch_size"], Whole, Depends("that of [training]"), NO, "rows evaluated at once"),
    key(Eval, "path", &["file"], Text, Unset, NO, "evaluation data: a JSONL, CSV, TSV or Parquet file"),
    key(Eval, "val_set_size", &[], CountOrShare, Integer(0), YES, "rows, or share of the rows, held out of the training data for evaluation"),

    key(Training, "adam_beta1", &[], Number, Float(0.9), YES, "decay of the first moment"),
    key(Training, "adam_beta2", &[], Number, Float(0.999), YES, "decay of the second moment"),
    key(Training, "adam_epsilon", &["adam_eps"], Number, Float(1e-8), YES, "added to the root of the second moment"),
    key(Training, "allow_untrainable_rows", &[], Switch, Off, YES, "drop rows without a token to train on instead of stopping"),
    key(Training, "assistant_only_loss", &[], Switch, On, YES, "in conversations, train on the assistant's tokens only"),
    key(Training, "chat_template_kwargs", &["template_vars"], Table, Unset, YES, "variables of the chat template: { enable_thinking = false }"),
    key(Training, "completion_field", &["field_output"], Text, Unset, YES, "field that holds the completion, with prompt_field"),
    key(Training, "completion_only_loss", &["train_on_completions_only"], Switch, On, YES, "in rows of prompt and completion, train on the completion only"),
    key(Training, "drop_special_token_rows", &[], Switch, Off, YES, "drop rows whose text contains the text of a special token"),
    key(Training, "early_stopping_patience", &[], Whole, Integer(0), YES, "stop after N evaluations without improvement; 0: never"),
    key(Training, "gradient_accumulation_steps", &["grad_accumulation_steps"], Whole, Integer(1), NO, "micro-batches per update"),
    key(Training, "gradient_checkpointing", &["activation_checkpointing"], SwitchOrText, Str("full"), NO, "none, selective or full: recomputes activations to save memory, same bits"),
    key(Training, "gradient_groups", &[], Whole, Integer(1), YES, "groups of rows whose gradients are summed separately, then added in a fixed tree"),
    key(Training, "learning_rate", &["lr"], Number, Depends("0.0002 with LoRA, else 0.00002"), YES, "peak learning rate"),
    key(Training, "load_best_model_at_end", &[], Switch, Off, YES, "the final folder holds the best checkpoint, not the last"),
    key(Training, "logging_steps", &[], Whole, Integer(10), NO, "log metrics every N updates"),
    key(Training, "lr_scheduler_type", &["lr_scheduler"], Text, Str("linear"), YES, "constant, constant_with_warmup, linear, cosine or cosine_with_min_lr"),
    key(Training, "max_grad_norm", &["gradient_clipping"], Number, Float(1.0), YES, "gradients are clipped to this norm; 0: no clipping"),
    key(Training, "max_seq_length", &["max_length", "sequence_len", "cutoff_len"], Whole, Integer(1024), YES, "maximum tokens per row; longer rows are truncated"),
    key(Training, "max_steps", &[], Whole, Integer(0), YES, "number of updates, instead of num_epochs; 0 or -1: use num_epochs"),
    key(Training, "metric_for_best", &["metric_for_best_model"], Text, Str("loss"), YES, "metric that decides the best checkpoint: loss"),
    key(Training, "micro_batch_size", &["per_device_train_batch_size", "batch_size"], Whole, Integer(8), NO, "rows computed at once"),
    key(Training, "min_lr", &[], Number, Unset, YES, "final learning rate of cosine_with_min_lr"),
    key(Training, "min_lr_rate", &["min_lr_ratio"], Number, Unset, YES, "the same as a share of learning_rate"),
    key(Training, "num_epochs", &["num_train_epochs", "epochs"], Number, Float(3.0), YES, "passes over the data"),
    key(Training, "prompt_field", &["field_instruction"], Text, Unset, YES, "field that holds the prompt, for data with custom field names"),
    key(Training, "sample_packing", &["packing"], Switch, Off, YES, "pack several rows into one sequence"),
    key(Training, "save_dtype", &[], Text, Str("float32"), NO, "float32, bfloat16 or float16: how the final folder stores weights"),
    key(Training, "save_steps", &[], Whole, Integer(500), NO, "save a checkpoint every N updates"),
    key(Training, "save_strategy", &[], Text, Str("steps"), NO, "no, steps or epoch"),
    key(Training, "save_total_limit", &[], Whole, Integer(0), NO, "newest checkpoints to keep; the best is kept too; 0: all"),
    key(Training, "warmup_ratio", &[], Number, Float(0.0), YES, "warm-up of the learning rate, as a share of the updates"),
    key(Training, "warmup_steps", &[], CountOrShare, Integer(0), YES, "warm-up in updates; below 1, as a share of them"),
    key(Training, "weight_decay", &[], Number, Float(0.0), YES, "decoupled weight decay; not on biases and norms"),

    key(Adapter, "alpha_pattern", &[], TableOfNumbers, Unset, YES, "lora_alpha for modules whose name ends with the entry's"),
    key(Adapter, "exclude_modules", &["lora_exclude_modules"], Texts, Unset, YES, "modules that get no adapter"),
    key(Adapter, "last_blocks", &["num_blocks"], Whole, Integer(1), YES, "blocks to train, counted from the last; the final norm and an untied head are trained with them"),
    key(Adapter, "layers_to_transform", &["lora_layers_to_transform"], Wholes, Unset, YES, "layers that get an adapter; empty: all"),
    key(Adapter, "lora_alpha", &["alpha"], Number, Float(16.0), YES, "the adapter is scaled by lora_alpha / lora_r"),
    key(Adapter, "lora_dropout", &["dropout"], Number, Float(0.0), YES, "share of the adapter's inputs set to zero"),
    key(Adapter, "lora_r", &["r", "rank", "lora_rank"], Whole, Integer(8), YES, "rank of the adapter, 1 to 64"),
    key(Adapter, "lora_target_modules", &["target_modules"], TextOrTexts, Depends("\"all-linear\"; none with lora_target_parameters"), YES, "modules that get an adapter, \"all-linear\", or a regular expression for whole paths"),
    key(Adapter, "lora_target_parameters", &["target_parameters"], Texts, Unset, YES, "tensors that get an adapter: fused experts, by the end of their names"),
    key(Adapter, "modules_to_save", &["lora_modules_to_save"], Texts, Unset, YES, "modules trained whole and saved with the adapter: lm_head, embed_tokens"),
    key(Adapter, "rank_pattern", &[], TableOfWholes, Unset, YES, "lora_r for modules whose name ends with the entry's"),
    key(Adapter, "resume_from", &["lora_model_dir"], Text, Unset, NO, "adapter folder, or run, whose adapter the run starts from"),
    key(Adapter, "type", &["adapter_type"], Text, Str("lora"), YES, "lora, full, or last_blocks: the last blocks, the final norm and an untied head"),
    key(Adapter, "use_rslora", &["rslora"], Switch, Off, YES, "scale by lora_alpha / sqrt(lora_r)"),
];

impl Key {
    pub(super) fn find(section: Section, typed: &str) -> Option<&'static Self> {
        in_section(section).find(|key| key.name == typed || key.aliases.contains(&typed))
    }

    /// The key with a canonical name; callers use no other names.
    pub(super) fn named(section: Section, name: &str) -> &'static Self {
        let found = in_section(section).find(|key| key.name == name);
        found.unwrap_or_else(|| panic!("the table of keys has no {name} in {section:?}"))
    }

    /// The keys with that name in any section.
    pub(super) fn anywhere(typed: &str) -> Vec<&'static Self> {
        KEYS.iter().filter(|key| key.name == typed || key.aliases.contains(&typed)).collect()
    }

    /// As `--set` takes it: `training.learning_rate`.
    pub fn dotted(&self) -> String {
        match self.section {
            Section::Top => self.name.to_string(),
            section => format!("{}.{}", section.name(), self.name),
        }
    }
}

fn in_section(section: Section) -> impl Iterator<Item = &'static Key> {
    KEYS.iter().filter(move |key| key.section == section)
}

impl Fallback {
    /// The value in its config form, if there is one.
    pub fn value(self) -> Option<Value> {
        match self {
            Required | Unset | Depends(_) => None,
            Off => Some(Value::Switch(false)),
            On => Some(Value::Switch(true)),
            // BOUND: the table holds small numbers.
            Integer(integer) => i64::try_from(integer).ok().map(Value::Whole),
            Float(float) => Some(Value::Number(float)),
            Str(text) => Some(Value::Text(text.to_string())),
        }
    }
}

/// What to suggest for an unknown key: the same name elsewhere, what replaces a key of another
/// trainer, a similar name here, a similar name elsewhere.
pub(super) fn hint_for_unknown(section: Section, typed: &str) -> String {
    if let Some(key) = Key::anywhere(typed).first() {
        return match key.section {
            Section::Top => format!("`{}` belongs at the top of the file, before the first [section]", key.name),
            home => format!("`{}` belongs under {}", key.name, home.heading()),
        };
    }
    if let Some(hint) = foreign::hint(typed) {
        return hint.to_string();
    }
    let here = in_section(section).flat_map(|key| std::iter::once(key.name).chain(key.aliases.iter().copied()));
    let sections = Section::NAMED.iter().map(|named| named.name());
    let candidates = here.chain(sections.filter(|_| section == Section::Top));
    if let Some(name) = nearest(typed, candidates) {
        return format!("did you mean `{name}`?");
    }
    let elsewhere = KEYS.iter().flat_map(|key| std::iter::once(key.name).chain(key.aliases.iter().copied()));
    match nearest(typed, elsewhere).and_then(|name| Key::anywhere(name).first().copied()) {
        Some(key) if key.section == Section::Top => format!("did you mean `{}` at the top of the file?", key.name),
        Some(key) => format!("did you mean `{}` under {}?", key.name, key.section.heading()),
        None => {
            let names: Vec<&str> = in_section(section).map(|key| key.name).collect();
            format!("known keys here: {}", names.join(", "))
        }
    }
}

impl ValueKind {
    pub const fn expected(self) -> &'static str {
        match self {
            Self::Switch => "true or false",
            Self::SwitchOrText => "true, false or a string",
            Self::Whole => "a whole number",
            Self::Number | Self::CountOrShare => "a number",
            Self::Text => "a string",
            Self::Texts => "a list of strings",
            Self::TextOrTexts => "a string or a list of strings",
            Self::Wholes => "a list of whole numbers",
            Self::TableOfWholes => "a table of names and whole numbers",
            Self::Counts => "a table of names and whole numbers, or a list of whole numbers",
            Self::TableOfNumbers => "a table of names and numbers",
            Self::Table => "a table of names and values",
        }
    }

    /// The value in the form of this kind, or None if it has a different type.
    pub(super) fn take(self, value: Value) -> Option<Value> {
        match (self, value) {
            (Self::Switch | Self::SwitchOrText, value @ Value::Switch(_))
            | (Self::Text | Self::TextOrTexts | Self::SwitchOrText, value @ Value::Text(_))
            | (Self::Whole | Self::CountOrShare, value @ Value::Whole(_))
            | (Self::Number | Self::CountOrShare, value @ Value::Number(_))
            | (Self::Table, value @ Value::Table(_)) => Some(value),
            (Self::Number, Value::Whole(whole)) => as_number(whole),
            (Self::Texts | Self::TextOrTexts, Value::List(items)) => each(items, Self::Text),
            (Self::Wholes | Self::Counts, Value::List(items)) => each(items, Self::Whole),
            (Self::Wholes, value @ Value::Whole(_)) => Some(Value::List(vec![value])),
            (Self::TableOfWholes | Self::Counts, Value::Table(entries)) => every(entries, Self::Whole),
            (Self::TableOfNumbers, Value::Table(entries)) => every(entries, Self::Number),
            _ => None,
        }
    }
}

/// Whole numbers that a float holds exactly.
fn as_number(whole: i64) -> Option<Value> {
    (whole.unsigned_abs() <= 1 << 53).then_some(Value::Number(whole as f64))
}

fn each(items: Vec<Value>, kind: ValueKind) -> Option<Value> {
    items.into_iter().map(|item| kind.take(item)).collect::<Option<_>>().map(Value::List)
}

fn every(entries: BTreeMap<String, Value>, kind: ValueKind) -> Option<Value> {
    entries.into_iter().map(|(name, item)| Some((name, kind.take(item)?))).collect::<Option<_>>().map(Value::Table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_stands_for_two_keys_of_a_section() {
        for section in [Section::Top].into_iter().chain(Section::NAMED) {
            let mut names: Vec<&str> = in_section(section)
                .flat_map(|key| std::iter::once(key.name).chain(key.aliases.iter().copied()))
                .collect();
            names.sort_unstable();
            let all = names.len();
            names.dedup();
            assert_eq!(names.len(), all, "{section:?}");
        }
    }

    /// Resolving takes a default from the table, or agrees with it.
    #[test]
    fn giving_a_default_changes_nothing() {
        let minimal = "base_model = \"m\"\noutput_dir = \"o\"\n[[datasets]]\npath = \"d\"\n";
        let resolved = |sets: &[String]| super::super::parse("run.toml", minimal, sets).expect("a config").run;
        for key in KEYS {
            let Some(value) = key.default.value() else { continue };
            let mut sets = Vec::new();
            if key.name == "last_blocks" {
                sets.push("adapter.type=last_blocks".to_string());
            }
            let absent = resolved(&sets);
            sets.push(format!("{}={value}", key.dotted()));
            assert_eq!(resolved(&sets), absent, "{}", key.dotted());
        }
    }

    #[test]
    fn hints_name_the_right_place() {
        assert_eq!(hint_for_unknown(Section::Training, "lerning_rate"), "did you mean `learning_rate`?");
        assert_eq!(hint_for_unknown(Section::Top, "learning_rate"), "`learning_rate` belongs under [training]");
        assert_eq!(hint_for_unknown(Section::Top, "trainin"), "did you mean `training`?");
        assert_eq!(hint_for_unknown(Section::Training, "lora_rr"), "did you mean `lora_r` under [adapter]?");
        assert_eq!(hint_for_unknown(Section::Training, "gradient_group"), "did you mean `gradient_groups`?");
        assert!(hint_for_unknown(Section::Adapter, "zzz").starts_with("known keys here: alpha_pattern, "));
        assert!(hint_for_unknown(Section::Training, "bf16").starts_with("not needed: "));
        assert!(hint_for_unknown(Section::Top, "load_in_8bit").starts_with("not yet: "));
        assert_eq!(
            hint_for_unknown(Section::Training, "load_in_4bit"),
            "`load_in_4bit` belongs at the top of the file, before the first [section]"
        );
    }
}
