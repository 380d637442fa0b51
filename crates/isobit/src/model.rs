//! Loads a model from its folder, with an adapter if given: shared by `eval`, `generate` and
//! `chat`.

use crate::Failure;
use crate::adapter;
use crate::stderr::tell;
use isobit_kernels::Backend;
use isobit_models::build::Settings;
use isobit_models::{Built, Config, ModelError, Trained, Weights, build, peft};
use isobit_numerics::slices::Profile;
use isobit_proof::safetensors::{SafeTensors, TensorFiles};
use isobit_proof::{FileError, Hash, Manifest, regular};
use isobit_training::checkpoint::{ADAPTER, ADAPTER_CONFIG, FINAL};
use isobit_training::hub_cache;
use isobit_training::prepare::{
    CONFIG_BYTES_MAX, HUB_HINT, RunError, base_digest, is_hub_name, is_trained_in_4bit, model_config,
};
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Model folder in Hugging Face layout, or an isobit run that trained all weights
    #[arg(long, value_name = "FOLDER")]
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) options: Options,
}

/// Options that accompany a model folder.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Adapter folder (adapter_config.json, adapter_model.safetensors) from isobit or PEFT, or an
    /// isobit run or checkpoint
    #[arg(long, value_name = "FOLDER")]
    pub(crate) adapter: Option<PathBuf>,
    /// Device: cpu, opencl:N, cuda:N, hip:N, or auto for the first card that works, else the CPU;
    /// `eval` also takes a list that divides the layers: cuda:0,cpu [default: cpu, or that of the
    /// config]
    #[arg(long, value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// Number of threads; 0 means all cores [default: 0, or that of the config]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Slice product profile: x2 or x3 [default: x2]
    #[arg(long)]
    pub(crate) profile: Option<String>,
    /// Quantise linear layers to 4 bits while loading [default: as the adapter was trained]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) load_in_4bit: Option<bool>,
    /// Set a variable of the chat template: `--template-var enable_thinking=false`
    #[arg(long, value_name = "NAME=VALUE", value_parser = crate::data::template_variable)]
    pub(crate) template_var: Vec<String>,
    /// Print results, warnings and errors only
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

impl Arguments {
    pub(crate) fn profile(&self) -> Result<Profile, Failure> {
        let profile = Profile::ALL.into_iter().find(|profile| profile.name() == self.profile_name());
        profile.ok_or_else(|| Failure::usage(format!("unknown profile `{}`", self.profile_name()), "use x2 or x3"))
    }

    pub(crate) fn profile_name(&self) -> &str {
        self.options.profile.as_deref().unwrap_or(Profile::X2.name())
    }

    /// Builds the model for sequences of at most `positions` tokens.
    pub(crate) fn build<B: Backend>(
        &self,
        backend: &B,
        positions: usize,
        with_adapter: bool,
    ) -> Result<Built<B>, Failure> {
        let opened = self.open(positions, with_adapter)?;
        let built = opened.while_checked(|| {
            let mut built = build(backend, &opened.config, &opened.weights, &opened.settings)?;
            if let Some(file) = &opened.adapter_file()? {
                peft::load(backend, &mut built, file)?;
            }
            Ok(built)
        });
        built.map_err(|error| self.misfit(&error, opened.adapter.as_deref()))
    }

    /// Opens the files of the model, and of the adapter if there is one.
    pub(crate) fn open(&self, positions: usize, with_adapter: bool) -> Result<Opened, Failure> {
        let profile = self.profile()?;
        let adapter = self.options.adapter.as_deref().filter(|_| with_adapter).map(adapter::located).transpose()?;
        self.opened(profile, positions, adapter.clone(), with_adapter)
            .map_err(|error| self.misfit(&error, adapter.as_deref()))
    }

    /// The same to write the model again: tensors that nothing reads are copied, so no warning.
    pub(crate) fn open_to_copy(&self) -> Result<Opened, Failure> {
        let adapter = self.options.adapter.as_deref().map(adapter::located).transpose()?;
        let opened = self.opened(self.profile()?, 1, adapter.clone(), false);
        opened.map_err(|error| self.misfit_as("--base", &error, adapter.as_deref()))
    }

    /// The failure of an adapter that does not match the model names both.
    pub(crate) fn misfit(&self, error: &RunError, adapter: Option<&Path>) -> Failure {
        self.misfit_as("--model", error, adapter)
    }

    /// The same where `option` gives the model.
    pub(crate) fn misfit_as(&self, option: &str, error: &RunError, adapter: Option<&Path>) -> Failure {
        let mut failure = Failure::from(error);
        if let Some(adapter) = adapter.filter(|_| is_misfit(error)) {
            failure.hint = self.bases(adapter, option).or(failure.hint);
        }
        failure
    }

