//! Everything a run needs before the first step: model config, weights on disk, tokenised rows, and
//! the digests that identify them.

use crate::allocator::release_free_pages;
use crate::checkpoint::{self, ADAPTER_CONFIG, FINAL, Identity};
use crate::config::{self, Adapter, EvalRows, Fields, Run, Steps};
use crate::data::{self, DataConfig, DataError, Report, Variables};
use crate::hub_cache;
use crate::ranks::RankError;
use crate::row::{self, Row};
use crate::sealed;
use crate::signal::Signal;
use crate::starting_adapter;
use crate::step::{StepError, StepSettings};
use crate::targets;
use isobit_autograd::TapeError;
use isobit_kernels::DeviceFailure;
use isobit_kernels::op::low_rank::RANK_MAX;
use isobit_models::build::Settings;
use isobit_models::{Config, LoraConfig, ModelError, Targets, Trained, WeightSource, Weights, int4, quantised_count};
use isobit_proof::FileError;
use isobit_proof::hash::{FileRecord, Hash, Manifest};
use isobit_proof::name::quoted;
use isobit_proof::regular;
use isobit_proof::safetensors::TensorFiles;
use std::path::{Path, PathBuf};

/// Why a run cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Config(#[from] config::Error),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(transparent)]
    Device(#[from] DeviceFailure),
    #[error(transparent)]
    Rank(#[from] RankError),
    #[error("{what}")]
    Refused { what: String, hint: &'static str },
    /// Files that should be the same and are not.
    #[error("{what}")]
    Differs { what: String, hint: &'static str },
    /// A setting that does not go with the model or the ranks.
    #[error("{what}")]
    Target { what: String, hint: String },
    /// A signal asked an export to stop.
    #[error("stopped by {}: nothing was written", .0.name())]
    Stopped(Signal),
}

impl RunError {
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(error) => error.exit_code(),
            Self::Rank(error) => error.exit_code(),
            Self::Refused { .. }
            | Self::Target { .. }
            | Self::Model(
                ModelError::Adapter(_)
                | ModelError::Rank(_)
                | ModelError::Family { .. }
                | ModelError::Gguf(_)
                | ModelError::Quantised { .. },
            ) => 2,
            Self::Stopped(signal) => signal.exit_code(),
            Self::Data(error) => error.kind().exit_code(),
            Self::Model(ModelError::File(error)) | Self::File(error) => error.exit_code(),
            Self::Model(_) | Self::Differs { .. } => 8,
            Self::Checkpoint(error) => error.exit_code(),
            Self::Step(error) if error.is_out_of_memory() => 4,
            Self::Device(failure) if failure.is_out_of_memory() => 4,
            Self::Step(
                StepError::Device(_) | StepError::Tape(_) | StepError::Stage { .. } | StepError::Audit { .. },
            )
            | Self::Device(_) => 6,
            Self::Step(_) => 5,
        }
    }

    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Config(error) => Some(error.hint().to_string()),
            Self::Data(error) => Some(error.hint()),
            Self::Model(ModelError::File(FileError::Missing { path })) | Self::File(FileError::Missing { path })
                if path.ends_with("model.safetensors") =>
            {
                Some(format!("{FOLDER_HINT}: fetch the weights too"))
            }
            Self::Model(ModelError::File(error)) | Self::File(error) => error.hint().map(str::to_string),
            Self::Model(ModelError::Family { .. }) => {
                Some("`isobit models` lists the families that can be trained".to_string())
            }
            Self::Model(ModelError::Rank(_)) => Some(format!(
                "train with a rank of 1 to {RANK_MAX}; peft's `merge_and_unload` merges an adapter of any rank into its base"
            )),
            Self::Model(ModelError::Gguf(_)) => Some("`isobit export merge` writes a model folder instead".to_string()),
            Self::Model(ModelError::Quantised { .. }) => {
                Some("set `type = \"lora\"` under [adapter], or train a base that is not quantised".to_string())
            }
            Self::Model(ModelError::Config { .. }) => {
                Some("compare it with the file the model was published with, or fetch it again".to_string())
            }
            Self::Model(ModelError::Tensor { .. }) => {
                Some("config.json and the weights do not belong together: fetch both again from one place".to_string())
            }
            Self::Checkpoint(error) => error.hint().map(str::to_string),
            Self::Rank(error) => error.hint(),
            Self::Refused { hint, .. } | Self::Differs { hint, .. } => Some((*hint).to_string()),
            Self::Target { hint, .. } => Some(hint.clone()),
            Self::Step(error) if error.is_out_of_memory() => Some(MEMORY_HINT.to_string()),
            Self::Device(failure) if failure.is_out_of_memory() => Some(MEMORY_HINT.to_string()),
            Self::Device(_) => Some("`isobit devices` lists what this machine has".to_string()),
            Self::Step(
                StepError::Device(_)
                | StepError::Tape(TapeError::Device(_) | TapeError::Recompute { .. } | TapeError::Digest { .. })
                | StepError::Stage { .. },
            ) => Some(
                "`isobit doctor` tests the device; `--resume` continues a run from its last checkpoint, or its start, \
                 on another device if this one fails"
                    .to_string(),
            ),
            Self::Step(StepError::Audit { .. }) => Some(
                "one of the two computes wrongly: `isobit doctor` tests devices; resume on another one".to_string(),
            ),
            Self::Step(StepError::Loss { .. } | StepError::Gradient { .. } | StepError::Parameter { .. }) => {
                Some("try a smaller learning rate, or look at the row with `isobit data show`".to_string())
            }
            _ => None,
        }
    }
}

