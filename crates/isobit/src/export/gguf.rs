//! `isobit export gguf`: an adapter, a model, or a model with its adapter merged, as one GGUF file.

use super::{Onto, adapter_and_base, end_if_stopped, failed, open};
use crate::Failure;
use crate::backend::{Chosen, Job, on_device};
use crate::model::{self, Opened};
use crate::stderr::tell;
use crate::units::size;
use isobit_kernels::Backend;
use isobit_models::{Merged, Trained};
use isobit_proof::safetensors::Dtype;
use isobit_training::checkpoint::ADAPTER_CONFIG;
use isobit_training::export;
use isobit_training::export::gguf::{GgmlType, GgufSettings, WrittenFile};
use isobit_training::prepare::RunError;
use isobit_training::sealed;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Adapter folder from isobit or PEFT, model folder, or isobit run or checkpoint
    #[arg(value_name = "RUN|ADAPTER|MODEL")]
    source: PathBuf,
    /// File to create
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Merge the adapter into its base and write the whole model
    #[arg(long)]
    merge: bool,
    /// Base model folder of an adapter [default: the one that its config names]
    #[arg(long, value_name = "FOLDER")]
    base: Option<PathBuf>,
    /// With `--merge`, what the adapter is added to, if its base was loaded in 4 bits
    /// (`load_in_4bit`)
    #[arg(long, value_enum, default_value_t = Onto::Trained)]
    onto: Onto,
    /// Number format: f32, f16, bf16, q8_0 or q4_0 [default: that of the base, f32 for an adapter]
    #[arg(long = "type", value_name = "TYPE", value_parser = kind)]
    kind: Option<GgmlType>,
    /// Name of the model in the file [default: that of the base's folder]
    #[arg(long)]
    name: Option<String>,
    /// llama.cpp's name of the pre-tokenizer [default: found from tokenizer.json]
    #[arg(long, value_name = "NAME")]
    pre: Option<String>,
    /// Number of threads; 0 means all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn kind(name: &str) -> Result<GgmlType, String> {
    let found = GgmlType::ALL.into_iter().find(|kind| kind.name() == name.to_lowercase());
    found.ok_or_else(|| "it is f32, f16, bf16, q8_0 or q4_0".to_string())
}

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Adapter,
    Model,
}

struct Writing<'a> {
    arguments: &'a Arguments,
    opened: &'a Opened,
    content: Content,
    settings: GgufSettings,
}

impl Job for Writing<'_> {
    type Result = Result<WrittenFile, RunError>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let Self { arguments: Arguments { output, .. }, opened, content, settings } = self;
        let file = opened.adapter_file()?;
        let lora = match (&opened.settings.trained, &file) {
            (Trained::Lora(lora), Some(file)) => Some((lora, file)),
            _ => None,
        };
        let merged = Merged::new(&opened.config, &opened.weights, lora)?;
        let write = || {
            end_if_stopped(match content {
                Content::Adapter => export::gguf::adapter(&merged, &settings, output),
                Content::Model => {
                    export::gguf::model(&backend, &opened.folder, &opened.weights, &merged, &settings, output)
                }
            })
        };
        opened.while_checked(write)?.publish()
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    export::check_target(&arguments.output)?;
    let (model, opened, content) = opened(arguments)?;
    sealed::check_beside_base(&arguments.output, &opened.folder)?;
    let kind = match (arguments.kind, content) {
        (Some(GgmlType::Q8_0 | GgmlType::Q4_0), Content::Adapter) => {
            let hint = "use f32, f16 or bf16, or write the whole model with `--merge`";
            return Err(Failure::usage("an adapter is too small to be written in blocks of few bits", hint));
        }
        (Some(kind), _) => kind,
        (None, Content::Adapter) => GgmlType::F32,
        (None, Content::Model) => stored_kind(&opened),
    };
    let name = arguments.name.clone().unwrap_or_else(|| folder_name(&opened.folder));
    let settings = GgufSettings { kind, name, pre: arguments.pre.clone() };
    let chosen = Chosen::parse("cpu", arguments.threads)?;
    let writing = Writing { arguments, opened: &opened, content, settings };
    let written = on_device(&chosen, true, writing)?.map_err(|error| {
        failed(&model, &error, opened.adapter.as_deref(), "choose a format with a larger range: `--type bf16` or f32")
    })?;
    if !arguments.json {
        for note in &written.notes {
            tell(&format!("note: {note}"));
        }
    }
    print(arguments, content, kind, &written).map_err(|error| Failure::output(&error))
}

/// The model, and the adapter if the source is one.
fn opened(arguments: &Arguments) -> Result<(model::Arguments, Opened, Content), Failure> {
    let folder = model::located(&arguments.source);
    let is_adapter = arguments.source.join(ADAPTER_CONFIG).is_file();
    if !is_adapter && folder.join("config.json").is_file() {
        if arguments.merge || arguments.base.is_some() {
            let message = format!("{} is a model, not an adapter", folder.display());
            return Err(Failure::usage(message, "leave out `--merge` and `--base`"));
        }
        let (model, opened) = open(folder, None, Onto::Original)?;
        return Ok((model, opened, Content::Model));
    }
    let (adapter, base) = adapter_and_base(&arguments.source, arguments.base.as_deref())?;
    let (model, opened) = open(base, Some(adapter), arguments.onto)?;
    Ok((model, opened, if arguments.merge { Content::Model } else { Content::Adapter }))
}

/// The format of the base's first matrix; bfloat16 stands for quantised ones.
fn stored_kind(opened: &Opened) -> GgmlType {
    let files = opened.weights.tensor_files();
    let dtype = files.get(&opened.weights.names().in_file("model.embed_tokens.weight")).map(|tensor| tensor.dtype);
    match dtype {
        Ok(Dtype::F32) => GgmlType::F32,
        Ok(Dtype::F16) => GgmlType::F16,
        _ => GgmlType::Bf16,
    }
}

fn folder_name(folder: &Path) -> String {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
    whole.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn print(arguments: &Arguments, content: Content, kind: GgmlType, written: &WrittenFile) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let bytes = arguments.output.metadata().map_or(0, |found| found.len());
    let WrittenFile { tensors, notes } = written;
    let (output, kind) = (arguments.output.display().to_string(), kind.name());
    if arguments.json {
        let content = if content == Content::Adapter { "adapter" } else { "model" };
        let value = serde_json::json!({"schema": "isobit.export/1", "kind": "gguf", "content": content, "type": kind,
            "output": output, "tensors": tensors, "bytes": bytes, "notes": notes});
        writeln!(out, "{value}")?;
    } else {
        writeln!(out, "{output}: {tensors} tensors, {kind}, {}", size(bytes))?;
    }
    out.flush()
}
