//! A model from its folder, with an adapter where one is named: what `eval`, `generate` and `chat` share.

use crate::Failure;
use crate::train::failed;
use isobit_kernels::Backend;
use isobit_models::build::Settings;
use isobit_models::{Built, Trained, Weights, build, peft};
use isobit_numerics::slices::Profile;
use isobit_proof::FileError;
use isobit_proof::safetensors::{Checkpoint, SafeTensors};
use isobit_training::prepare::{RunError, model_config};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Model folder in Hugging Face layout
    #[arg(long, value_name = "FOLDER")]
    pub(crate) model: PathBuf,
    /// Adapter folder (adapter_config.json, adapter_model.safetensors): ours or PEFT's
    #[arg(long, value_name = "FOLDER")]
    pub(crate) adapter: Option<PathBuf>,
    /// cpu, opencl:N or cuda:N
    #[arg(long, default_value = "cpu")]
    pub(crate) device: String,
    /// Threads; 0 is all cores
    #[arg(long, default_value_t = 0)]
    pub(crate) threads: usize,
    /// Profile of the slice products: x2 or x3
    #[arg(long, default_value = "x2")]
    profile: String,
}

impl Arguments {
    pub(crate) fn profile(&self) -> Result<Profile, Failure> {
        let profile = Profile::ALL.into_iter().find(|profile| profile.name() == self.profile);
        profile.ok_or_else(|| Failure::usage(format!("unknown profile `{}`", self.profile), "x2 and x3 exist"))
    }

    /// Builds the model for sequences of at most `positions` tokens.
    pub(crate) fn build<B: Backend>(
        &self,
        backend: &B,
        positions: usize,
        with_adapter: bool,
    ) -> Result<Built<B>, Failure> {
        self.built(backend, positions, with_adapter).map_err(|error| failed(&error))
    }

    fn built<B: Backend>(&self, backend: &B, positions: usize, with_adapter: bool) -> Result<Built<B>, RunError> {
        let config = model_config(&self.model)?;
        let adapter = self.adapter.as_deref().filter(|_| with_adapter);
        let trained = match adapter {
            Some(folder) => Trained::Lora(peft::parse_config(&text(&folder.join("adapter_config.json"))?)?),
            None => Trained::Nothing,
        };
        let profile = Profile::ALL.into_iter().find(|profile| profile.name() == self.profile).unwrap_or(Profile::X2);
        let settings = Settings { trained, profile, positions, seed: 0 };
        let mut built = build(backend, &config, &Weights::new(Checkpoint::open(&self.model)?, &config)?, &settings)?;
        if let Some(folder) = adapter {
            let file = SafeTensors::open(&folder.join("adapter_model.safetensors"))?;
            peft::load(backend, &mut built, &file)?;
        }
        Ok(built)
    }
}

/// A small text file.
fn text(path: &Path) -> Result<String, FileError> {
    const BYTES_MOST: u64 = 1 << 24;
    let failed = |error| FileError::from_io("read", path, error);
    let malformed = |what: &str| FileError::Malformed { path: path.to_path_buf(), what: what.to_string() };
    if std::fs::metadata(path).map_err(failed)?.len() > BYTES_MOST {
        return Err(malformed("it is larger than any config"));
    }
    let bytes = std::fs::read(path).map_err(failed)?;
    String::from_utf8(bytes).map_err(|_| malformed("it is not UTF-8"))
}
