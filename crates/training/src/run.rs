//! A training run, in order: build or restore, then step, measure, evaluate and save, until it is
//! done or asked to stop. What happens at a step is a function of the config and the step alone, so
//! a resumed run equals the uninterrupted one.
#![expect(clippy::float_arithmetic, reason = "sums of losses and of seconds")]

use crate::audit::{self, Auditor};
use crate::checkpoint::{self, Latest, Opened, Progress, RESOLVED, Start, folder_of};
use crate::config::{self, Adapter, Run};
use crate::data::EpochOrder;
use crate::data_record;
use crate::engine::Engine;
use crate::final_folder::{self, Final};
use crate::log::{self, Log, SinceLog};
use crate::metrics::{Event, Metrics, Record};
use crate::model_folder;
use crate::prepare::{Prepared, RunError, build_settings, step_settings};
use crate::ranks::shards::Shards;
use crate::ranks::{Team, sharded, update};
use crate::record::{self, About, End, Recorder};
use crate::row::Row;
use crate::schedule::Schedule;
use crate::signal::{self, Phase, Signal};
use crate::starting_adapter;
use crate::state::State;
use crate::step::{Evaluation, StepReport, StepSettings};
use crate::tensorboard::EventFile;
use crate::trainer::{Placement, Trainer};
use isobit_kernels::{Backend, Cpu, Path as CpuPath, float_state};
use isobit_models::TrainedTensor;
use isobit_models::build::Settings;
use isobit_proof::atomic::write_atomically;
use isobit_proof::chain::{self, Chain};
use isobit_proof::layout::TENSORBOARD;
use isobit_proof::lock::Lock;
use isobit_proof::{FileError, disk, receipt};
use std::collections::BTreeMap;
use std::path::Path;

