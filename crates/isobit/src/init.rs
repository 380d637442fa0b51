//! `isobit init`: a commented config for a model folder and a data file. It first reads both as
//! training would, so problems show up here; the comments come from the table of keys.

use crate::Failure;
use crate::fits;
use crate::model;
use crate::output_path::check_parent;
use crate::stderr::tell;
use crate::units::size;
use isobit_autograd::Policy;
use isobit_models::Config;
use isobit_proof::atomic::{write_atomically, write_new};
use isobit_proof::name::counted;
use isobit_proof::{chain, regular};
use isobit_training::config::{self, KEYS, Section, Value};
use isobit_training::data::{self, DataConfig, Report};
use isobit_training::prepare::{RunError, model_config};
use isobit_training::sealed;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Rows of one update, and passes over the data.
const ROWS_PER_UPDATE: usize = 8;
const EPOCHS: usize = 3;
/// The ways to split an update. Policies are tried first to last, and all splits within each:
/// recomputing activations costs time at every row length (a fifth and more), small micro-batches
/// only if rows are short. Memory is not monotonic: the first split of a policy may need more than
/// the last split of the policy before.
const SPLITS: [usize; 4] = [8, 4, 2, 1];
/// Updates between two checkpoints, at least. All of them are kept, so that any part of the run can
/// be replayed from near.
const SAVES_APART_MIN: usize = 10;
/// With fewer rows than this, none are held out.
const ROWS_TO_HOLD_OUT_FROM: usize = 40;
/// Longer rows are truncated unless the user raises this: memory grows with it.
const LENGTH_MAX: usize = 2048;
const LENGTH_MIN: usize = 64;
/// One part in so many of the memory stays free, if a split can leave it: what other programs take
/// meanwhile must not stop the run.
const FREE_PART: u64 = 5;
/// Column where the comments begin.
const COLUMN: usize = 48;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Model folder in Hugging Face layout, or an isobit run that trained all weights
    model: PathBuf,
    /// Data file: JSONL, a JSON array, CSV, TSV or Parquet
    data: PathBuf,
    /// Config file to write
    #[arg(short, long, value_name = "FILE", default_value = "run.toml")]
    output: PathBuf,
    /// Overwrite an existing config
    #[arg(long)]
    force: bool,
    /// Memory that the run may use, to write a config for the CPU of another machine: 32 (in GiB),
    /// 512MiB, 24GB; default: the memory of this one
    #[arg(long, value_name = "SIZE", value_parser = crate::units::bytes)]
    memory: Option<u64>,
    /// Name of the prompt field, for data with custom field names
    #[arg(long, value_name = "NAME", requires = "completion_field")]
    prompt_field: Option<String>,
    /// Name of the completion field
    #[arg(long, value_name = "NAME", requires = "prompt_field")]
    completion_field: Option<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = &arguments.output;
    if !arguments.force && output.symlink_metadata().is_ok() {
        return Err(exists(output));
    }
    check_replaced(output)?;
    sealed::check_target(output)?;
    // The config of a run may lie in its folder.
    let is_of_run = output.ends_with("config.toml") && output.with_file_name(chain::NAME).is_file();
    if !is_of_run {
        sealed::check_beside_run(output)?;
    }
    for named in [&arguments.model, &arguments.data] {
        if named.to_str().is_none() {
            let message = format!("the name {} is not UTF-8, and a config cannot hold it", named.display());
            return Err(Failure::usage(message, "rename it, or make a link with another name"));
        }
    }
    check_parent(output)?;
    let (config, report) = looked_at(arguments)?;
    let split = fastest(arguments.memory, |split| written(arguments, &config, &report, split))?;
    let text = written(arguments, &config, &report, &split);
    // Something may have appeared meanwhile.
    check_replaced(output)?;
    let put = if arguments.force { write_atomically } else { write_new };
    put(output, text.as_bytes()).map_err(|error| {
        let is_there = !arguments.force && output.symlink_metadata().is_ok();
        if is_there { exists(output) } else { Failure::from(RunError::from(error)) }
    })?;
    let name = output.display();
    let next = if !split.fits {
        format!("`isobit plan {name}` says what would fit")
    } else if !has_weights(arguments, &text, &config)? {
        "the model folder has no weights yet".to_string()
    } else {
        format!("`isobit train {name}` runs it")
    };
    tell(&format!("{}\n{}\nwrote {name}: {next}", found(&report), split.why));
    Ok(())
}