const MEMORY_HINT: &str =
    "`isobit plan` shows what the run needs and what would need less; other programs may hold the rest";

/// A run with its inputs read and checked.
pub struct Prepared {
    pub run: Run,
    pub steps: Steps,
    pub model: Config,
    pub weights: Weights,
    pub train: Vec<Row>,
    pub eval: Vec<Row>,
    pub report: Report,
    pub identity: Identity,
    /// The tensor file of the adapter that the run starts from.
    pub start: Option<PathBuf>,
    /// The files that the base's digest covers.
    pub base_files: Vec<(String, FileRecord)>,
}

pub fn prepare(run: Run) -> Result<Prepared, RunError> {
    let quantises = loads_in_4bit(&run)?;
    // Where it is off by default, the identity of a run is that of one from before this key. A
    // starting adapter of an unknown rule needs it to be said.
    let by_default = starting_adapter::is_quantised(&run).unwrap_or(true);
    let load_in_4bit = (quantises || by_default).then_some(quantises);
    let run = Run { load_in_4bit, ..run };
    let model = model_config(&run.base_model)?;
    check_output(&run)?;
    check_positions(&run, &model)?;
    targets::check(&model, &trained(&run))?;
    Manifest::check(&run.base_model)?;
    let weights = Weights::new(TensorFiles::open(&run.base_model)?, &model)?.load_in_4bit(quantises)?;
    check_quantised(&model, &weights)?;
    let Rows { train, eval, report } = rows(&run, &model)?;
    // Those of the tokenizer, which the plan counts before the weights, not beside them.
    release_free_pages();
    let steps = run.steps(train.len() as u64);
    let start = starting_adapter::find(&run, &model)?;
    let base_files = base_files(&run.base_model, &weights)?;
    let identity = Identity {
        run: run.digest(),
        data: Hash::of_bytes(format!("{}{}", row::digest(&train), row::digest(&eval)).as_bytes()).to_string(),
        base: digest_of_base(&base_files).to_string(),
        profile: run.profile.name().to_string(),
        numerics: isobit_numerics::VERSION.to_string(),
        start: start.as_deref().map(Hash::of_file).transpose()?.map(|digest| digest.to_string()),
        load_in_4bit: quantises.then(|| int4::RULE.to_string()),
    };
    Ok(Prepared { run, steps, model, weights, train, eval, report, identity, start, base_files })
}

/// Whether a run quantises its base while it is loaded: as the config says, or else as the adapter
/// that it starts from was trained.
pub fn loads_in_4bit(run: &Run) -> Result<bool, RunError> {
    match run.load_in_4bit {
        Some(wanted) => Ok(wanted),
        None => starting_adapter::is_quantised(run),
    }
}