/// Observes a run, and answers for its surroundings: the clock, a second device for audits, what
/// the receipt says of the machine, and when to stop. Nothing here changes a result.
pub trait Watch {
    fn started(&mut self, _prepared: &Prepared, _trained: usize, _from_step: u64) {}
    /// Seconds since an arbitrary moment, for the timing fields.
    fn seconds(&mut self) -> f64;
    /// Seconds since 1970, for TensorBoard.
    fn wall_seconds(&mut self) -> f64;
    fn step(&mut self, _step: u64, _report: &StepReport, _learning_rate: f64) {}
    /// Seconds of all updates, evaluations and saves that were spent waiting for other ranks.
    fn communicated(&mut self, _seconds: f64) {}
    /// Peak bytes of each device's own memory so far, where it has any.
    fn device_memory(&mut self, _bytes_peak: &[Option<u64>]) {}
    /// A line was appended to the metrics.
    fn logged(&mut self, _record: &Record) {}
    fn evaluated(&mut self, _step: u64, _evaluation: &Evaluation, _best: bool) {}
    fn saved(&mut self, _folder: &Path) {}
    /// Something about the run that its user should know.
    fn noted(&mut self, _what: &str) {}
    /// Whether a run that would leave no receipt is refused.
    fn needs_receipt(&self) -> bool {
        false
    }
    /// What computes a micro-batch of this update a second time, if it is audited, and the number
    /// of the audit.
    fn auditor(&mut self, _step: u64) -> Option<(&mut dyn Auditor, u64)> {
        None
    }
    /// A micro-batch of so many tokens was computed twice for this update, and every bit agreed.
    fn audited(&mut self, _step: u64, _tokens: usize) {}
    /// What the run computes on, for its receipt; for information only.
    fn environment(&mut self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
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
    /// Saved, and can be resumed.
    Stopped {
        step: u64,
        signal: Signal,
    },
}

/// Trains on one device, alone or with the other ranks of a team.
pub fn train<B: Backend>(
    backend: B,
    prepared: &Prepared,
    start: Start,
    team: &Team<'_>,
    watch: &mut dyn Watch,
) -> Result<Outcome, RunError> {
    let make = |settings: &Settings| {
        let with_moments = !is_sharded(&prepared.run, team);
        let placement = Placement::new(prepared.run.offload, with_moments, team.threads());
        Trainer::whole(backend, &prepared.model, &prepared.weights, settings, placement)
    };
    train_with(make, prepared, start, team, watch)
}

/// Whether each rank holds a shard of the optimizer state. That of an adapter is small.
pub fn is_sharded(run: &Run, team: &Team<'_>) -> bool {
    !team.is_alone() && !matches!(run.adapter, Adapter::Lora(_))
}

/// Trains in a folder that holds no run, or resumes from a checkpoint of this run. `make` builds
/// the model once the folder is found to be usable. Of a team, only rank 0 touches the folder.
pub fn train_with<E: Engine>(
    make: impl FnOnce(&Settings) -> Result<E, RunError>,
    prepared: &Prepared,
    start: Start,
    team: &Team<'_>,
    watch: &mut dyn Watch,
) -> Result<Outcome, RunError> {
    let run = &prepared.run;
    let mut lock = None;
    let from = team.value_of_rank_0(|| {
        let (held, from) = claim(prepared, start)?;
        lock = Some(held);
        Ok(from)
    })?;
    let settings = build_settings(run);
    let engine = team.agree_on(make(&settings))?;
    let shards = if is_sharded(run, team) { Some(team.agree_on(shards(&engine, team))?) } else { None };
    let mut state = State { engine, shards, progress: Progress::start(prepared.identity.clone()) };
    let adapter_config = final_folder::adapter_config(&settings, prepared, &run.base_model);
    let result = on_rank_0(team, || Final::new(&state, prepared, adapter_config.as_ref()))?;
    if let Some(step) = from {
        let opened = on_rank_0(team, || open(prepared, step))?;
        let read = state.restore(opened.as_ref(), team)?;
        on_rank_0(team, || record::check_restored(prepared, &state.progress, &read))?;
    } else {
        team.agree_on(starting_adapter::load(prepared, &mut state.engine))?;
    }
    let mut log = on_rank_0(team, || begin(&state, prepared, from, start, (team.threads(), watch)))?;
    let trained_count = state.engine.tensors().iter().map(TrainedTensor::length).sum();
    watch.started(prepared, trained_count, state.progress.step);
    let waited = team.communication_seconds();
    signal::enter(Phase::Updates);
    let outcome = steps(&mut state, prepared, &mut log, adapter_config.as_ref(), team, watch)
        // Before anything is freed: meanwhile a launcher may already stop the other ranks.
        .inspect_err(|_| signal::enter(Phase::Failure))?;
    watch.communicated(team.communication_seconds() - waited);
    if let Outcome::Finished { .. } = outcome {
        let finish = |(result, log): (&Final<'_>, &mut Log)| final_folder::finish(&state, prepared, result, log);
        team.agree_on(result.as_ref().zip(log.as_mut()).map_or(Ok(()), finish))?;
    }
    team.end();
    Ok(outcome)
}

/// This rank's part of the optimizer, on its host.
fn shards<E: Engine>(engine: &E, team: &Team<'_>) -> Result<Shards, RunError> {
    let cpu = Cpu::new(team.threads(), CpuPath::best()).map_err(|error| RunError::Refused {
        what: error.to_string(),
        hint: "ask for fewer threads, or raise the limits on memory and processes",
    })?;
    Ok(Shards::new(cpu, engine, team)?)
}

/// What only rank 0 does. If it fails, all ranks do.
fn on_rank_0<T>(team: &Team<'_>, make: impl FnOnce() -> Result<T, RunError>) -> Result<Option<T>, RunError> {
    team.agree_on(if team.is_first() { make().map(Some) } else { Ok(None) })
}

/// Locks the folder and finds the step to resume from.
fn claim(prepared: &Prepared, start: Start) -> Result<(Lock, Option<u64>), RunError> {
    let run = &prepared.run;
    let output = &run.output_dir;
    examine(prepared, start)?;
    disk::create_folders(output).map_err(|error| FileError::from_io("write", output, error))?;
    let lock = Lock::acquire(output)?;
    // Check again, now that we hold the lock.
    let from = examine(prepared, start)?;
    checkpoint::clean(output, &prepared.identity, |name| match run.adapter {
        _ if name == receipt::NAME => true,
        Adapter::Lora(_) => [checkpoint::ADAPTER, checkpoint::ADAPTER_CONFIG].contains(&name),
        Adapter::Full | Adapter::LastBlocks(_) => model_folder::may_hold(&run.base_model, name),
    })?;
    Ok((lock, from))
}

/// The files that lines go to, in a folder that is ready for the first step.
fn begin<E: Engine>(
    state: &State<E>,
    prepared: &Prepared,
    from: Option<u64>,
    start: Start,
    (threads, watch): (usize, &mut dyn Watch),
) -> Result<Log, RunError> {
    let (run, output) = (&prepared.run, &prepared.run.output_dir);
    let (metrics, record) = if let Some(step) = from {
        resume(state, prepared, (step, start), (threads, watch))?
    } else {
        checkpoint::begin(output)?;
        let (metrics, chain) = (Metrics::create(output)?, record::create(state, prepared)?);
        (metrics, Some(Recorder::new(chain, About::new(state, prepared, (threads, watch))?)))
    };
    let mut log = Log { metrics, events: None, record };
    // Only now: a refused run must leave the folder unchanged, and `verify` takes a folder with
    // these files but no chain for damage.
    data_record::write(output, &prepared.report)?;
    write_atomically(&output.join(RESOLVED), run.to_toml().as_bytes())?;
    log.write_receipt(&state.progress, &run.output_dir)?;
    if run.report_to_tensorboard {
        let folder = output.join(TENSORBOARD);
        log.events = Some(EventFile::create(&folder, state.progress.step, watch.wall_seconds())?);
    }
    Ok(log)
}

/// The step to resume from. Reports who holds the folder before what is wrong with it: it may be
/// half written.
fn examine(prepared: &Prepared, start: Start) -> Result<Option<u64>, RunError> {
    let output = &prepared.run.output_dir;
    let from = checkpoint::examine(output, &prepared.identity, start)
        .map_err(|error| Lock::in_use(output).map_or_else(|| error.into(), RunError::from))?;
    check_not_ahead(output, start)?;
    Ok(from)
}

/// A checkpoint that stayed when the run went back behind it has lost its part of the record.
fn check_not_ahead(output: &Path, start: Start) -> Result<(), RunError> {
    let (Start::From(step), Ok(Latest::At(latest))) = (start, checkpoint::latest(output)) else { return Ok(()) };
    // A damaged chain is reported by what resumes it.
    let Some(chain) = Chain::read(output).ok().filter(|_| latest < step) else { return Ok(()) };
    let end = chain.updates.len() as u64;
    if end >= step {
        return Ok(());
    }
    Err(RunError::Refused {
        what: format!("{} is later than the end of the run (update {end})", folder_of(output, step).display()),
        hint: "`--resume` goes on from the latest checkpoint, and makes this one again",
    })
}

/// Opens the checkpoint to resume from.
fn open(prepared: &Prepared, step: u64) -> Result<Opened, RunError> {
    let run = &prepared.run;
    let opened = checkpoint::open(&checkpoint::folder_of(&run.output_dir, step), &prepared.identity);
    opened.map_err(|error| with_changed_keys(error, run))
}

/// Takes the folder back to the restored `step`. Checkpoints of later steps stay: the same steps
/// produce them again, byte for byte.
fn resume<E: Engine>(
    state: &State<E>,
    prepared: &Prepared,
    (step, start): (u64, Start),
    (threads, watch): (usize, &mut dyn Watch),
) -> Result<(Metrics, Option<Recorder>), RunError> {
    let (run, output) = (&prepared.run, &prepared.run.output_dir);
    // Both are read before anything is changed: a refused run must leave the folder as it is.
    let metrics = Metrics::cut(output, step, state.progress.metrics).map_err(record::not_the_record)?;
    let chain = record::cut(output, &state.progress, watch)?;
    let about = chain.as_ref().map(|_| About::new(state, prepared, (threads, watch))).transpose()?;
    if let (Some(about), Some(chain)) = (&about, &chain) {
        // Before anything is changed: a run that is killed from here on is unfinished, and its
        // receipt covers no more than what stays.
        let end = End { link: chain.link(), metrics: metrics.digest() };
        about.write(output, &state.progress, end, None)?;
    }
    if start == Start::From(step) {
        // Before lines of the metrics are dropped: if killed in between, the run would miss them.
        checkpoint::go_back_to(output, step)?;
    }
    if state.progress.best.is_none_or(|best| is_kept(prepared, best.step, true)) {
        checkpoint::restore_best(output, &state.progress)?;
    }
    // A run killed between saving and pruning might have nothing left to save.
    checkpoint::prune(output, run.training.save_total_limit, &prepared.identity)?;
    let metrics = metrics.commit()?;
    let record = match chain.zip(about) {
        Some((chain, about)) => Some(Recorder::new(chain.commit()?, about)),
        None => record::forget(output).map(|()| None)?,
    };
    Ok((metrics, record))
}

/// If a checkpoint was made with a different config, adds the keys that matter, with their present
/// and saved values.
fn with_changed_keys(error: checkpoint::Error, run: &Run) -> RunError {
    let is_config = |difference: &checkpoint::IdentityDifference| difference.what == "config";
    let checkpoint::Error::Different { folder, differences } = &error else { return error.into() };
    if !differences.iter().any(is_config) {
        return error.into();
    }
    // The saved config may come from another version, or have been changed: then nothing is
    // reported about its keys.
    let Ok(saved) = config::read(&run.output_dir.join(RESOLVED), &[]) else { return error.into() };
    let named = run.differences(&saved.run).into_iter().map(|(key, now, before)| match key.as_str() {
        "training.rows_per_update" => format!(
            "an update has {now} rows, but had {before} (training.micro_batch_size × training.gradient_accumulation_steps)"
        ),
        _ => format!("`{key}` is {now}, but was {before}"),
    });
    let mut changed: Vec<String> = named.collect();
    if changed.is_empty() {
        return error.into();
    }
    changed.extend(differences.iter().filter(|difference| !is_config(difference)).map(ToString::to_string));
    let only_rows = changed.len() == 1 && run.rows_per_update() != saved.run.rows_per_update();
    RunError::Refused {
        what: format!("{} belongs to a different run: {}", folder.display(), changed.join("; ")),
        hint: if only_rows {
            "set `training.gradient_accumulation_steps` so that the product of the two stays what it was"
        } else {
            "resume with the config the run was started with, or choose another `output_dir`"
        },
    }
}

/// The training loop.
fn steps<E: Engine>(
    state: &mut State<E>,
    prepared: &Prepared,
    log: &mut Option<Log>,
    adapter_config: Option<&serde_json::Value>,
    team: &Team<'_>,
    watch: &mut dyn Watch,
) -> Result<Outcome, RunError> {
    let (run, total) = (&prepared.run, prepared.steps.total);
    let (schedule, settings) = (Schedule::new(run, prepared.steps), step_settings(run));
    let mut order = EpochOrder::new(run.seed, prepared.train.len());
    let mut since_log = SinceLog::default();
    let patience = run.training.early_stopping_patience;
    let stops_early = |progress: &Progress| patience > 0 && progress.evals_without_improvement >= patience;
    let ahead = team.value_of_rank_0(|| Ok(checkpoint::kept_ahead(&run.output_dir, state.progress.step)?))?;
    if stops_early(&state.progress) {
        // Resumed after its last update.
        return Ok(Outcome::Finished { step: state.progress.step, early: true });
    }
    while state.progress.step < total {
        // The schedule and the means below are computed on this thread.
        float_state::restore();
        let (completed, begun) = (state.progress.step, watch.seconds());
        let rows = rows_of(prepared, &mut order, completed);
        let learning_rate = schedule.at(completed);
        audit_if_due(&state.engine, &rows, completed + 1, &settings, watch)?;
        let waited = team.communication_seconds();
        let State { engine, shards, .. } = state;
        let report = match shards {
            Some(shards) => sharded::step(engine, shards, team, &rows, completed + 1, learning_rate, &settings)?,
            None => update::step(engine, team, &rows, completed + 1, learning_rate, &settings)?,
        };
        let waited = team.communication_seconds() - waited;
        let step = completed + 1;
        count(&mut state.progress, prepared, &rows, &report);
        since_log.add(&report, watch.seconds() - begun, (!team.is_alone()).then_some(waited));
        watch.device_memory(&state.engine.device_peaks()?);
        watch.step(step, &report, learning_rate);
        log_step(&mut state.progress, prepared, log, &mut since_log, (&report, learning_rate), watch)?;
        let mut evaluation = None;
        if run.has_eval() && run.eval.every.is_due(step, prepared.steps) {
            evaluation = Some(evaluate(state, prepared, log, team, watch)?);
        }
        let better = evaluation.is_some_and(|evaluation| evaluation.best);
        if let Some(record) = log.as_mut().and_then(|log| log.record.as_mut()) {
            record.append(&record::line(step, &rows, &report, learning_rate, evaluation))?;
        }
        let early = stops_early(&state.progress);
        let signal = if team.is_alone() { watch.stop() } else { team.signal() };
        // A later checkpoint, of before a resume, may hold the digest of other log lines: it is
        // written again.
        let kept = is_kept(prepared, step, better) || ahead.contains(&step);
        if kept || early || signal.is_some() {
            let only_signal = !(kept || early);
            let moments = state.shards.as_ref().map(|shards| shards.gather_moments(team)).transpose()?;
            let save = |log: &mut Log| save(state, prepared, log, moments, adapter_config, (kept, only_signal));
            team.agree_on(log.as_mut().map_or(Ok(()), save))?;
            watch.saved(&checkpoint::folder_of(&run.output_dir, step));
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

/// Computes a micro-batch of an update a second time, if that is due.
fn audit_if_due<E: Engine>(
    engine: &E,
    rows: &[&Row],
    step: u64,
    settings: &StepSettings,
    watch: &mut dyn Watch,
) -> Result<(), RunError> {
    let Some((auditor, number)) = watch.auditor(step) else { return Ok(()) };
    if let Some(tokens) = audit::check(engine, auditor, rows, (step, number), settings)? {
        watch.audited(step, tokens);
    }
    Ok(())
}

/// Counts an update that is done.
fn count(progress: &mut Progress, prepared: &Prepared, rows: &[&Row], report: &StepReport) {
    progress.step += 1;
    progress.epoch = progress.step / prepared.steps.per_epoch;
    progress.rows_seen += rows.len() as u64;
    progress.tokens_seen += report.tokens as u64;
    progress.loss_sum += report.loss;
    progress.loss_count += 1;
}

/// Appends the line of the metrics that is due, if one is.
fn log_step(
    progress: &mut Progress,
    prepared: &Prepared,
    log: &mut Option<Log>,
    since_log: &mut SinceLog,
    (report, learning_rate): (&StepReport, f64),
    watch: &mut dyn Watch,
) -> Result<(), RunError> {
    let step = progress.step;
    if step.is_multiple_of(prepared.run.training.logging_steps.max(1)) || step == prepared.steps.total {
        if let Some(log) = log {
            log.append(&since_log.record(prepared, progress, report, learning_rate), watch)?;
        }
        *since_log = SinceLog::default();
        (progress.loss_sum, progress.loss_count) = (0.0, 0);
    }
    Ok(())
}

/// Saves the state. Only a `kept` checkpoint can be the best; one requested only by a signal is
/// removed later.
fn save<E: Engine>(
    state: &mut State<E>,
    prepared: &Prepared,
    log: &mut Log,
    moments: Option<[Vec<Vec<f32>>; 2]>,
    adapter_config: Option<&serde_json::Value>,
    (kept, only_signal): (bool, bool),
) -> Result<(), RunError> {
    let (run, step) = (&prepared.run, state.progress.step);
    log.metrics.sync()?;
    state.progress.metrics = Some(log.metrics.digest());
    if let Some(record) = &mut log.record {
        record.sync()?;
        state.progress.chain = Some(record.link());
    }
    checkpoint::announce(&run.output_dir, step, only_signal)?;
    checkpoint::save(&run.output_dir, &state.snapshot(moments)?, adapter_config)?;
    if let Some(best) = state.progress.best.filter(|best| kept && best.step == step) {
        checkpoint::mark_best(&run.output_dir, step, best.metric)?;
    }
    checkpoint::prune(&run.output_dir, run.training.save_total_limit, &prepared.identity)?;
    log.write_receipt(&state.progress, &run.output_dir)
}

/// Whether the config alone makes a checkpoint due after `step`. One requested only by a signal is
/// never marked as the best: a run that was not stopped would not have it.
fn is_kept(prepared: &Prepared, step: u64, better: bool) -> bool {
    better || prepared.run.training.save.is_due(step, prepared.steps) || step == prepared.steps.total
}

/// The rows of the update that follows `completed` updates: a pure function of seed and step.
pub(crate) fn rows_of<'a>(prepared: &'a Prepared, order: &mut EpochOrder, completed: u64) -> Vec<&'a Row> {
    let (epoch, place) = (completed / prepared.steps.per_epoch, completed % prepared.steps.per_epoch);
    let (count, together) = (prepared.train.len(), prepared.run.rows_per_update() as usize);
    let start = (place as usize * together).min(count);
    let chosen = &order.of(epoch)[start..(start + together).min(count)];
    chosen.iter().map(|row| &prepared.train[*row]).collect()
}

fn evaluate<E: Engine>(
    state: &mut State<E>,
    prepared: &Prepared,
    log: &mut Option<Log>,
    team: &Team<'_>,
    watch: &mut dyn Watch,
) -> Result<chain::Evaluation, RunError> {
    float_state::restore();
    let begun = watch.seconds();
    let rows: Vec<&Row> = prepared.eval.iter().collect();
    let micro = prepared.run.eval.micro_batch_size.max(1) as usize;
    let waited = team.communication_seconds();
    signal::enter(Phase::Evaluation);
    let asked = if team.is_alone() { watch.stop() } else { team.signal() };
    if team.is_first() && asked.is_some() {
        // What was said to the signal was that this step ends first.
        watch.noted(&signal::during_evaluation());
    }
    let evaluation = update::evaluate(&state.engine, team, &rows, prepared.run.profile, micro)?;
    signal::enter(Phase::Updates);
    let waited = (!team.is_alone()).then(|| team.communication_seconds() - waited);
    let better = state.progress.take_eval(evaluation.loss());
    let tokens: usize = rows.iter().map(|row| row.tokens().len()).sum();
    let event =
        Event::Eval { loss: evaluation.loss(), accuracy: evaluation.accuracy(), tokens: evaluation.targets as u64 };
    let timing = log::timing(watch.seconds() - begun, tokens, waited);
    if let Some(log) = log {
        log.append(&log::record(prepared, &state.progress, event, timing), watch)?;
    }
    watch.evaluated(state.progress.step, &evaluation, better);
    Ok(record::evaluated(&evaluation, better))
}
