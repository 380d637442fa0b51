//! `isobit eval`: loss, perplexity and accuracy of a model on data files, with or without an
//! adapter. With the config of a run it reads data as the run did; arguments override the config.

use crate::Failure;
use crate::backend::{Chosen, Job, Opening, on_device};
use crate::model;
use crate::split::Split;
use crate::stderr::tell;
use isobit_autograd::Offload;
use isobit_kernels::Backend;
use isobit_models::peft;
use isobit_training::config::{self, EvalRows, Run};
use isobit_training::data::{self, DataConfig};
use isobit_training::engine::{Engine, Stored};
use isobit_training::prepare::{self, RunError, data_config, model_config};
use isobit_training::row::Row;
use isobit_training::stages::{Divided, Stages};
use isobit_training::step::Evaluation;
use isobit_training::trainer::Trainer;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Model folder in Hugging Face layout, or an isobit run that trained all weights; default: the
    /// base model of the config
    #[arg(long, value_name = "FOLDER", required_unless_present = "config")]
    model: Option<PathBuf>,
    #[command(flatten)]
    options: model::Options,
    /// Data files: JSONL, JSON arrays, CSV, TSV or Parquet; default: the rows that the config
    /// evaluates on
    #[arg(long, value_name = "FILE", required_unless_present = "config", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Config of a run: read data as the run does (fields, masks, length, template variables,
    /// date), with its profile, on its devices
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Truncate longer examples to this many tokens [default: 1024]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    max_seq_length: Option<u32>,
    /// Name of the prompt field, for data with custom field names
    #[arg(long, value_name = "NAME", requires = "completion_field")]
    prompt_field: Option<String>,
    /// Name of the completion field
    #[arg(long, value_name = "NAME", requires = "prompt_field")]
    completion_field: Option<String>,
    /// In conversations, count only the assistant's tokens [default: true]
    #[arg(long, value_name = "BOOL")]
    assistant_only_loss: Option<bool>,
    /// In rows with prompt and completion, count only the completion [default: true]
    #[arg(long, value_name = "BOOL")]
    completion_only_loss: Option<bool>,
    /// Drop rows without a token to count instead of refusing the data [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    allow_untrainable_rows: Option<bool>,
    /// Drop rows whose text contains the text of a special token [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    drop_special_token_rows: Option<bool>,
    /// Date that chat templates see [default: 2025-01-01]
    #[arg(long, value_name = "YYYY-MM-DD")]
    date: Option<String>,
    /// Rows computed together; affects speed, not the result
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=65536))]
    micro_batch_size: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Arguments {
    /// Whether any argument changes how data are read.
    fn reads_otherwise(&self) -> bool {
        self.max_seq_length.is_some()
            || self.prompt_field.is_some()
            || self.assistant_only_loss.is_some()
            || self.completion_only_loss.is_some()
            || self.allow_untrainable_rows.is_some()
            || self.drop_special_token_rows.is_some()
            || self.date.is_some()
            || !self.options.template_var.is_empty()
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let run = match &arguments.config {
        Some(path) => Some(config::read(path, &[]).map_err(RunError::from)?.run),
        None => None,
    };
    let folder = arguments.model.as_ref().or(run.as_ref().map(|run| &run.base_model));
    let folder = folder.ok_or_else(|| Failure::usage("no model is named", "name its folder with `--model`"))?;
    let folder = &model::located(folder);
    let mut model = model::Arguments { model: folder.clone(), options: arguments.options.clone() };
    if let (None, Some(run)) = (&model.options.profile, &run) {
        model.options.profile = Some(run.profile.name().to_string());
    }
    if let (None, Some(run)) = (model.options.load_in_4bit, &run) {
        model.options.load_in_4bit = run.load_in_4bit;
    }
    let place = Place::of(&arguments.options, run.as_ref())?;
    let rows = rows(arguments, folder, run.as_ref())?;
    let quiet = arguments.options.quiet || arguments.json;
    let work = Evaluating { arguments, model: &model, rows: &rows };
    let (device, evaluation) = match &place.devices[..] {
        [chosen] if place.opening.offload.is_none() => (chosen.name(), on_device(chosen, quiet, work)??),
        _ => work.divided(place, quiet)?,
    };
    print(arguments, &device, &evaluation).map_err(|error| Failure::output(&error))
}

/// Where to evaluate: what the command line names, or else where the run of the config trains.
struct Place {
    devices: Vec<Chosen>,
    /// Layers of each; empty: divided by memory.
    layers: Vec<u32>,
    opening: Opening,
}

impl Place {
    fn of(options: &model::Options, run: Option<&Run>) -> Result<Self, Failure> {
        let of_config = run.map(|run| run.devices.iter().map(ToString::to_string).collect::<Vec<_>>());
        let typed = options.device.as_ref();
        let typed = typed.map(|list| list.split(',').map(|name| name.trim().to_string()).collect::<Vec<_>>());
        // The map of a config is for its own list, and so is what it offloads.
        let own = run.filter(|_| typed.is_none() || typed == of_config);
        let names = typed.or(of_config).unwrap_or_else(|| vec!["cpu".to_string()]);
        let threads = options.threads.or(run.map(|run| run.threads as usize)).unwrap_or(0);
        let devices = Chosen::parse_list(&names.iter().map(String::as_str).collect::<Vec<_>>(), threads)?;
        let on_card = devices.iter().any(|device| matches!(device, Chosen::Gpu(_)));
        let weights = on_card && own.is_some_and(|run| run.offload.weights);
        let offload = Offload { weights, ..Offload::NONE };
        let opening = Opening { offload, threads: Chosen::host_threads(threads)?, ..Opening::PLAIN };
        Ok(Self { devices, layers: own.map_or(Vec::new(), |run| run.device_layers.clone()), opening })
    }
}

fn rows(arguments: &Arguments, folder: &Path, run: Option<&Run>) -> Result<Vec<Row>, Failure> {
    match run {
        Some(run) if arguments.data.is_empty() && !matches!(run.eval.rows, EvalRows::File(_)) => {
            held_out(arguments, folder, run)
        }
        _ => of_files(arguments, folder, run).map_err(Failure::from),
    }
}

/// The rows that a run holds out of its training data.
fn held_out(arguments: &Arguments, folder: &Path, run: &Run) -> Result<Vec<Row>, Failure> {
    if !run.has_eval() {
        let hint =
            "name files with `--data`, or add [eval] with `path = \"valid.jsonl\"` or `val_set_size = 0.05` to it";
        return Err(Failure::usage("the config has nothing to evaluate on", hint));
    }
    if arguments.reads_otherwise() {
        let hint = "name files with `--data`, or leave out the arguments that change how data are read";
        return Err(Failure::usage("which rows a run holds out depends on how it reads its data", hint));
    }
    let model = model_config(folder)?;
    let run = Run { base_model: folder.to_path_buf(), ..run.clone() };
    prepare::rows(&run, &model).map(|rows| rows.eval).map_err(Failure::from)
}

fn of_files(arguments: &Arguments, folder: &Path, run: Option<&Run>) -> Result<Vec<Row>, RunError> {
    let config = model_config(folder)?;
    let mut wanted = match run {
        Some(run) => data_config(run, &[])?,
        None => DataConfig::default(),
    };
    wanted.files.clone_from(&arguments.data);
    if let (true, Some(EvalRows::File(file))) = (wanted.files.is_empty(), run.map(|run| &run.eval.rows)) {
        wanted.files.push(file.clone());
    }
    let length = arguments.max_seq_length.map_or(wanted.max_seq_length, |length| length as usize);
    wanted.max_seq_length = length.min(config.max_positions);
    if let Some((prompt, completion)) = arguments.prompt_field.clone().zip(arguments.completion_field.clone()) {
        (wanted.prompt_field, wanted.completion_field) = (Some(prompt), Some(completion));
    }
    wanted.assistant_only_loss = arguments.assistant_only_loss.unwrap_or(wanted.assistant_only_loss);
    wanted.completion_only_loss = arguments.completion_only_loss.or(wanted.completion_only_loss);
    wanted.allow_untrainable_rows = arguments.allow_untrainable_rows.unwrap_or(wanted.allow_untrainable_rows);
    wanted.drop_special_token_rows = arguments.drop_special_token_rows.unwrap_or(wanted.drop_special_token_rows);
    wanted.variables.merge(crate::data::variables(&arguments.options.template_var));
    wanted.vocabulary = Some(config.vocabulary);
    if let Some(date) = &arguments.date {
        wanted.date.clone_from(date);
    }
    let (tokenizer, template) = data::open_if_there(folder, &wanted.date)?;
    Ok(data::load(&wanted, tokenizer.as_ref(), template.as_ref())?.0)
}

struct Evaluating<'a> {
    arguments: &'a Arguments,
    model: &'a model::Arguments,
    rows: &'a [Row],
}