fn exists(output: &Path) -> Failure {
    let message = format!("{} already exists", output.display());
    Failure::usage(message, "add `--force` to overwrite a config, or choose another name with `-o`")
}

/// BOUND: bytes of a config that is overwritten.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Refuses to overwrite anything but a config: a regular file that names a base model, or an empty
/// one.
fn check_replaced(output: &Path) -> Result<(), Failure> {
    let Ok(found) = output.symlink_metadata() else { return Ok(()) };
    let names_base = |text: String| text.is_empty() || text.lines().any(|line| line.starts_with("base_model"));
    if found.is_file() && regular::read_text(output, CONFIG_BYTES_MAX).is_ok_and(names_base) {
        return Ok(());
    }
    let message = format!("{} is not a config and is not overwritten", output.display());
    Err(Failure::usage(message, "move it away, or choose another name with `-o`"))
}

/// How an update is split and what is kept for the backward pass. It affects time and memory, never
/// a bit.
struct Split {
    micro_batch_size: usize,
    recomputation: Policy,
    why: String,
    fits: bool,
}

/// The fastest split whose plan leaves a fifth of the memory free; the smallest if none does.
fn fastest(memory: Option<u64>, written: impl Fn(&Split) -> String) -> Result<Split, Failure> {
    let candidates = Policy::ALL.into_iter().flat_map(|policy| SPLITS.map(|rows| (rows, policy)));
    let mut smallest = None;
    for (micro_batch_size, recomputation) in candidates {
        let mut split = Split { micro_batch_size, recomputation, why: String::new(), fits: true };
        let settled = config::parse("the config", &written(&split), &[]);
        let run = settled.map_err(RunError::Config)?.run;
        let fit = fits::memory_fit(&run, &fits::Given::memory(memory), fits::Ranks::ALONE)?;
        let needed = size(fit.needed);
        let rows =
            format!("{} at a time, checkpointing {}", counted(micro_batch_size as u64, "row"), recomputation.name());
        let Some(available) = &fit.available else {
            let why = "the memory of this machine is unknown: these are the settings that need the least".to_string();
            return Ok(Split { micro_batch_size: 1, recomputation: Policy::Full, why, fits: true });
        };
        let there = size(available.bytes);
        if fit.plan.is_some() && fit.needed <= available.bytes / FREE_PART * (FREE_PART - 1) {
            split.why = format!("{rows}: the fastest that leaves a fifth of the memory free, {needed} of {there}");
            return Ok(split);
        }
        split.fits = fit.fits() == Some(true);
        split.why = if split.fits {
            format!("{rows}: the smallest; it leaves less than a fifth of the memory free, {needed} of {there}")
        } else {
            format!("warning: {rows} needs {needed}, but only {there} is available")
        };
        smallest = Some(split);
    }
    Ok(smallest.expect("there are policies and splits"))
}

/// The model's config, and the data as training would see it.
fn looked_at(arguments: &Arguments) -> Result<(Config, Report), RunError> {
    let folder = model::located(&arguments.model);
    let config = model_config(&folder)?;
    let wanted = DataConfig {
        files: vec![arguments.data.clone()],
        prompt_field: arguments.prompt_field.clone(),
        completion_field: arguments.completion_field.clone(),
        max_seq_length: config.max_positions,
        ..DataConfig::default()
    };
    let (tokenizer, template) = data::open_if_there(&folder, &wanted.date)?;
    let (_, report) = data::load(&wanted, tokenizer.as_ref(), template.as_ref())?;
    Ok((config, report))
}

fn found(report: &Report) -> String {
    let format = report.files.first().map_or(String::new(), |file| file.format.to_string());
    let lengths = &report.lengths;
    format!("{format}: {} examples of {} to {} tokens", report.examples, lengths.shortest, lengths.longest)
}

/// Whether the model has weights. A plan needs none.
fn has_weights(arguments: &Arguments, text: &str, config: &Config) -> Result<bool, RunError> {
    let mut run = config::parse(&arguments.output.display().to_string(), text, &[])?.run;
    run.base_model = model::located(&run.base_model);
    Ok(fits::weights(&run, config)?.is_some())
}

/// Fits every row, up to a length that most machines have the memory for.
fn max_seq_length(config: &Config, report: &Report) -> usize {
    report.lengths.longest.next_power_of_two().clamp(LENGTH_MIN, LENGTH_MAX).min(config.max_positions)
}

