//! `isobit export merge`: a base with an adapter added to its weights, as a Hugging Face folder.

use super::{Onto, adapter_and_base, end_if_stopped, failed, float_format, open};
use crate::Failure;
use crate::backend::{Chosen, Job, on_device};
use crate::stderr::tell;
use crate::units::size;
use isobit_kernels::Backend;
use isobit_models::{Merged, Trained};
use isobit_training::config::SaveDtype;
use isobit_training::export::{self, Written};
use isobit_training::prepare::RunError;
use isobit_training::sealed;
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Adapter folder from isobit or PEFT, or an isobit run or checkpoint
    #[arg(value_name = "RUN|ADAPTER")]
    adapter: PathBuf,
    /// Folder to create
    #[arg(short, long, value_name = "FOLDER")]
    output: PathBuf,
    /// Base model folder [default: the one that the adapter's config names]
    #[arg(long, value_name = "FOLDER")]
    base: Option<PathBuf>,
    /// Number format: bf16, f16 or f32 [default: that of the base; bf16 for a quantised one]
    #[arg(long, value_parser = dtype)]
    dtype: Option<SaveDtype>,
    /// What the adapter is added to, if its base was loaded in 4 bits (`load_in_4bit`)
    #[arg(long, value_enum, default_value_t = Onto::Trained)]
    onto: Onto,
    /// Number of threads; 0 means all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Print results, warnings and errors only
    #[arg(short, long)]
    quiet: bool,
}

fn dtype(name: &str) -> Result<SaveDtype, String> {
    if ["int4", "4bit", "4-bit", "gptq", "q4"].contains(&name) {
        return Err("a 4-bit weight plus an adapter is no longer a 4-bit number, and rounding it back would drop \
                    most of what was trained; write bf16 (the default for a 4-bit base), or keep the adapter separate"
            .to_string());
    }
    float_format(name).ok_or_else(|| "it is bf16, f16 or f32".to_string())
}

/// A merge, on any device.
struct Merging<'a> {
    arguments: &'a Arguments,
    opened: &'a crate::model::Opened,
}

impl Job for Merging<'_> {
    type Result = Result<Written, RunError>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let Self { arguments, opened } = self;
        let file = opened.adapter_file()?;
        let lora = match (&opened.settings.trained, &file) {
            (Trained::Lora(lora), Some(file)) => Some((lora, file)),
            _ => None,
        };
        let merged = Merged::new(&opened.config, &opened.weights, lora)?;
        let (folder, weights) = (&opened.folder, &opened.weights);
        let merge = || {
            let written = export::merge(&backend, folder, weights, &merged, arguments.dtype, &arguments.output);
            end_if_stopped(written)
        };
        opened.while_checked(merge)?.publish()
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    export::check_target(&arguments.output)?;
    let (adapter, base) = adapter_and_base(&arguments.adapter, arguments.base.as_deref())?;
    sealed::check_beside_base(&arguments.output, &base)?;
    let (model, opened) = open(base, Some(adapter), arguments.onto)?;
    let chosen = Chosen::parse("cpu", arguments.threads)?;
    let written = on_device(&chosen, true, Merging { arguments, opened: &opened })?;
    let written = written.map_err(|error| {
        failed(&model, &error, opened.adapter.as_deref(), "choose a format with a larger range: `--dtype f32`")
    })?;
    if written.kept < KEPT_MIN {
        tell(&format!(
            "warning: rounding leaves {} of what the adapter adds: evaluate the result, or write it with `--dtype f32`",
            percent(written.kept)
        ));
    }
    print(arguments, &opened, &written).map_err(|error| Failure::output(&error))
}

/// With less than this share of what the adapter adds, the result is another model than the one
/// that was evaluated.
const KEPT_MIN: f64 = 0.9;

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn print(arguments: &Arguments, opened: &crate::model::Opened, written: &Written) -> std::io::Result<()> {
    let (files, kept) = (&written.names, written.kept);
    let mut out = std::io::stdout().lock();
    let bytes: u64 = files.iter().filter_map(|name| Some(arguments.output.join(name).metadata().ok()?.len())).sum();
    let base = opened.folder.display().to_string();
    if arguments.json {
        let value = serde_json::json!({"schema": "isobit.export/1", "kind": "merge", "base": base,
            "adapter": opened.adapter.as_ref().map(|path| path.display().to_string()),
            "output": arguments.output.display().to_string(), "files": files, "bytes": bytes,
            "kept": kept});
        writeln!(out, "{value}")?;
    } else {
        let lost = match kept {
            1.0 => String::new(),
            share => format!("; rounding leaves {} of what the adapter adds", percent(share)),
        };
        writeln!(out, "{}: {} files, {}{lost}", arguments.output.display(), files.len(), size(bytes))?;
        if !arguments.quiet {
            let output = crate::ending::quoted(&arguments.output);
            tell(&format!("next: isobit generate --model {output} --prompt \"...\""));
        }
    }
    out.flush()
}
