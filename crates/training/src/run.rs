//! A training run, in the order things happen: build or restore, then step, measure, evaluate, save, until it is done or asked to
//! stop. What happens at a step is a function of the config and the step alone, so a resumed run is the uninterrupted one.
#![expect(clippy::float_arithmetic, reason = "means of losses for the metrics")]

use crate::batch::TokenRow;
use crate::checkpoint::{self, NamedTensor, Progress, Snapshot};
use crate::config::{KEYS, Run};
use crate::data::order;
use crate::metrics::{Event, Metrics, Record, Timing};
use crate::prepare::{Prepared, RunError, profile, step_settings, trained};
use crate::schedule::Schedule;
use crate::signal::Signal;
use crate::step::{Evaluation, StepReport, Trainer};
use crate::tensorboard::EventFile;
use isobit_kernels::Backend;
use isobit_kernels::backend::F32;
use isobit_models::build::Settings;
use isobit_models::{FileTensor, Trained, build, peft};
use isobit_proof::atomic::write_atomically;
use isobit_proof::lock::Lock;
use std::path::Path;

/// The config in full, beside the checkpoints.
const RESOLVED: &str = "config.resolved.toml";

/// What a run tells whoever watches it. Nothing here changes a result.
pub trait Watch {
    fn started(&mut self, _prepared: &Prepared, _trained: usize, _from_step: u64) {}
    /// Seconds since some moment, for the timing fields.
    fn seconds(&mut self) -> f64;
    /// Seconds since 1970, for TensorBoard.
    fn wall_seconds(&mut self) -> f64;
    fn step(&mut self, _step: u64, _report: &StepReport, _learning_rate: f64) {}
    fn evaluated(&mut self, _step: u64, _evaluation: &Evaluation, _best: bool) {}
    fn saved(&mut self, _folder: &Path) {}
    /// Whether the run should stop after this step.
    fn stop(&mut self) -> Option<Signal> {
        None
    }
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Finished {
        step: u64,
        early: bool,
    },
    /// Saved, to be resumed.
    Stopped {
        step: u64,
        signal: Signal,
    },
}

/// Trains. With `resume` it goes on from the latest checkpoint of the output folder, or starts if there is none.
pub fn train<B: Backend>(
    backend: B,
    prepared: &Prepared,
    resume: bool,
    watch: &mut dyn Watch,
) -> Result<Outcome, RunError> {
    let run = &prepared.run;
    let output = &run.output_dir;
    std::fs::create_dir_all(output).map_err(|error| isobit_proof::FileError::from_io("write", output, error))?;
    let _lock = Lock::acquire(output)?;
    checkpoint::clean(output)?;
    let latest = checkpoint::latest(output)?;
    if latest.is_some() && !resume {
        let what = format!("{} already holds a run", output.display());
        return Err(RunError::Refused {
            what,
            hint: "add `--resume` to go on with it, or choose another `output_dir`",
        });
    }
    let settings = Settings {
        trained: trained(run),
        profile: profile(run),
        positions: run.training.max_seq_length as usize,
        seed: run.seed,
    };
    let built = build(&backend, &prepared.model, &prepared.weights, &settings)?;
    let mut state =
        State { trainer: Trainer::new(backend, built), progress: Progress::start(prepared.identity.clone()) };
    let metrics = match latest {
        Some(folder) => {
            let loaded = checkpoint::load(&folder, &prepared.identity);
            state.restore(loaded.map_err(|error| with_changed_keys(error, run))?)?;
            if state.progress.best.is_none_or(|best| is_kept(prepared, best.step, true)) {
                checkpoint::restore_best(output, &state.progress)?;
            }
            // Killed between saving and pruning, it might have nothing left to save.
            checkpoint::prune(output, run.training.save_total_limit)?;
            Metrics::resume(output, state.progress.step)?
        }
        None => Metrics::create(output)?,
    };
    // Not before: a run that is refused leaves the folder as it was.
    write_atomically(&output.join(RESOLVED), run.to_toml().as_bytes())?;
    let mut log = Log { metrics, events: None };
    if run.report_to_tensorboard {
        let folder = output.join("tensorboard");
        log.events = Some(EventFile::create(&folder, state.progress.step, watch.wall_seconds())?);
    }
    let trained_count = state.trainer.parameters.iter().map(|(_, parameter)| parameter.length()).sum();
    watch.started(prepared, trained_count, state.progress.step);
    let adapter_config = match &settings.trained {
        Trained::Lora(lora) => Some(peft::config_json(lora, &base_name(&run.base_model))),
        _ => None,
    };
    let outcome = steps(&mut state, prepared, &mut log, adapter_config.as_ref(), watch)?;
    if let Outcome::Finished { .. } = outcome {
        finish(&state, prepared, adapter_config.as_ref())?;
    }
    Ok(outcome)
}