/// Whether the adapter in a folder was trained on a base that was quantised while it was loaded.
pub fn is_trained_in_4bit(folder: &Path) -> Result<bool, RunError> {
    let manifest = regular::if_there(Manifest::read(folder))?;
    match manifest.and_then(|manifest| manifest.load_in_4bit).as_deref() {
        None => Ok(false),
        Some(int4::RULE) => Ok(true),
        Some(rule) => {
            let (folder, rule, ours) = (folder.display(), quoted(rule), int4::RULE);
            Err(RunError::Refused {
                what: format!("the base of {folder} was quantised by the rule {rule}, but this version has `{ours}`"),
                hint: "use the version of isobit that made it, or say `load_in_4bit = false` (`--load-in-4bit false`)",
            })
        }
    }
}

/// A run has a folder of its own.
fn check_output(run: &Run) -> Result<(), RunError> {
    sealed::check_target(&run.output_dir)?;
    let Ok(output) = run.output_dir.canonicalize() else { return Ok(()) };
    let hint = "name a folder for this run alone: output_dir = \"out/run-a\"";
    if output.parent().is_none() {
        return Err(RunError::Refused { what: format!("output_dir is {}", output.display()), hint });
    }
    if run.base_model.canonicalize().is_ok_and(|base| base == output) {
        let what = format!("output_dir {} is the folder of the base model", run.output_dir.display());
        return Err(RunError::Refused { what, hint });
    }
    if let Some(found) = sealed::holds_weights(&output) {
        let what = format!("output_dir {} holds weights: there is a {found} in it", run.output_dir.display());
        return Err(RunError::Refused { what, hint });
    }
    Ok(())
}

/// Checks that the adapter that a run starts from is there, and is the one that the config
/// describes.
pub fn check_start(run: &Run, model: &Config) -> Result<(), RunError> {
    starting_adapter::find(run, model).map(|_| ())
}

/// Checks that `load_in_4bit` has something to quantise.
pub fn check_quantised(model: &Config, weights: &Weights) -> Result<(), RunError> {
    if !weights.loads_in_4bit() || quantised_count(model, weights)? > 0 {
        return Ok(());
    }
    Err(RunError::Refused {
        what: "`load_in_4bit`: no linear layer of this model can be quantised".to_string(),
        hint: "layers need at least 8 outputs and inputs in multiples of 8: leave out `load_in_4bit`",
    })
}

/// Checks that the longest rows the config allows fit the positions of the model.
pub fn check_positions(run: &Run, model: &Config) -> Result<(), RunError> {
    let (longest, positions) = (run.training.max_seq_length as usize, model.max_positions);
    if longest > positions {
        let what = format!("max_seq_length {longest} is beyond the model's {positions} positions");
        return Err(RunError::Target { what, hint: format!("set `max_seq_length = {positions}` or less") });
    }
    Ok(())
}

/// What belongs into a model folder.
const FOLDER_HINT: &str = "a model folder holds config.json, tokenizer.json and *.safetensors";

/// BOUND: `config.json` and similar files; published ones stay below a megabyte.
pub const CONFIG_BYTES_MAX: u64 = 1 << 24;

/// The hint for a hub name given as a path.
pub const HUB_HINT: &str = "this looks like a name on the Hugging Face hub, and isobit never downloads: get the files first \
     (`hf download NAME --local-dir FOLDER`), then give the folder";

