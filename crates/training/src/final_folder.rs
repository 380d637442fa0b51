//! The folder `final` of a run: settled before the first step, written at the end with the weights
//! of the last or of the best update, and a receipt of its own.

use crate::checkpoint;
use crate::engine::Engine;
use crate::log::Log;
use crate::model_folder::{self, ModelFolder, Shapes};
use crate::prepare::{Prepared, RunError, base_digest};
use crate::state::{Live, State};
use isobit_models::TrainedTensor;
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
    let mut live = Live::new(&state.engine);
    let mut tensor = |name: &str, shape: &[usize]| match &saved {
        Some(saved) => Ok(saved.weight(name, shape)?),
        None => live.tensor(name),
    };
    let mut put = |folder: &Path| match result {
        Final::Adapter { config, shapes } => checkpoint::put_adapter(folder, config, |path| {
            model_folder::put_tensors(path, shapes, run.training.save_dtype, &mut tensor)
        }),
        Final::Model(whole) => {
            let names = whole.write(folder, &mut tensor)?;
            check_base(prepared)?;
            Ok(names)
        }
    };
    checkpoint::replace_final(&run.output_dir, &prepared.identity, |folder| {
        let mut names = put(folder)?;
        if let Some(record) = &mut log.record {
            record.finish(folder, &names, &state.progress)?;
            names.push(receipt::NAME.to_string());
        }
        Ok::<_, RunError>(names)
    })?;
    log.write_receipt(&state.progress, &run.output_dir)
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
