//! `adapter.resume_from`: a run that starts from an adapter, of Isobit or PEFT, instead of a new
//! one. The optimizer and the schedule start anew. The config must describe the same adapter; what
//! the adapter's file holds is part of the run's identity.

use crate::checkpoint::{ADAPTER, ADAPTER_CONFIG, FINAL};
use crate::config::{Adapter, Run};
use crate::engine::{Engine, Stored};
use crate::prepare::{CONFIG_BYTES_MAX, HUB_HINT, Prepared, RunError, is_hub_name, is_trained_in_4bit, trained};
use isobit_models::adapter::{AdapterDifference, Held};
use isobit_models::{Config, LoraConfig, Trained, peft};
use isobit_proof::safetensors::SafeTensors;
use isobit_proof::{Manifest, regular};
use std::path::{Path, PathBuf};

/// A run stands for its final adapter.
fn located(named: &Path) -> PathBuf {
    let last = named.join(FINAL);
    let is_run = !named.join(ADAPTER_CONFIG).is_file() && last.join(ADAPTER_CONFIG).is_file();
    if is_run { last } else { named.to_path_buf() }
}

/// Whether a run starts from an adapter that was trained on a base quantised while it was loaded.
pub(crate) fn is_quantised(run: &Run) -> Result<bool, RunError> {
    let Adapter::Lora(lora) = &run.adapter else { return Ok(false) };
    lora.resume_from.as_ref().map_or(Ok(false), |named| is_trained_in_4bit(&located(named)))
}

/// The tensor file of the adapter that the config names, once it is found to be the one that the
/// config describes.
pub(crate) fn find(run: &Run, model: &Config) -> Result<Option<PathBuf>, RunError> {
    let Adapter::Lora(lora) = &run.adapter else { return Ok(None) };
    let Some(named) = &lora.resume_from else { return Ok(None) };
    if !named.exists() && is_hub_name(named) {
        return Err(RunError::Refused { what: format!("{} does not exist", named.display()), hint: HUB_HINT });
    }
    let folder = located(named);
    let theirs = peft::parse_config(&regular::read_text(&folder.join(ADAPTER_CONFIG), CONFIG_BYTES_MAX)?)?;
    Manifest::check(&folder)?;
    if let Trained::Lora(ours) = trained(run)
        && let Some(difference) = ours.difference(&theirs, model)?
    {
        return Err(refused(&folder, &difference, &theirs));
    }
    let file = folder.join(ADAPTER);
    // Opened once before the run claims its folder: a damaged file should change nothing.
    SafeTensors::open(&file)?;
    Ok(Some(file))
}

fn refused(folder: &Path, difference: &AdapterDifference, theirs: &LoraConfig) -> RunError {
    let said = |held: Option<Held>| match held {
        None => "none".to_string(),
        Some(Held::Whole) => "the whole module".to_string(),
        Some(Held::Factors { rank, scale }) => format!("rank {rank} and scale {scale}"),
    };
    let saved = |lora: &LoraConfig| format!("modules_to_save = {:?}, ", lora.saved);
    let AdapterDifference { name, ours, theirs: found } = difference;
    RunError::Target {
        what: format!(
            "`adapter.resume_from`: on {name}, the adapter in {} has {}, but the config says {}",
            folder.display(),
            said(*found),
            said(*ours)
        ),
        hint: format!(
            "set {}lora_r = {}, lora_alpha = {} and the targets as in {}",
            if matches!(found.or(*ours), Some(Held::Whole)) { saved(theirs) } else { String::new() },
            theirs.rank,
            theirs.alpha,
            folder.join(ADAPTER_CONFIG).display()
        ),
    }
}

/// Gives a new run the factors it starts from.
pub(crate) fn load<E: Engine>(prepared: &Prepared, engine: &mut E) -> Result<(), RunError> {
    let Some(path) = &prepared.start else { return Ok(()) };
    let file = SafeTensors::open(path)?;
    let tensors = engine.tensors().to_vec();
    peft::read(&tensors, &file, |at, values| engine.write(at, Stored::Value, values).map_err(RunError::from))
}