impl Job for Evaluating<'_> {
    type Result = Result<Evaluation, Failure>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let built = self.model.build(&backend, self.longest(), true)?;
        self.evaluate(&Trainer::new(backend, built))
    }
}

impl Evaluating<'_> {
    fn longest(&self) -> usize {
        self.rows.iter().map(|row| row.tokens().len()).max().unwrap_or(1)
    }

    fn evaluate(&self, engine: &impl Engine) -> Result<Evaluation, Failure> {
        let rows: Vec<&Row> = self.rows.iter().collect();
        let evaluation = engine.evaluate(&rows, self.model.profile()?, self.arguments.micro_batch_size as usize);
        evaluation.map_err(|error| RunError::from(error).into())
    }

    /// With the layers divided among devices, or their weights on the host.
    fn divided(&self, place: Place, quiet: bool) -> Result<(String, Evaluation), Failure> {
        let opened = self.model.open(self.longest(), true)?;
        let split = Split::new(place.devices, &place.layers, &opened.config)?;
        if !quiet {
            tell(&format!("devices: {}", split.described()));
        }
        let stages = split.stages(|_| place.opening.clone())?;
        std::thread::scope(|scope| {
            let made = opened.while_checked(|| {
                let model = Divided { config: &opened.config, source: &opened.weights };
                let mut engine = Stages::new(scope, model, &opened.settings, false, stages)?;
                if let Some(file) = &opened.adapter_file()? {
                    let tensors = engine.tensors().to_vec();
                    peft::read(&tensors, file, |at, values| {
                        engine.write(at, Stored::Value, values).map_err(RunError::from)
                    })?;
                }
                Ok(engine)
            });
            let engine = made.map_err(|error| self.model.misfit(&error, opened.adapter.as_deref()))?;
            Ok((split.name(), self.evaluate(&engine)?))
        })
    }
}

fn print(arguments: &Arguments, device: &str, evaluation: &Evaluation) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let (loss, perplexity, accuracy) = (evaluation.loss(), evaluation.perplexity(), evaluation.accuracy());
    if arguments.json {
        let value = serde_json::json!({"schema": "isobit.eval/1", "loss": loss, "loss_bits": format!("{:016x}", loss.to_bits()),
            "perplexity": perplexity, "accuracy": accuracy, "targets": evaluation.targets,
            "device": device});
        writeln!(out, "{value}")?;
    } else {
        writeln!(
            out,
            "loss {loss:.6}, perplexity {perplexity:.4}, accuracy {accuracy:.4} over {} targets",
            evaluation.targets
        )?;
    }
    out.flush()
}
