//! The record of a run (`docs/receipt-format.md`): a line of the chain for every update, and the
//! receipt that is made from it at every checkpoint and at the end. Only rank 0 keeps it.

use crate::checkpoint::{self, Progress, folder_name};
use crate::config::Every;
use crate::engine::Engine;
use crate::prepare::{Prepared, RunError};
use crate::row::{self, Row};
use crate::run::Watch;
use crate::state::{Restored, State};
use crate::step::{Evaluation, StepReport};
use isobit_models::{TrainedTensor, Weights};
use isobit_proof::chain::{self, Chain, ChainFile, CutChain, Origin, Update};
use isobit_proof::hash::{FileRecord, Hash, Manifest};
use isobit_proof::layout::SMALL_FILES;
use isobit_proof::name::{harmless, quoted};
use isobit_proof::receipt::{Base, Best, DataFile, FolderRecord, Made, Receipt, TOKENIZER_FILES};
use isobit_proof::{FileError, disk, receipt, regular};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The line of an update.
pub(crate) fn line(
    step: u64,
    rows: &[&Row],
    report: &StepReport,
    learning_rate: f64,
    evaluation: Option<chain::Evaluation>,
) -> Update {
    let mut line = Update::new(step, row::digest(rows.iter().copied()), report.tokens as u64);
    (line.loss, line.learning_rate) = (report.loss.to_bits(), learning_rate.to_bits());
    (line.norm, line.evaluation) = (report.grad_norm.to_bits(), evaluation);
    line.set_digests(&report.digests);
    line
}

/// An evaluation as the line has it.
pub(crate) fn evaluated(evaluation: &Evaluation, best: bool) -> chain::Evaluation {
    chain::Evaluation {
        loss: evaluation.loss().to_bits(),
        correct: evaluation.correct as u64,
        targets: evaluation.targets as u64,
        best,
    }
}

/// The open record of a run.
pub(crate) struct Recorder {
    chain: ChainFile,
    about: About,
    result: Option<BTreeMap<String, FileRecord>>,
}

/// What a receipt says besides where the chain ends.
pub(crate) struct About {
    made: Made,
    /// Updates of a segment.
    segment: u64,
    environment: BTreeMap<String, String>,
}

/// Where the chain ends, and the digest of the metrics there.
#[derive(Clone, Copy)]
pub(crate) struct End {
    pub(crate) link: Hash,
    pub(crate) metrics: Hash,
}

/// The chain of a run that begins.
pub(crate) fn create<E: Engine>(state: &State<E>, prepared: &Prepared) -> Result<ChainFile, RunError> {
    let names = state.engine.tensors().iter().map(|tensor| tensor.name.clone()).collect();
    let origin = Origin::new(prepared.identity.fields(), names, &state.engine.digests()?);
    Ok(ChainFile::create(&prepared.run.output_dir, &origin)?)
}

/// The chain up to the `step` that a run resumes from. None if the checkpoint has no link: then the
/// run has no record. Nothing is changed yet.
pub(crate) fn cut(output_dir: &Path, progress: &Progress, watch: &mut dyn Watch) -> Result<Option<CutChain>, RunError> {
    match progress.chain {
        Some(link) => ChainFile::cut(output_dir, progress.step, link).map(Some).map_err(not_the_record),
        None if watch.needs_receipt() => Err(RunError::Refused {
            what: "the checkpoint was written by a version without receipts: this run would leave none".to_string(),
            hint: "start the run anew in another folder, or leave out `--fixed`",
        }),
        None => {
            watch.noted("the checkpoint was written by a version without receipts: this run leaves none");
            Ok(None)
        }
    }
}

/// Lines of a run that resumes are not those that its checkpoint names.
pub(crate) fn not_the_record(error: FileError) -> RunError {
    match error {
        FileError::Missing { path } => RunError::Differs {
            what: format!("{} is missing, and a run does not go on without its record", path.display()),
            hint: "put it back from a copy, or start the run again in another `output_dir`",
        },
        FileError::Malformed { path, what } | FileError::Altered { path, what } => RunError::Differs {
            what: format!("{} does not match its record: {what}", path.display()),
            hint: "restore the file, or go back to a checkpoint before that line: `--resume-from checkpoint-N`",
        },
        other => other.into(),
    }
}

/// Removes the record of a run that goes on without one.
pub(crate) fn forget(output_dir: &Path) -> Result<(), FileError> {
    [chain::NAME, receipt::NAME].iter().try_for_each(|name| remove(&output_dir.join(name)))
}

