//! The folder `final` of a run: settled before the first step, written at the end with the weights
//! of the last or of the best update, and a receipt of its own.

use crate::checkpoint::{self, Opened};
use crate::engine::Engine;
use crate::hub_cache;
use crate::log::Log;
use crate::model_folder::{self, ModelFolder, Shapes};
use crate::prepare::{Prepared, RunError, base_digest};
use crate::state::{Live, State};
use isobit_models::build::Settings;
use isobit_models::{Trained, TrainedTensor, peft};
use isobit_proof::{FileError, receipt};
use std::path::Path;

/// The future contents of the folder `final`, settled before the first step: a run should not end
/// with a result that cannot be saved.
pub(crate) enum Final<'a> {
    Adapter { config: &'a serde_json::Value, shapes: Shapes },
    Model(ModelFolder<'a>),
}

impl<'a> Final<'a> {
    pub(crate) fn new<E: Engine>(
        state: &State<E>,
        prepared: &'a Prepared,
        adapter_config: Option<&'a serde_json::Value>,
    ) -> Result<Self, RunError> {
        let shapes: Shapes = state.engine.tensors().iter().flat_map(TrainedTensor::in_file).collect();
        let Prepared { run, model, weights, .. } = prepared;
        Ok(match adapter_config {
            Some(config) => Self::Adapter { config, shapes },
            None => Self::Model(ModelFolder::new(&run.base_model, model, weights, &shapes, run.training.save_dtype)?),
        })
    }
}

/// The config of a trained adapter; `base` is the folder whose name it gives.
pub(crate) fn adapter_config(settings: &Settings, prepared: &Prepared, base: &Path) -> Option<serde_json::Value> {
    // The hub's name of a cached model, otherwise the last component of a path: nothing absolute is
    // stored.
    let last = || base.file_name().map_or("base".to_string(), |name| name.to_string_lossy().into_owned());
    let name = hub_cache::hub_name(base).unwrap_or_else(last);
    match &settings.trained {
        Trained::Lora(lora) => Some(peft::config_json(&lora.written(&prepared.model), &name)),
        _ => None,
    }
}

/// Writes the folder `final`: the best weights if the config asks for them, else the last.
pub(crate) fn finish<E: Engine>(
    state: &State<E>,
    prepared: &Prepared,
    result: &Final<'_>,
    log: &mut Log,
) -> Result<(), RunError> {
    let run = &prepared.run;
    let best = checkpoint::best(&run.output_dir)?.filter(|_| run.training.load_best_model_at_end);
    let saved = match best {
        Some(best) if best.step != state.progress.step => {
            Some(checkpoint::open(&checkpoint::folder_of(&run.output_dir, best.step), &prepared.identity)?)
        }
        _ => None,
    };
    checkpoint::replace_final(&run.output_dir, &prepared.identity, |folder| {
        let mut names = write(state, prepared, result, saved.as_ref(), folder)?;
        if let Some(record) = &mut log.record {
            record.finish(folder, &names, &state.progress)?;
            names.push(receipt::NAME.to_string());
        }
        Ok::<_, RunError>(names)
    })?;
    log.write_receipt(&state.progress, &run.output_dir)
}

/// Writes the files of the result into a folder: the weights of a checkpoint, or those of the
/// state. Returns their names.
pub(crate) fn write<E: Engine>(
    state: &State<E>,
    prepared: &Prepared,
    result: &Final<'_>,
    saved: Option<&Opened>,
    folder: &Path,
) -> Result<Vec<String>, RunError> {
    let mut live = Live::new(&state.engine);
    let mut tensor = |name: &str, shape: &[usize]| match saved {
        Some(saved) => Ok(saved.weight(name, shape)?),
        None => live.tensor(name),
    };
    match result {
        Final::Adapter { config, shapes } => checkpoint::put_adapter(folder, config, |path| {
            model_folder::put_tensors(path, shapes, prepared.run.training.save_dtype, &mut tensor)
        }),
        Final::Model(whole) => {
            let names = whole.write(folder, &mut tensor)?;
            check_base(prepared)?;
            Ok(names)
        }
    }
}

/// Frozen tensors of the result are copied from the base's files: those must be what they were when
/// the run began.
fn check_base(prepared: &Prepared) -> Result<(), RunError> {
    let folder = &prepared.run.base_model;
    if base_digest(folder, &prepared.weights)?.to_string() == prepared.identity.base {
        return Ok(());
    }
    Err(FileError::Malformed {
        path: folder.clone(),
        what: "the base model changed during the run; restore it and run again with `--resume`".to_string(),
    }
    .into())
}