fn written(arguments: &Arguments, config: &Config, report: &Report, split: &Split) -> String {
    let rows = report.rows;
    let evaluates = rows >= ROWS_TO_HOLD_OUT_FROM;
    let updates = rows.div_ceil(ROWS_PER_UPDATE) * EPOCHS;
    let often = (updates / 10).max(SAVES_APART_MIN).min(updates);
    let stem = arguments.data.file_stem().map_or("run".to_string(), |stem| stem.to_string_lossy().into_owned());

    let mut file = File(String::new());
    file.comment("Paths are relative to the folder you start isobit in. Unknown keys are errors; `--set key=value` overrides a key.");
    file.comment(&format!("{} positions in the model; {}", config.max_positions, found(report)));
    file.put(Section::Top, "base_model", &path(&model::located(&arguments.model)));
    file.put(Section::Top, "output_dir", &path(&Path::new("out").join(stem)));
    file.put(Section::Top, "seed", &whole(42));
    file.put(Section::Top, "device", &text("cpu"));

    file.section(Section::Datasets);
    file.put(Section::Datasets, "path", &path(&arguments.data));

    if evaluates {
        file.section(Section::Eval);
        file.put(Section::Eval, "val_set_size", &Value::Number(0.05));
        file.put(Section::Eval, "eval_steps", &whole(often));
    } else {
        // A section of its own would need a file that may not exist.
        file.line("");
        file.comment("To evaluate, while training and with `isobit eval --config`, remove the marks from these lines:");
        file.comment("[eval]");
        file.comment(
            "path = \"valid.jsonl\"  # a file like the one above; or val_set_size = 0.05, a share of its rows",
        );
    }

    file.section(Section::Training);
    for (key, name) in [("prompt_field", &arguments.prompt_field), ("completion_field", &arguments.completion_field)] {
        if let Some(name) = name {
            file.put(Section::Training, key, &text(name));
        }
    }
    file.put(Section::Training, "max_seq_length", &whole(max_seq_length(config, report)));
    file.put(Section::Training, "sample_packing", &Value::Switch(false));
    file.comment(&split.why);
    file.comment("Every split of these rows and every kind of checkpointing gives the same weights; smaller ones need less memory.");
    file.put(Section::Training, "micro_batch_size", &whole(split.micro_batch_size));
    let times = ROWS_PER_UPDATE / split.micro_batch_size;
    file.put(Section::Training, "gradient_accumulation_steps", &whole(times));
    file.put(Section::Training, "gradient_checkpointing", &text(split.recomputation.name()));
    file.put(Section::Training, "num_epochs", &whole(EPOCHS));
    file.put(Section::Training, "learning_rate", &Value::Number(2e-4));
    file.put(Section::Training, "lr_scheduler_type", &text("cosine"));
    file.put(Section::Training, "warmup_ratio", &Value::Number(0.03));
    file.put(Section::Training, "max_grad_norm", &Value::Number(1.0));
    file.put(Section::Training, "save_steps", &whole(often));
    if evaluates {
        file.put(Section::Training, "load_best_model_at_end", &Value::Switch(true));
    }

    file.section(Section::Adapter);
    file.put(Section::Adapter, "type", &text("lora"));
    file.put(Section::Adapter, "lora_r", &whole(8));
    file.put(Section::Adapter, "lora_alpha", &whole(16));
    file.put(Section::Adapter, "lora_dropout", &Value::Number(0.0));
    let targets = match config.family.lora_modules() {
        Some(modules) => Value::List(modules.iter().map(|name| text(name)).collect()),
        None => text("all-linear"),
    };
    file.put(Section::Adapter, "lora_target_modules", &targets);
    file.0
}

/// A config being written.
struct File(String);

impl File {
    fn comment(&mut self, text: &str) {
        self.line(&format!("# {text}"));
    }

    fn section(&mut self, section: Section) {
        self.line(&format!("\n{}", section.heading()));
    }

    fn put(&mut self, section: Section, name: &str, value: &Value) {
        let help = KEYS.iter().find(|key| key.section == section && key.name == name).map_or("", |key| key.help);
        self.line(&format!("{:<COLUMN$} # {help}", format!("{name} = {value}")));
    }

    fn line(&mut self, line: &str) {
        writeln!(self.0, "{line}").expect("writing to a string succeeds");
    }
}

fn text(text: &str) -> Value {
    Value::Text(text.to_string())
}

fn path(path: &Path) -> Value {
    Value::Text(path.to_string_lossy().into_owned())
}

fn whole(count: usize) -> Value {
    Value::Whole(count as i64)
}