impl About {
    pub(crate) fn new<E: Engine>(
        state: &State<E>,
        prepared: &Prepared,
        (threads, watch): (usize, &mut dyn Watch),
    ) -> Result<Self, RunError> {
        let made = made(prepared, state.engine.tensors(), threads)?;
        Ok(Self { made, segment: segment(prepared), environment: watch.environment() })
    }

    /// The receipt after so many updates.
    fn receipt(&self, link: Hash, progress: &Progress, result: Option<&BTreeMap<String, FileRecord>>) -> Receipt {
        let best = progress.best.map(|best| Best { step: best.step, loss: format!("{:016x}", best.metric.to_bits()) });
        let made = Made { updates: progress.step, link, best, finished: result.is_some(), ..self.made.clone() };
        Receipt::new(env!("CARGO_PKG_VERSION"), made, self.segment, result.cloned())
    }

    /// Writes the receipt of the run folder.
    pub(crate) fn write(
        &self,
        output_dir: &Path,
        progress: &Progress,
        end: End,
        result: Option<&BTreeMap<String, FileRecord>>,
    ) -> Result<(), RunError> {
        let mut record = FolderRecord { files: BTreeMap::new(), metrics: end.metrics, checkpoints: BTreeMap::new() };
        for name in SMALL_FILES {
            let hash = regular::if_there(Hash::of_file(&output_dir.join(name)))?;
            record.files.extend(hash.map(|hash| (name.to_string(), hash)));
        }
        for step in checkpoint::steps(output_dir)?.into_iter().filter(|step| *step <= progress.step) {
            let name = folder_name(step);
            let hash = regular::if_there(Hash::of_file(&output_dir.join(&name).join(Manifest::NAME)))?;
            record.checkpoints.extend(hash.map(|hash| (name, hash)));
        }
        let mut receipt = self.receipt(end.link, progress, result);
        (receipt.folder, receipt.environment) = (Some(record), Some(self.environment.clone()));
        Ok(receipt.write(output_dir)?)
    }
}

impl Recorder {
    pub(crate) fn new(chain: ChainFile, about: About) -> Self {
        Self { chain, about, result: None }
    }

    pub(crate) fn append(&mut self, update: &Update) -> Result<(), FileError> {
        self.chain.append(update)
    }

    pub(crate) fn sync(&mut self) -> Result<(), FileError> {
        self.chain.sync()
    }

    pub(crate) fn link(&self) -> Hash {
        self.chain.link()
    }

    /// Writes the receipt of the run folder.
    pub(crate) fn write(&self, output_dir: &Path, progress: &Progress, metrics: Hash) -> Result<(), RunError> {
        self.about.write(output_dir, progress, End { link: self.chain.link(), metrics }, self.result.as_ref())
    }

    /// Writes the receipt of the final folder, which holds these files.
    pub(crate) fn finish(&mut self, folder: &Path, names: &[String], progress: &Progress) -> Result<(), RunError> {
        self.result = Some(Manifest::of(folder, names.iter().map(String::as_str))?.files);
        Ok(self.about.receipt(self.chain.link(), progress, self.result.as_ref()).write(folder)?)
    }
}

/// Updates between two checkpoints: the segments that a proof chooses from.
pub(crate) fn segment(prepared: &Prepared) -> u64 {
    match prepared.run.training.save {
        Every::Never => prepared.steps.total,
        Every::Steps(steps) => steps,
        Every::Epoch => prepared.steps.per_epoch,
    }
}

/// What the run is made from, before its first update.
pub(crate) fn made(prepared: &Prepared, tensors: &[TrainedTensor], threads: usize) -> Result<Made, RunError> {
    let run = &prepared.run;
    let mut tokenizer = BTreeMap::new();
    for name in TOKENIZER_FILES {
        let record = regular::if_there(FileRecord::of(&run.base_model.join(name)))?;
        tokenizer.extend(record.map(|record| (name.to_string(), record)));
    }
    let train = run.datasets.iter().map(|path| (path, "train"));
    let eval = match &run.eval.rows {
        crate::config::EvalRows::File(path) => Some((path, "eval")),
        _ => None,
    };
    let data = train.chain(eval).map(|(path, used_for)| DataFile::of(path, used_for));
    Ok(Made {
        identity: prepared.identity.fields(),
        config: run.influences(),
        base: Base {
            files: prepared.base_files.iter().cloned().collect(),
            tensors: tensor_hashes(&prepared.weights, threads),
        },
        tokenizer,
        data: data.collect::<Result<_, _>>()?,
        rows: Some(prepared.train.len() as u64),
        reordered: tensors.iter().filter(|one| one.is_reordered()).map(|one| one.name.clone()).collect(),
        updates: 0,
        link: Hash([0; 32]),
        best: None,
        finished: false,
    })
}

