//! `isobit export`: models for other programs. `merge` writes a Hugging Face folder with an adapter
//! merged into its base, `gguf` a GGUF file.

mod gguf;
mod merge;

use crate::model;
use crate::{Failure, adapter};
use isobit_models::peft;
use isobit_proof::regular;
use isobit_training::checkpoint::{ADAPTER_CONFIG, RESOLVED};
use isobit_training::config::{self, SaveDtype};
use isobit_training::hub_cache;
use isobit_training::prepare::{CONFIG_BYTES_MAX, RunError};
use isobit_training::signal;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Merge an adapter into its base: a model folder that other programs load
    Merge(merge::Arguments),
    /// Write an adapter or a model as a GGUF file, for llama.cpp and what is built on it
    Gguf(gguf::Arguments),
}

/// What an adapter is added to, where its base was quantised while it was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Onto {
    /// The weights that it was trained against
    Trained,
    /// The weights of the base's files
    Original,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    signal::install_for_export().map_err(|error| Failure::output(&error))?;
    match &arguments.command {
        Command::Merge(arguments) => merge::run(arguments),
        Command::Gguf(arguments) => gguf::run(arguments),
    }
}

/// The adapter folder that `source` stands for, and its base: the one given, the one that the
/// adapter's run was started with, or the folder that the adapter's config names.
fn adapter_and_base(source: &Path, base: Option<&Path>) -> Result<(PathBuf, PathBuf), Failure> {
    hub_cache::check(source)?;
    let adapter = adapter::located(source).map_err(|failure| match failure.code {
        2 => Failure::usage(failure.message, "only an adapter is merged; `isobit export gguf` also writes a model"),
        _ => failure,
    })?;
    if let Some(base) = base {
        return Ok((adapter, base.to_path_buf()));
    }
    let text = regular::read_text(&adapter.join(ADAPTER_CONFIG), CONFIG_BYTES_MAX).map_err(RunError::from)?;
    let of_run = base_of_run(&adapter);
    let named = [of_run, peft::base_name(&text).map(PathBuf::from)];
    if let Some(base) = named.iter().flatten().find(|base| base.is_dir()) {
        return Ok((adapter, base.clone()));
    }
    let message = match named.into_iter().flatten().next_back() {
        Some(base) => format!("{} names the base `{}`, which is not a folder here", adapter.display(), base.display()),
        None => format!("{} does not say which base it belongs to", adapter.display()),
    };
    Err(Failure::usage(message, "give the base model's folder with `--base FOLDER`"))
}

/// `base_model` of the run that the folder of an adapter lies in, relative to where the run was
/// started.
fn base_of_run(adapter: &Path) -> Option<PathBuf> {
    // `.` has no name for its parent.
    let whole = adapter.canonicalize().ok()?;
    Some(config::read(&whole.parent()?.join(RESOLVED), &[]).ok()?.run.base_model)
}

/// A model and its adapter, as `eval` would open them.
fn open(base: PathBuf, adapter: Option<PathBuf>, onto: Onto) -> Result<(model::Arguments, model::Opened), Failure> {
    let options = model::Options {
        adapter,
        device: None,
        threads: None,
        profile: None,
        load_in_4bit: (onto == Onto::Original).then_some(false),
        template_var: Vec::new(),
        quiet: true,
    };
    let arguments = model::Arguments { model: base, options };
    let opened = arguments.open_to_copy()?;
    Ok((arguments, opened))
}

/// A number format by any of its usual names.
fn float_format(name: &str) -> Option<SaveDtype> {
    Some(match name {
        "f32" | "float32" | "fp32" => SaveDtype::Float32,
        "bf16" | "bfloat16" => SaveDtype::Bfloat16,
        "f16" | "float16" | "fp16" => SaveDtype::Float16,
        _ => return None,
    })
}

/// Ends the program if a signal stopped the export: the check of the base's files beside it would
/// go on for nothing.
#[expect(clippy::exit, reason = "nothing is left to clean up, and another thread still reads")]
fn end_if_stopped<T>(written: Result<T, RunError>) -> Result<T, RunError> {
    if let Err(error @ RunError::Stopped(_)) = &written {
        let failure = Failure::from(error);
        failure.tell();
        if crate::json_is_wanted(std::env::args_os()) {
            failure.tell_event();
        }
        isobit_kernels::gpu::exit_guard::disarm();
        std::process::exit(i32::from(failure.code));
    }
    written
}

/// The failure of an export: a number that a format cannot hold needs another format.
fn failed(arguments: &model::Arguments, error: &RunError, adapter: Option<&Path>, hint: &str) -> Failure {
    let failure = arguments.misfit_as("--base", error, adapter);
    match failure.code {
        5 => Failure { hint: Some(hint.to_string()), ..failure },
        _ => failure,
    }
}