/// Where a checkpoint was made with another config: the lines that matter and are new.
fn with_changed_keys(error: checkpoint::Error, run: &Run) -> RunError {
    let is_config = |difference: &checkpoint::Difference| difference.what == "config";
    let checkpoint::Error::Different { folder, differences } = &error else { return error.into() };
    if !differences.iter().any(is_config) {
        return error.into();
    }
    let saved = std::fs::read_to_string(run.output_dir.join(RESOLVED)).unwrap_or_default();
    let name = |line: &str| line.split(" = ").next().unwrap_or_default().to_string();
    let matters = |line: &&str| KEYS.iter().any(|key| key.influences && key.name == name(line));
    let wanted = run.to_toml();
    let changed = wanted.lines().filter(|line| !saved.lines().any(|old| old == *line)).filter(matters);
    let mut changed: Vec<String> = changed.map(|line| format!("`{line}` is new")).collect();
    if changed.is_empty() {
        return error.into();
    }
    changed.extend(differences.iter().filter(|difference| !is_config(difference)).map(ToString::to_string));
    RunError::Refused {
        what: format!("{} is of another run: {}", folder.display(), changed.join(", ")),
        hint: "resume with the config the run was started with, or choose another `output_dir`",
    }
}

/// The loop.
fn steps<B: Backend>(
    state: &mut State<B>,
    prepared: &Prepared,
    log: &mut Log,
    adapter_config: Option<&serde_json::Value>,
    watch: &mut dyn Watch,
) -> Result<Outcome, RunError> {
    let (run, total) = (&prepared.run, prepared.steps.total);
    let (schedule, settings) = (Schedule::new(run, prepared.steps), step_settings(run));
    let mut since_log = SinceLog::default();
    let patience = run.training.early_stopping_patience;
    let stops_early = |progress: &Progress| patience > 0 && progress.evals_without_improvement >= patience;
    if stops_early(&state.progress) {
        // Resumed after its last update.
        return Ok(Outcome::Finished { step: state.progress.step, early: true });
    }
    while state.progress.step < total {
        let (completed, begun) = (state.progress.step, watch.seconds());
        let rows = rows_of(prepared, completed);
        let learning_rate = schedule.at(completed);
        let report = state.trainer.step(&rows, completed + 1, learning_rate, &settings)?;
        let step = completed + 1;
        state.progress.step = step;
        state.progress.epoch = step / prepared.steps.per_epoch;
        state.progress.rows_seen += rows.len() as u64;
        state.progress.tokens_seen += report.tokens as u64;
        state.progress.loss_sum += report.loss;
        state.progress.loss_count += 1;
        since_log.add(&report, watch.seconds() - begun);
        watch.step(step, &report, learning_rate);
        if step.is_multiple_of(run.training.logging_steps.max(1)) || step == total {
            log.append(&since_log.record(prepared, &state.progress, &report, learning_rate), watch)?;
            since_log = SinceLog::default();
            (state.progress.loss_sum, state.progress.loss_count) = (0.0, 0);
        }
        let mut better = false;
        if run.has_eval() && run.eval.every.is_due(step, prepared.steps) {
            better = evaluate(state, prepared, log, watch)?;
        }
        let early = stops_early(&state.progress);
        let signal = watch.stop();
        let kept = is_kept(prepared, step, better);
        if kept || early || signal.is_some() {
            log.metrics.sync()?;
            checkpoint::announce(&run.output_dir, step, !(kept || early))?;
            let folder = checkpoint::save(&run.output_dir, &state.snapshot()?, adapter_config)?;
            if let Some(best) = state.progress.best.filter(|best| kept && best.step == step) {
                checkpoint::mark_best(&run.output_dir, step, best.metric)?;
            }
            checkpoint::prune(&run.output_dir, run.training.save_total_limit)?;
            watch.saved(&folder);
        }
        if early {
            return Ok(Outcome::Finished { step, early });
        }
        if let Some(signal) = signal.filter(|_| step < total) {
            return Ok(Outcome::Stopped { step, signal });
        }
    }
    Ok(Outcome::Finished { step: state.progress.step, early: false })
}

