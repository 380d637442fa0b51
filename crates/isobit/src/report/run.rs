//! All that a page shows of one run: its curves, its config, the memory it was planned to need and
//! the hash of its weights. Only the metrics must be there.

use super::metrics::Curves;
use crate::Failure;
use crate::auto;
use crate::ending;
use crate::fits::{Given, Ranks, memory_fit};
use crate::model;
use crate::plan_output::{Moment, moments, overhead_label};
use crate::samples::{self, Sample};
use crate::split::split_fit;
use isobit_proof::receipt::Receipt;
use isobit_proof::{FileError, Manifest};
use isobit_training::checkpoint::{FINAL, RESOLVED};
use isobit_training::config::{self, Device, Run, RunKey};
use isobit_training::plan::MemoryPlan;
use std::path::{Path, PathBuf};

/// More than any machine has: the page shows what a run needs, wherever it ran.
const MEMORY: u64 = 1 << 50;

pub(super) struct ShownRun {
    pub(super) folder: PathBuf,
    /// The last part of the path.
    pub(super) name: String,
    pub(super) curves: Curves,
    pub(super) config: Option<ShownConfig>,
    /// By device.
    pub(super) memory: Vec<DeviceMemory>,
    /// Of the weights in `final`.
    pub(super) hash: Option<String>,
    /// Texts before and after training.
    pub(super) samples: Vec<Sample>,
    /// None if there is none, or if it is damaged.
    pub(super) receipt: Option<Receipt>,
}

pub(super) struct ShownConfig {
    pub(super) model: String,
    pub(super) adapter: String,
    pub(super) keys: Vec<RunKey>,
}

/// The planned memory of a device.
#[derive(Clone)]
pub(super) struct DeviceMemory {
    pub(super) device: String,
    /// Items of a step and their bytes, and the most of them at one time.
    pub(super) items: Vec<(&'static str, u64)>,
    pub(super) bytes_peak: u64,
    /// What the device must hold at other times, what is beside buffers, and all that is needed;
    /// none of a list of devices, whose memories are shared.
    pub(super) beyond_step: Vec<(&'static str, u64)>,
}

impl ShownRun {
    /// Reads a run; `notes` gets a line for each part that is missing.
    pub(super) fn read(folder: &Path, notes: &mut Vec<String>) -> Result<Self, Failure> {
        let mut shown = Self::measured(folder)?;
        let intact = ending::hash(&folder.join(FINAL)).and_then(|_| Manifest::check(&folder.join(FINAL)));
        if let Err(error) = intact {
            shown.hash = None;
            notes.push(format!("{}: no final weights: {error}", folder.display()));
        }
        if let Err(error) = Receipt::read(folder) {
            notes.push(format!("{}: no receipt: {error}", folder.display()));
        }
        match samples::read(folder) {
            Ok(samples) => shown.samples = samples,
            Err(what) => notes.push(format!("no samples: {what}")),
        }
        match config::read(&folder.join(RESOLVED), &[]) {
            Ok(settled) => {
                shown.config = Some(ShownConfig::of(&settled.run));
                match memory_by_item(&settled.run) {
                    Ok(memory) => shown.memory = memory,
                    Err(failure) => {
                        notes.push(format!("{}: no memory by item: {}", folder.display(), failure.message));
                    }
                }
            }
            Err(error) => notes.push(format!("{}: no config: {error}", folder.display())),
        }
        Ok(shown)
    }

    /// A run of this process, whose config and memory are known.
    pub(super) fn of(run: &Run, memory: &[DeviceMemory]) -> Result<Self, Failure> {
        let measured = Self::measured(&run.output_dir)?;
        let samples = samples::read(&run.output_dir).unwrap_or_default();
        Ok(Self { config: Some(ShownConfig::of(run)), memory: memory.to_vec(), samples, ..measured })
    }

    fn measured(folder: &Path) -> Result<Self, Failure> {
        let curves = Curves::read(folder).map_err(|error| match error {
            FileError::Missing { .. } => Failure::usage(
                format!("{} is no run: it has no metrics.jsonl", folder.display()),
                "name the folder that `train` wrote",
            ),
            error => error.into(),
        })?;
        // `.` and `..` have no name of their own.
        let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
        let name = whole.file_name().map_or("run".to_string(), |name| name.to_string_lossy().into_owned());
        let hash = ending::hash(&folder.join(FINAL)).ok();
        let (folder, receipt) = (folder.to_path_buf(), Receipt::read(folder).ok());
        let (memory, samples) = (Vec::new(), Vec::new());
        Ok(Self { folder, name, curves, config: None, memory, hash, samples, receipt })
    }
}

impl ShownConfig {
    fn of(run: &Run) -> Self {
        let model = run.base_model.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
        let keys = run.all_keys();
        let adapter = keys.iter().find(|key| key.name == "adapter.type");
        let adapter = adapter.map_or(String::new(), |key| key.value.trim_matches('"').to_string());
        Self { model, adapter, keys }
    }
}

/// The memory of a run by device and item, on its devices, whether they are here or not.
pub(super) fn memory_by_item(run: &Run) -> Result<Vec<DeviceMemory>, Failure> {
    let mut run = run.clone();
    run.base_model = model::located(&run.base_model);
    // Divided as it would be now, if its devices are here.
    run = auto::placed(run, &Given::default(), Ranks::ALONE, true);
    if run.devices.len() > 1 {
        let given = Given { memories: vec![MEMORY; run.devices.len()], ..Given::default() };
        let here = split_fit(&run, &Given::default(), Ranks::ALONE);
        let fit = here.or_else(|_| split_fit(&run, &given, Ranks::ALONE))?;
        let names = run.devices.iter().map(ToString::to_string);
        return Ok(names.zip(&fit.stages).map(|(name, stage)| DeviceMemory::of(name, &stage.plan)).collect());
    }
    let fit = memory_fit(&run, &Given::memory(Some(MEMORY)), Ranks::ALONE)?;
    let Some(plan) = &fit.plan else { return Ok(Vec::new()) };
    let held: Vec<Moment> =
        moments(plan, fit.on_host).into_iter().filter(|moment| moment.on_device.is_some()).collect();
    let most = held.iter().map(|moment| moment.bytes as u64).max().unwrap_or(0);
    let name = match run.devices[0] {
        Device::Auto => fit.device.clone(),
        device => device.to_string(),
    };
    let mut memory = DeviceMemory::of(name, plan);
    // The first is the peak of a step.
    memory.beyond_step = held.iter().skip(1).map(|moment| (moment.name, moment.bytes as u64)).collect();
    memory.beyond_step.extend([(overhead_label(fit.on_host).0, fit.overhead), ("needed", most + fit.overhead)]);
    Ok(vec![memory])
}

impl DeviceMemory {
    fn of(device: String, plan: &MemoryPlan) -> Self {
        let items = plan.items.iter().map(|(item, bytes)| (item.name(), *bytes as u64)).collect();
        Self { device, items, bytes_peak: plan.bytes_peak as u64, beyond_step: Vec::new() }
    }
}