/// What a receipt says that the run was made from, and is not what was read here, in words.
pub fn differing_inputs(prepared: &Prepared, receipt: &Receipt, threads: usize) -> Result<Vec<String>, RunError> {
    let (found, recorded) = (made(prepared, &[], threads)?, &receipt.made);
    let mut said = Vec::new();
    let mut compare = |kind: &str, found: BTreeMap<String, String>, recorded: BTreeMap<String, String>| {
        let names: BTreeSet<&String> = found.keys().chain(recorded.keys()).collect();
        let shown = |value: Option<&String>| value.map_or("none".to_string(), |value| harmless(value, 80));
        for name in names.into_iter().filter(|name| found.get(*name) != recorded.get(*name)) {
            let (ours, theirs) = (shown(found.get(name)), shown(recorded.get(name)));
            said.push(format!("{kind} {}: the receipt has {theirs}, but it is {ours}", quoted(name)));
        }
    };
    let files = |files: &BTreeMap<String, FileRecord>| -> BTreeMap<String, String> {
        files.iter().map(|(name, of)| (name.clone(), format!("{} ({} bytes)", of.blake3, of.size))).collect()
    };
    let tensors = |all: &BTreeMap<String, Hash>| -> BTreeMap<String, String> {
        all.iter().map(|(name, hash)| (name.clone(), hash.to_string())).collect()
    };
    let data = |all: &[DataFile]| -> BTreeMap<String, String> {
        let shown = |of: &DataFile| format!("{} ({} bytes, {} lines)", of.blake3, of.size, of.line_count);
        all.iter().enumerate().map(|(at, of)| (format!("{}-{at}", of.used_for), shown(of))).collect()
    };
    compare("identity", found.identity.clone(), recorded.identity.clone());
    compare("config", found.config.clone(), recorded.config.clone());
    compare("base file", files(&found.base.files), files(&recorded.base.files));
    compare("base tensor", tensors(&found.base.tensors), tensors(&recorded.base.tensors));
    compare("tokenizer file", files(&found.tokenizer), files(&recorded.tokenizer));
    compare("data file", data(&found.data), data(&recorded.data));
    if said.is_empty() && (found.data != recorded.data || found.rows != recorded.rows) {
        said.push("data: the receipt has other lines or another number of rows".to_string());
    }
    Ok(said)
}

/// Compares what was read from a checkpoint with the line of its update.
pub(crate) fn check_restored(prepared: &Prepared, state: &Progress, read: &Restored) -> Result<(), RunError> {
    let output = &prepared.run.output_dir;
    // A chain that is missing, damaged or another one is reported by what resumes it.
    let Ok(chain) = Chain::read_through(output, state.step) else { return Ok(()) };
    if state.chain.is_none() || chain.link(state.step) != state.chain {
        return Ok(());
    }
    match chain.updates.last().and_then(|update| read.difference(update)) {
        None => Ok(()),
        Some(item) => Err(FileError::Altered {
            path: checkpoint::folder_of(output, state.step),
            what: format!("{} update {} in the chain", item.is_not_that_of(), state.step),
        }
        .into()),
    }
}

/// BLAKE3 of every tensor of the base.
fn tensor_hashes(weights: &Weights, threads: usize) -> BTreeMap<String, Hash> {
    let mut all = BTreeMap::new();
    for file in weights.tensor_files().files() {
        let tensors: Vec<_> = file.tensors().collect();
        let share = |first: usize| {
            let own = tensors.iter().skip(first).step_by(threads.max(1));
            own.map(|tensor| (tensor.name.to_string(), Hash::of_bytes(tensor.bytes))).collect::<Vec<_>>()
        };
        let share = &share;
        let hashed = std::thread::scope(|scope| {
            let start = |first| (first, std::thread::Builder::new().spawn_scoped(scope, move || share(first)));
            let others: Vec<_> = (1..threads).map(start).collect();
            let mut hashed = share(0);
            for (first, thread) in others {
                hashed.extend(match thread {
                    Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                    // The machine has no more threads to give.
                    Err(_) => share(first),
                });
            }
            hashed
        });
        all.extend(hashed);
        file.release();
    }
    all
}

fn remove(path: &Path) -> Result<(), FileError> {
    match disk::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(FileError::from_io("remove", path, error)),
        _ => Ok(()),
    }
}