/// Whether a checkpoint is due after `step` by the config alone. One that only a signal asked for is never marked as the best: a
/// run that was not stopped would not have it.
fn is_kept(prepared: &Prepared, step: u64, better: bool) -> bool {
    better || prepared.run.training.save.is_due(step, prepared.steps) || step == prepared.steps.total
}

/// The rows of the update that follows `completed` updates: a pure function of seed and step.
fn rows_of(prepared: &Prepared, completed: u64) -> Vec<&TokenRow> {
    let (epoch, place) = (completed / prepared.steps.per_epoch, completed % prepared.steps.per_epoch);
    let (count, together) = (prepared.train.len(), prepared.run.rows_per_update() as usize);
    let start = (place as usize * together).min(count);
    let chosen = &order(prepared.run.seed, epoch, count)[start..(start + together).min(count)];
    chosen.iter().map(|row| &prepared.train[*row]).collect()
}

fn evaluate<B: Backend>(
    state: &mut State<B>,
    prepared: &Prepared,
    log: &mut Log,
    watch: &mut dyn Watch,
) -> Result<bool, RunError> {
    let begun = watch.seconds();
    let rows: Vec<&TokenRow> = prepared.eval.iter().collect();
    let micro = prepared.run.eval.micro_batch_size.max(1) as usize;
    let evaluation = state.trainer.evaluate(&rows, profile(&prepared.run), micro)?;
    let better = state.progress.take_eval(evaluation.loss());
    let tokens: usize = rows.iter().map(|row| row.tokens.len()).sum();
    let event =
        Event::Eval { loss: evaluation.loss(), accuracy: evaluation.accuracy(), tokens: evaluation.targets as u64 };
    let timing = timing(watch.seconds() - begun, tokens);
    log.append(&record(prepared, &state.progress, event, timing), watch)?;
    watch.evaluated(state.progress.step, &evaluation, better);
    Ok(better)
}

/// The folder `final`: the best weights where the config asks for them, else the last.
fn finish<B: Backend>(
    state: &State<B>,
    prepared: &Prepared,
    adapter_config: Option<&serde_json::Value>,
) -> Result<(), RunError> {
    let run = &prepared.run;
    let best = checkpoint::best(&run.output_dir)?.filter(|_| run.training.load_best_model_at_end);
    let weights = match best {
        Some(best) if best.step != state.progress.step => {
            let folder = checkpoint::folder_of(&run.output_dir, best.step);
            checkpoint::load(&folder, &prepared.identity)?.weights
        }
        _ => state.snapshot()?.weights,
    };
    checkpoint::save_final(&run.output_dir, &weights, adapter_config)?;
    Ok(())
}

/// The plain name of a folder: nothing absolute is stored.
fn base_name(folder: &Path) -> String {
    folder.file_name().map_or("base".to_string(), |name| name.to_string_lossy().into_owned())
}

/// Whatever can change during a run.
struct State<B: Backend> {
    trainer: Trainer<B>,
    progress: Progress,
}

