//! The record of a run (`docs/receipt-format.md`): a line of the chain for every update, and the
//! receipt that is made from it at every checkpoint and at the end. Only rank 0 keeps it.

use crate::checkpoint::{self, Progress, RESOLVED, folder_name};
use crate::data_record;
use crate::engine::Engine;
use crate::prepare::{Prepared, RunError};
use crate::row::{self, Row};
use crate::run::Watch;
use crate::state::State;
use crate::step::{Evaluation, StepReport};
use isobit_models::Weights;
use isobit_proof::chain::{self, ChainFile, Origin, Update};
use isobit_proof::hash::{FileRecord, Hash, Manifest};
use isobit_proof::receipt::{Base, Best, DataFile, FolderRecord, Made, Receipt};
use isobit_proof::{FileError, disk, receipt, regular};
use std::collections::BTreeMap;
use std::path::Path;

/// Files that the tokenizer and the chat template are read from.
const TOKENIZER_FILES: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
];
/// Files of the run folder that the receipt has hashes of, besides those with records of their own.
const SMALL_FILES: [&str; 4] = [RESOLVED, data_record::NAME, checkpoint::Pointer::LATEST, checkpoint::Pointer::BEST];

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
    made: Made,
    result: Option<BTreeMap<String, FileRecord>>,
    environment: BTreeMap<String, String>,
}

impl Recorder {
    /// Begins the chain, or cuts it to the step that the run resumes from. None if the checkpoint
    /// has no link: then the run has no record.
    pub(crate) fn begin<E: Engine>(
        state: &State<E>,
        prepared: &Prepared,
        from: Option<u64>,
        (threads, watch): (usize, &mut dyn Watch),
    ) -> Result<Option<Self>, RunError> {
        let output = &prepared.run.output_dir;
        let chain = match (from, state.progress.chain) {
            (None, _) => {
                let names = state.engine.tensors().iter().map(|tensor| tensor.name.clone()).collect();
                let origin = Origin::new(prepared.identity.fields(), names, &state.engine.digests()?);
                ChainFile::create(output, &origin)?
            }
            (Some(step), Some(link)) => ChainFile::resume(output, step, link)?,
            (Some(_), None) if watch.needs_receipt() => {
                return Err(RunError::Refused {
                    what: "the checkpoint was written by a version without receipts: this run would leave none"
                        .to_string(),
                    hint: "start the run anew in another folder, or leave out `--fixed`",
                });
            }
            (Some(_), None) => {
                watch.noted("the checkpoint was written by a version without receipts: this run leaves none");
                for name in [chain::NAME, receipt::NAME] {
                    remove(&output.join(name))?;
                }
                return Ok(None);
            }
        };
        let made = made(prepared, threads, chain.link())?;
        Ok(Some(Self { chain, made, result: None, environment: watch.environment() }))
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

    /// What equal runs share after so many updates.
    fn made(&self, progress: &Progress) -> Made {
        let best = progress.best.map(|best| Best { step: best.step, loss: format!("{:016x}", best.metric.to_bits()) });
        Made {
            updates: progress.step,
            link: self.chain.link(),
            best,
            finished: self.result.is_some(),
            ..self.made.clone()
        }
    }

    /// Writes the receipt of the run folder.
    pub(crate) fn write(&self, output_dir: &Path, progress: &Progress, metrics: Hash) -> Result<(), RunError> {
        let mut record = FolderRecord { files: BTreeMap::new(), metrics, checkpoints: BTreeMap::new() };
        for name in SMALL_FILES {
            let hash = regular::if_there(Hash::of_file(&output_dir.join(name)))?;
            record.files.extend(hash.map(|hash| (name.to_string(), hash)));
        }
        for step in checkpoint::steps(output_dir)?.into_iter().filter(|step| *step <= progress.step) {
            let name = folder_name(step);
            let hash = regular::if_there(Hash::of_file(&output_dir.join(&name).join(Manifest::NAME)))?;
            record.checkpoints.extend(hash.map(|hash| (name, hash)));
        }
        let mut receipt = Receipt::new(env!("CARGO_PKG_VERSION"), self.made(progress));
        receipt.result.clone_from(&self.result);
        (receipt.folder, receipt.environment) = (Some(record), Some(self.environment.clone()));
        Ok(receipt.write(output_dir)?)
    }

    /// Writes the receipt of the final folder, which holds these files.
    pub(crate) fn finish(&mut self, folder: &Path, names: &[String], progress: &Progress) -> Result<(), RunError> {
        self.result = Some(Manifest::of(folder, names.iter().map(String::as_str))?.files);
        let mut receipt = Receipt::new(env!("CARGO_PKG_VERSION"), self.made(progress));
        receipt.result.clone_from(&self.result);
        Ok(receipt.write(folder)?)
    }
}

/// What the run is made from.
fn made(prepared: &Prepared, threads: usize, link: Hash) -> Result<Made, RunError> {
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
        updates: 0,
        link,
        best: None,
        finished: false,
    })
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
            let others: Vec<_> = (1..threads).map(|first| scope.spawn(move || share(first))).collect();
            let mut hashed = share(0);
            for thread in others {
                hashed.extend(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
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