    /// The base that the adapter names, and the model: what to check when they do not match.
    fn bases(&self, adapter: &Path, option: &str) -> Option<String> {
        let text = regular::read_text(&adapter.join(ADAPTER_CONFIG), CONFIG_BYTES_MAX).ok()?;
        let base = peft::base_name(&text)?;
        if is_same_folder(Path::new(&base), &self.model) {
            return Some(format!(
                "the adapter names {} as its base, but was made for another model: use the one that it belongs to",
                self.model.display()
            ));
        }
        Some(format!(
            "the adapter was made for the base `{base}`, but {option} is {}: use the model that it belongs to",
            self.model.display()
        ))
    }

    fn opened(
        &self,
        profile: Profile,
        positions: usize,
        adapter: Option<PathBuf>,
        warns: bool,
    ) -> Result<Opened, RunError> {
        let folder = located(&self.model);
        let config = model_config(&folder)?;
        let made_on = adapter.as_deref().map(Manifest::check).transpose()?.flatten().and_then(|manifest| manifest.base);
        let trained = match &adapter {
            Some(folder) if !folder.exists() && is_hub_name(folder) => {
                let what = format!("{} does not exist", folder.display());
                return Err(RunError::Refused { what, hint: HUB_HINT });
            }
            Some(folder) => {
                Trained::Lora(peft::parse_config(&regular::read_text(&folder.join(ADAPTER_CONFIG), CONFIG_BYTES_MAX)?)?)
            }
            None => Trained::Nothing,
        };
        let settings = Settings { trained, profile, positions, seed: 0 };
        let quantises = match (self.options.load_in_4bit, &self.options.adapter) {
            (Some(wanted), _) => wanted,
            // Also for the base alone beside its adapter: the two are compared.
            (None, Some(beside)) => {
                let beside = adapter.clone().or_else(|| adapter::located(beside).ok());
                beside.map_or(Ok(false), |folder| is_trained_in_4bit(&folder))?
            }
            (None, None) => false,
        };
        let weights = Weights::new(TensorFiles::open(&folder)?, &config)?.load_in_4bit(quantises)?;
        if let Some(note) = weights.unused_note().filter(|_| warns) {
            tell(&format!("warning: {note}"));
        }
        Ok(Opened { folder, config, weights, settings, adapter, made_on })
    }
}

/// The files of a model and its adapter, before anything is built.
pub(crate) struct Opened {
    pub(crate) folder: PathBuf,
    pub(crate) config: Config,
    pub(crate) weights: Weights,
    pub(crate) settings: Settings,
    pub(crate) adapter: Option<PathBuf>,
    /// The digest of the base that the adapter was made on.
    made_on: Option<Hash>,
}

impl Opened {
    /// Builds the model while its files are checked: both read every byte of them, and the second
    /// finds it in memory.
    pub(crate) fn while_checked<T>(&self, build: impl FnOnce() -> Result<T, RunError>) -> Result<T, RunError> {
        let check = || check_model(&self.folder, &self.weights, self.made_on);
        let (checked, built) = std::thread::scope(|scope| {
            let checking = std::thread::Builder::new().spawn_scoped(scope, check);
            let built = build();
            let checked = match checking {
                Ok(checking) => checking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                // The machine has no thread to give.
                Err(_) => check(),
            };
            (checked, built)
        });
        // First: a damaged model may be the reason it cannot be built.
        checked?;
        built
    }

    pub(crate) fn adapter_file(&self) -> Result<Option<SafeTensors>, FileError> {
        self.adapter.as_deref().map(|folder| SafeTensors::open(&folder.join(ADAPTER))).transpose()
    }
}

/// Checks the files of the model against its manifest, if it has one, and that it is the model the
/// adapter was trained on, if the adapter records that.
fn check_model(folder: &Path, weights: &Weights, made_on: Option<Hash>) -> Result<(), FileError> {
    Manifest::check(folder)?;
    let Some(made_on) = made_on else { return Ok(()) };
    let found = base_digest(folder, weights)?;
    if found != made_on {
        let [made_on, found] = [made_on, found].map(|digest| digest.to_string()[..16].to_string());
        tell(&format!(
            "warning: the adapter was trained on a different base: its digest is {made_on}, that of {} is {found} (config and weights)",
            folder.display()
        ));
    }
    Ok(())
}

/// The folder of a model. A run that trained all weights stands for its final ones, as it does for
/// `--adapter`.
pub(crate) fn located(folder: &Path) -> PathBuf {
    // A cache without a current revision is reported when its config is read.
    let folder = hub_cache::resolved(folder).unwrap_or_else(|_| folder.to_owned());
    let (there, last) = (folder.join("config.json"), folder.join(FINAL));
    if !there.exists() && last.join("config.json").is_file() { last } else { folder }
}

fn is_same_folder(a: &Path, b: &Path) -> bool {
    a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Whether the adapter's tensors or targets do not match the model.
fn is_misfit(error: &RunError) -> bool {
    match error {
        RunError::Model(ModelError::Adapter(_)) => true,
        RunError::Model(ModelError::Tensor { name, .. }) => name.starts_with("base_model."),
        RunError::Model(ModelError::File(FileError::NoTensor { path, .. })) => path.ends_with(ADAPTER),
        _ => false,
    }
}