/// Whether a path that does not exist looks like a hub name: `Qwen/Qwen3-0.6B`.
pub fn is_hub_name(path: &Path) -> bool {
    let parts: Vec<&str> = path.to_str().unwrap_or_default().split('/').collect();
    let plain = |part: &&str| {
        !part.starts_with('.')
            && !part.is_empty()
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    parts.len() == 2 && parts.iter().all(plain) && !Path::new(parts[0]).exists()
}

/// The rows of a run, and a report on its training data.
pub struct Rows {
    pub train: Vec<Row>,
    pub eval: Vec<Row>,
    pub report: Report,
}

/// Reads the data of a run, and holds out rows if it evaluates on those.
pub fn rows(run: &Run, model: &Config) -> Result<Rows, RunError> {
    let (tokenizer, template) = data::open_if_there(&run.base_model, &run.date)?;
    let load = |files: &[PathBuf]| -> Result<(Vec<Row>, Report), RunError> {
        let wanted = DataConfig { vocabulary: Some(model.vocabulary), ..data_config(run, files)? };
        Ok(data::load(&wanted, tokenizer.as_ref(), template.as_ref())?)
    };
    let (mut train, report) = load(&run.datasets)?;
    let eval = match &run.eval.rows {
        EvalRows::None => Vec::new(),
        EvalRows::File(file) => load(std::slice::from_ref(file))?.0,
        EvalRows::Count(count) => hold_out(&mut train, *count as usize, run.seed)?,
        EvalRows::Share(share) => {
            #[expect(clippy::float_arithmetic, reason = "a share of the rows, rounded up")]
            let count = libm::ceil(*share * train.len() as f64) as usize;
            hold_out(&mut train, count, run.seed)?
        }
    };
    Ok(Rows { train, eval, report })
}

/// Written by some quantisers beside `config.json`.
pub(crate) const QUANTIZE_CONFIG: &str = "quantize_config.json";

/// `config.json` of a model folder, with `quantize_config.json` if present.
pub fn model_config(folder: &Path) -> Result<Config, RunError> {
    // Check the folder first: a missing config would only be a symptom.
    let found = std::fs::metadata(folder).map_err(|error| FileError::from_io("read", folder, error));
    if matches!(found, Err(FileError::Missing { .. })) && is_hub_name(folder) {
        return Err(RunError::Refused { what: format!("{} does not exist", folder.display()), hint: HUB_HINT });
    }
    if !found?.is_dir() {
        return Err(RunError::Refused { what: format!("{} is not a folder", folder.display()), hint: FOLDER_HINT });
    }
    hub_cache::resolved(folder)?;
    if [folder, &folder.join(FINAL)].iter().any(|folder| folder.join(ADAPTER_CONFIG).is_file())
        && !folder.join("config.json").exists()
    {
        let what = format!("{} holds an adapter, not a model", folder.display());
        let hint =
            "name its base model instead; `--adapter` takes this folder, and so does `adapter.resume_from` in a config";
        return Err(RunError::Refused { what, hint });
    }
    let beside = regular::if_there(regular::read_text(&folder.join(QUANTIZE_CONFIG), CONFIG_BYTES_MAX))?;
    let text = regular::read_text(&folder.join("config.json"), CONFIG_BYTES_MAX).map_err(|error| match error {
        FileError::Missing { path } => {
            RunError::Refused { what: format!("{} does not exist", path.display()), hint: FOLDER_HINT }
        }
        other => other.into(),
    })?;
    let placed = |file: String| folder.join(file).display().to_string();
    Config::parse_with(&text, beside.as_deref()).map_err(|error| match error {
        ModelError::Config { file, what } => ModelError::Config { file: placed(file), what }.into(),
        ModelError::Family { file, what } => ModelError::Family { file: placed(file), what }.into(),
        other => other.into(),
    })
}

/// How a run reads data files.
pub fn data_config(run: &Run, files: &[PathBuf]) -> Result<DataConfig, DataError> {
    let (prompt_field, completion_field) = match &run.training.fields {
        Fields::Detected => (None, None),
        Fields::Named { prompt, completion } => (Some(prompt.clone()), Some(completion.clone())),
    };
    let mut variables = Variables::default();
    for (name, value) in &run.training.chat_template_kwargs {
        let added = variables.add(name, value.to_json().to_string());
        added.map_err(|why| DataError::Setting { setting: "chat_template_kwargs", why })?;
    }
    Ok(DataConfig {
        files: files.to_vec(),
        prompt_field,
        completion_field,
        max_seq_length: run.training.max_seq_length as usize,
        sample_packing: run.training.sample_packing,
        assistant_only_loss: run.training.assistant_only_loss,
        completion_only_loss: Some(run.training.completion_only_loss),
        allow_untrainable_rows: run.training.allow_untrainable_rows,
        drop_special_token_rows: run.training.drop_special_token_rows,
        variables,
        vocabulary: None,
        date: run.date.clone(),
        workers: run.data_workers.max(1) as usize,
    })
}

/// Moves rows out of the training data: the first of a fixed shuffle.
fn hold_out(train: &mut Vec<Row>, count: usize, seed: u64) -> Result<Vec<Row>, RunError> {
    if count >= train.len() {
        let what = format!("{count} rows are held out of {}: nothing is left to train on", train.len());
        return Err(RunError::Refused { what, hint: "lower `val_set_size`, or name an evaluation file" });
    }
    let mut held = data::order(seed, u64::MAX, train.len())[..count].to_vec();
    held.sort_unstable();
    let (mut eval, mut rest) = (Vec::new(), Vec::new());
    for (index, row) in std::mem::take(train).into_iter().enumerate() {
        if held.binary_search(&index).is_ok() { eval.push(row) } else { rest.push(row) }
    }
    *train = rest;
    Ok(eval)
}

/// Digest of `config.json`, `quantize_config.json` and every weight file.
pub fn base_digest(folder: &Path, weights: &Weights) -> Result<Hash, FileError> {
    Ok(digest_of_base(&base_files(folder, weights)?))
}

fn digest_of_base(files: &[(String, FileRecord)]) -> Hash {
    let text: String = files.iter().map(|(_, record)| record.blake3.to_string()).collect();
    Hash::of_bytes(text.as_bytes())
}

/// The files of a base model, with their hashes.
fn base_files(folder: &Path, weights: &Weights) -> Result<Vec<(String, FileRecord)>, FileError> {
    let beside = folder.join(QUANTIZE_CONFIG);
    let configs = [Some(folder.join("config.json")), beside.exists().then_some(beside)].into_iter().flatten();
    let all = configs.chain(weights.tensor_files().files().iter().map(|file| file.path().to_path_buf()));
    let record = |path: PathBuf| {
        let name = path.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
        Ok((name, FileRecord::of(&path)?))
    };
    all.map(record).collect()
}

/// What the config trains.
pub fn trained(run: &Run) -> Trained {
    match &run.adapter {
        Adapter::Full => Trained::Full,
        Adapter::LastBlocks(count) => Trained::LastBlocks(*count as usize),
        Adapter::Lora(lora) => Trained::Lora(LoraConfig {
            rank: lora.r as usize,
            alpha: lora.alpha,
            dropout: lora.dropout,
            rslora: lora.use_rslora,
            targets: lora.targets.clone(),
            parameters: lora.target_parameters.clone(),
            exclude: (!lora.exclude_modules.is_empty()).then(|| Targets::Names(lora.exclude_modules.clone())),
            layers: (!lora.layers_to_transform.is_empty())
                .then(|| lora.layers_to_transform.iter().map(|layer| *layer as usize).collect()),
            rank_pattern: lora.rank_pattern.iter().map(|(name, rank)| (name.clone(), *rank as usize)).collect(),
            alpha_pattern: lora.alpha_pattern.clone(),
            saved: lora.modules_to_save.clone(),
        }),
    }
}

/// How the model of a run is built.
pub fn build_settings(run: &Run) -> Settings {
    let positions = run.training.max_seq_length as usize;
    Settings { trained: trained(run), profile: run.profile, positions, seed: run.seed }
}

pub fn step_settings(run: &Run) -> StepSettings {
    let training = &run.training;
    StepSettings {
        profile: run.profile,
        policy: training.recomputation,
        micro_batch_size: training.micro_batch_size as usize,
        gradient_groups: training.gradient_groups as usize,
        seed: run.seed,
        max_grad_norm: (training.max_grad_norm > 0.0).then_some(training.max_grad_norm as f32),
        beta1: training.adam_beta1,
        beta2: training.adam_beta2,
        eps: training.adam_epsilon,
        weight_decay: training.weight_decay,
        digests: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_fails_in_a_step_brings_a_hint() {
        let failure = |what: &str| DeviceFailure { device: "cuda:0".to_string(), what: what.to_string() };
        let in_step = |what: &str| [StepError::Device(failure(what)), StepError::Tape(failure(what).into())];
        let panicked = StepError::Stage { device: "cpu".to_string(), what: "its thread has ended".to_string() };
        for error in in_step("it is lost").into_iter().chain([panicked]).map(RunError::from) {
            let hint = error.hint().expect("a hint");
            assert_eq!(error.exit_code(), 6, "{error}");
            assert!(hint.contains("`isobit doctor`") && hint.contains("`--resume`"), "{error}: {hint}");
        }
        for error in in_step(&format!("{} of 5 bytes", DeviceFailure::NO_MEMORY)).map(RunError::from) {
            assert_eq!(error.exit_code(), 4, "{error}");
            assert_eq!(error.hint().as_deref(), Some(MEMORY_HINT), "{error}");
        }
    }
}