impl<B: Backend> State<B> {
    fn snapshot(&self) -> Result<Snapshot, RunError> {
        let backend = &self.trainer.backend;
        let (mut weights, mut moments1, mut moments2) = (Vec::new(), Vec::new(), Vec::new());
        for ((id, parameter), [first, second]) in self.trainer.parameters.iter().zip(&self.trainer.moments) {
            let put = |all: &mut Vec<NamedTensor>, buffer: &F32<B>| -> Result<(), RunError> {
                let tensors = self.trainer.model.to_file(id, parameter, backend.download(buffer)?);
                let named = |FileTensor { name, shape, values }| NamedTensor { name, shape, values };
                all.extend(tensors.into_iter().map(named));
                Ok(())
            };
            put(&mut weights, &parameter.value)?;
            put(&mut moments1, first)?;
            put(&mut moments2, second)?;
        }
        Ok(Snapshot { step: self.progress.step, weights, moments1, moments2, progress: self.progress.clone() })
    }

    fn restore(&mut self, snapshot: Snapshot) -> Result<(), RunError> {
        let Snapshot { weights, moments1, moments2, progress, .. } = snapshot;
        let find = |all: &[NamedTensor], name: &str, shape: &[usize]| -> Result<Vec<f32>, RunError> {
            let tensor = all.iter().find(|tensor| tensor.name == name && tensor.shape == shape);
            let missing = || RunError::Refused {
                what: format!("the checkpoint has no {name} of shape {shape:?}"),
                hint: "resume with the config the run was started with",
            };
            tensor.map(|tensor| tensor.values.clone()).ok_or_else(missing)
        };
        let ids: Vec<_> = self.trainer.parameters.iter().map(|(id, _)| id).collect();
        let Trainer { backend, model, parameters, moments, .. } = &mut self.trainer;
        for (id, moments) in ids.into_iter().zip(moments) {
            let values =
                |all: &[NamedTensor]| model.from_file(id, parameters.get(id), |name, shape| find(all, name, shape));
            for (moment, all) in moments.iter_mut().zip([&moments1, &moments2]) {
                *moment = backend.upload(&values(all)?);
            }
            let value = backend.upload(&values(&weights)?);
            parameters.get_mut(id).value = value;
        }
        self.progress = progress;
        Ok(())
    }
}

/// Where lines go: `metrics.jsonl`, and TensorBoard's file where it is asked for.
struct Log {
    metrics: Metrics,
    events: Option<EventFile>,
}

impl Log {
    fn append(&mut self, record: &Record, watch: &mut dyn Watch) -> Result<(), RunError> {
        self.metrics.append(record)?;
        if let Some(events) = &mut self.events {
            events.scalars(record.step, watch.wall_seconds(), &record.scalars())?;
            events.flush()?;
        }
        Ok(())
    }
}

/// Time since the last line of the metrics. It is not part of the state: timing is never compared.
#[derive(Default)]
struct SinceLog {
    seconds: f64,
    tokens: usize,
}

impl SinceLog {
    fn add(&mut self, report: &StepReport, seconds: f64) {
        self.seconds += seconds;
        self.tokens += report.tokens;
    }

    fn record(&self, prepared: &Prepared, progress: &Progress, last: &StepReport, learning_rate: f64) -> Record {
        let loss = progress.loss_sum / progress.loss_count as f64;
        let event = Event::Train { loss, learning_rate, grad_norm: f64::from(last.grad_norm) };
        record(prepared, progress, event, timing(self.seconds, self.tokens))
    }
}

fn timing(seconds: f64, tokens: usize) -> Timing {
    Timing { seconds, tokens_per_s: if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 } }
}

fn record(prepared: &Prepared, progress: &Progress, event: Event, timing: Timing) -> Record {
    let epoch = progress.step as f64 / prepared.steps.per_epoch as f64;
    Record { step: progress.step, epoch, tokens: progress.tokens_seen, event, timing: Some(timing) }
}
