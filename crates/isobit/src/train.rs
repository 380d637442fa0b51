//! `isobit train`: runs a config or resumes a run. Progress goes to stderr, results to the output
//! folder.

use crate::Failure;
use crate::audit;
use crate::auto;
use crate::backend::{Chosen, Job, Opening, on_limited_device};
use crate::disk::DiskFit;
use crate::ending;
use crate::fits::{self, Given, Ranks};
use crate::memory_limits;
use crate::model;
use crate::progress::Console;
use crate::ranks;
use crate::report::{self, LivePage};
use crate::samples;
use crate::split::{Split, split_fit};
use crate::stderr::{config_failure, tell, tell_notes};
use crate::units;
use isobit_kernels::gpu::{self, MatrixUnits};
use isobit_kernels::{Backend, Path as CpuPath};
use isobit_models::build::Settings;
use isobit_models::config::{AttentionKind, MlpKind};
use isobit_proof::Manifest;
use isobit_proof::name::counted;
use isobit_training::checkpoint::{Start, step_of};
use isobit_training::config::{self, Every, RANK_TIMEOUT_DEFAULT, Run, Settled};
use isobit_training::prepare::{Prepared, RunError, is_trained_in_4bit, prepare, step_settings};
use isobit_training::ranks::handshake::{self, Introduction};
use isobit_training::ranks::{Team, World};
use isobit_training::row::Row;
use isobit_training::run::{Outcome, is_sharded, train, train_with};
use isobit_training::signal;
use isobit_training::stages::{Divided, StageDevice, Stages};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Config file
    config: PathBuf,
    /// Resume from the latest checkpoint in the output folder
    #[arg(long)]
    resume: bool,
    /// Resume from this checkpoint in the output folder, `checkpoint-N`, instead of the latest
    #[arg(long, value_name = "CHECKPOINT", conflicts_with = "resume")]
    resume_from: Option<PathBuf>,
    /// Override a key of the config: `--set training.learning_rate=1e-4`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// The most memory that the buffers of a card may take: 32 (in GiB), 512MiB, 24GB; one number
    /// for every card of a list, or one for each entry. A run that needs more is refused, or ends
    /// when it asks for more
    #[arg(long, value_name = "SIZE", value_parser = units::bytes, value_delimiter = ',')]
    memory: Vec<u64>,
    /// Start even if the run does not fit into memory according to the plan
    #[arg(long)]
    no_plan: bool,
    /// Compute on this device, overriding the config: cpu, opencl:N, cuda:N, hip:N, or auto for the
    /// first card that works and as many more as the run needs, else the CPU; a list divides the
    /// layers: cuda:0,cpu
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Number of threads, overriding the config; 0 means all cores
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// Every N updates compute one micro-batch a second time, on another device or with other
    /// threads, and stop if a bit differs: finds cards that compute wrongly. Needs the model a
    /// second time; ranks compare their weights instead
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    audit_every: Option<u64>,
    /// Where audits compute: cpu, opencl:N, cuda:N or hip:N [default: the CPU; with other threads
    /// if the run computes there]
    #[arg(long, value_name = "NAME", requires = "audit_every")]
    audit_on: Option<String>,
    /// Refuse to run if the run would leave no receipt: one that is resumed from a checkpoint of a
    /// version that wrote none
    #[arg(long)]
    fixed: bool,
    /// Print one JSON object per event to stdout
    #[arg(long)]
    json: bool,
    /// Print no progress and no summary, only warnings
    #[arg(short, long)]
    quiet: bool,
}

impl Arguments {
    /// Where the run begins. A checkpoint is given by name, or by its path in the output folder.
    fn start(&self, output_dir: &Path) -> Result<Start, Failure> {
        let Some(named) = &self.resume_from else {
            return Ok(if self.resume { Start::Resume } else { Start::New });
        };
        let inside = named.parent().is_none_or(|parent| parent.as_os_str().is_empty() || parent == output_dir);
        let step = named.file_name().and_then(|name| name.to_str()).and_then(step_of);
        step.filter(|_| inside).map(Start::From).ok_or_else(|| {
            let message = format!("{} is not a checkpoint of {}", named.display(), output_dir.display());
            Failure::usage(message, "name one of its folders: `--resume-from checkpoint-N`")
        })
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let world = ranks::world()?;
    let ready = ready(arguments, &*world);
    let timeout = ready.as_ref().map_or(RANK_TIMEOUT_DEFAULT, |ready| ready.prepared.run.rank_timeout);
    let team = Team::new(&*world, Duration::from_secs(timeout.into())).with_signals(signal::requested);
    let team = team.with_threads(ready.as_ref().map_or(1, |ready| ready.host_threads));
    if team.is_alone() {
        return train_on_device(arguments, &ready?, &team);
    }
    let trained = || {
        let introduction = ready.as_ref().map_err(|failure| ranks::shared(failure, team.rank()));
        let introduction = introduction.and_then(|ready| Introduction::of(&ready.prepared, team.size()));
        handshake::compare(&team, introduction).map_err(|error| ranks::said(&error, &team))?;
        train_on_device(arguments, ready.as_ref().map_err(Failure::clone)?, &team)
    };
    Failure::catch(trained).map_err(|failure| {
        let failure = if team.others_know_the_end() { failure } else { ranks::named(failure, &team) };
        // Before this process leaves: a launcher kills the others as soon as one has left with an
        // error, and those that do not know the end are stopped at once, as this process is.
        failure.say();
        team.abandon(failure.code);
        Failure::printed(failure.code)
    })
}

/// A run that is ready to start, and what it is to run on.
struct Ready {
    prepared: Prepared,
    devices: Devices,
    /// Of the host's work on the optimizer.
    host_threads: usize,
    start: Start,
}

/// Reads config, model and data. Of several ranks only the first talks.
fn ready(arguments: &Arguments, world: &dyn World) -> Result<Ready, Failure> {
    let quiet = arguments.quiet || world.rank() > 0;
    let mut overrides = arguments.overrides.clone();
    overrides.extend(arguments.device.iter().map(|device| format!("device={device}")));
    overrides.extend(arguments.threads.iter().map(|threads| format!("threads={threads}")));
    let settled = config::read(&arguments.config, &overrides);
    let Settled { mut run, notes } = settled.map_err(|error| config_failure(error, arguments.device.as_deref()))?;
    run.base_model = model::located(&run.base_model);
    if !quiet {
        tell_notes(&notes, arguments.device.as_deref().map(|device| (device, device)));
    }
    let output = &run.output_dir;
    if output.exists() && !output.is_dir() {
        let message = format!("output_dir {} is a file", output.display());
        let hint = "name a folder; it is created if it does not exist";
        return Err(Failure { code: 7, message, hint: Some(hint.to_string()) });
    }
    let start = arguments.start(output)?;
    if arguments.audit_every.is_some() && world.size() > 1 {
        return Err(audit::not_for_ranks());
    }
    if world.rank() == 0 {
        report::check(&run)?;
        samples::check(&run)?;
    }
    let of_rank = ranks::of_rank(&run, world)?;
    let host_threads = Chosen::host_threads(of_rank.threads as usize)?;
    let (neighbours, own) = (world.neighbours(), [world.rank()]);
    let ranks = Ranks { here: neighbours.count, all: world.size(), index: neighbours.index, planned: &own };
    let of_rank = auto::placed(of_rank, &Given::of_run(&arguments.memory), ranks, !arguments.no_plan);
    if let Some(note) = auto::note(&run, &of_rank).filter(|_| !quiet) {
        tell(&format!("note: {note}"));
    }
    let devices = Devices::of(&of_rank, &arguments.memory, !arguments.no_plan, ranks);
    let (devices, trained) = devices.map_err(Failure::with_way_out)?;
    if arguments.audit_every.is_some() && !arguments.no_plan {
        audit::check(&of_rank, arguments.audit_on.as_deref(), &arguments.memory)?;
    }
    let disk = trained.filter(|_| world.rank() == 0).map(|trained| DiskFit::of(&run, trained, true));
    let prepared = prepare(run)?;
    // Until here there is nothing to save, so a signal stops the process immediately.
    if world.size() > 1 {
        signal::speak_as_rank();
    }
    signal::install().map_err(|error| Failure::output(&error))?;
    gpu::hip::stop_children_when(|| signal::requested().is_some());
    if !quiet {
        tell(&format!(
            "{} rows, {} tokens, {} of them targets; {}",
            prepared.train.len(),
            prepared.train.iter().map(|row| row.tokens().len()).sum::<usize>(),
            prepared.train.iter().map(Row::target_count).sum::<usize>(),
            counted(prepared.steps.total, "update")
        ));
        if let Some(line) = kinds(&prepared) {
            tell(&line);
        }
    }
    if world.rank() == 0 {
        warn(&prepared);
        disk.and_then(|disk| disk.warning()).iter().for_each(|warning| tell(&format!("warning: {warning}")));
    }
    Ok(Ready { prepared, devices, host_threads, start })
}

fn train_on_device(arguments: &Arguments, ready: &Ready, team: &Team<'_>) -> Result<(), Failure> {
    let Ready { prepared, devices, host_threads, start } = ready;
    let quiet = arguments.quiet || arguments.json;
    let job = Training { arguments, device: devices.name(), prepared, start: *start, team };
    if !team.is_alone() && !quiet {
        tell(&format!("rank {} of {}: {}", team.rank(), team.size(), devices.described()));
    }
    let trained = match devices {
        Devices::One(chosen) => {
            let limit = arguments.memory.first().copied();
            on_limited_device(chosen, MatrixUnits::All, limit, quiet || !team.is_alone(), job)
        }
        Devices::Several(split) => {
            if team.is_alone() && !quiet {
                tell(&format!("devices: {}", split.described()));
            }
            let limits = memory_limits::limits(&arguments.memory, &split.devices);
            let how = |at: usize| Opening {
                limit: limits[at].clone(),
                offload: prepared.run.offload,
                threads: *host_threads,
                ..Opening::PLAIN
            };
            split.stages(how).map(|stages| job.run_on(stages))
        }
    };
    match trained {
        Ok(result) => result,
        // The other ranks hear of it where they agree for the first time.
        Err(failure) if !team.is_alone() => {
            let agreed: Result<(), RunError> = team.agree_on(Err(ranks::shared(&failure, team.rank())));
            agreed.map_err(|error| ranks::said(&error, team))
        }
        Err(failure) => Err(failure),
    }
}

/// What a run computes on.
pub(crate) enum Devices {
    One(Chosen),
    Several(Split),
}

impl Devices {
    /// Refuses a run that does not fit beside the other ranks of this machine, if it is `planned`;
    /// then also how many numbers it trains.
    pub(crate) fn of(
        run: &Run,
        memories: &[u64],
        planned: bool,
        ranks: Ranks<'_>,
    ) -> Result<(Self, Option<u64>), Failure> {
        let devices = Chosen::all_of(run)?;
        // `--memory` limits cards; a rank without one ignores it.
        let has_no_card = ranks.all > 1 && memories.len() == 1 && devices.iter().all(Chosen::is_cpu);
        let memories = if has_no_card { &[] } else { memories };
        memory_limits::check_cards(memories, &devices)?;
        let given = Given::of_run(memories);
        if run.devices.len() < 2 {
            let trained = if planned { fits::check(run, ranks, &given)? } else { None };
            return Ok((Self::One(Chosen::of(run)?), trained));
        }
        if !planned {
            return Ok((Self::Several(Split::unplanned(run)?), None));
        }
        let fit = split_fit(run, &given, ranks)?;
        if fit.fits() == Some(false) {
            let first = fit.advice(run, &given, ranks).next();
            if let Some(refusal) = fit.refusal(first.as_ref()) {
                return Err(refusal);
            }
        }
        let trained = fit.trained_count();
        Ok((Self::Several(fit.split), Some(trained)))
    }

    pub(crate) fn name(&self) -> String {
        match self {
            Self::One(chosen) => chosen.name(),
            Self::Several(split) => split.name(),
        }
    }

    /// With the threads of a CPU, or the layers of each device.
    fn described(&self) -> String {
        match self {
            Self::One(Chosen::Cpu { threads }) => format!("cpu, {}", counted(*threads as u64, "thread")),
            Self::One(chosen) => chosen.name(),
            Self::Several(split) => split.described(),
        }
    }
}

/// Warnings, printed even by a quiet run.
fn warn(prepared: &Prepared) {
    if let Some(folder) = prepared.start.as_deref().and_then(Path::parent)
        && let Some(made_on) = Manifest::check(folder).ok().flatten().and_then(|manifest| manifest.base)
        && made_on.to_string() != prepared.identity.base
    {
        let base = prepared.run.base_model.display();
        let [made_on, found] = [made_on.to_string(), prepared.identity.base.clone()].map(|hash| hash[..16].to_string());
        tell(&format!(
            "warning: `adapter.resume_from`: the adapter was trained on a different base: its digest is {made_on}, \
             that of {base} is {found} (config and weights)"
        ));
    }
    if let Some(folder) = prepared.start.as_deref().and_then(Path::parent)
        && let Ok(theirs) = is_trained_in_4bit(folder)
        && let ours = prepared.identity.load_in_4bit.is_some()
        && ours != theirs
    {
        tell(&format!(
            "warning: `adapter.resume_from`: the adapter was trained with load_in_4bit = {theirs}, but this run has \
             {ours}"
        ));
    }
    if let Some(note) = prepared.weights.unused_note() {
        tell(&format!("warning: {note}"));
    }
    if let Some(note) = replays_from_the_base(prepared) {
        tell(&format!("note: {note}"));
    }
    let (truncated, most) = (prepared.report.truncated.len(), prepared.report.max_seq_length);
    if truncated > 0 {
        let rows = counted(truncated as u64, "row");
        tell(&format!("warning: {rows} longer than {most} tokens, cut there: `isobit data check` lists them"));
    }
    let dropped = prepared.report.dropped.len();
    if dropped > 0 {
        tell(&format!("warning: {} dropped: `isobit data check` lists them", counted(dropped as u64, "row")));
    }
}

/// A run that prunes its checkpoints can be replayed only from the base until the first that is
/// left.
fn replays_from_the_base(prepared: &Prepared) -> Option<String> {
    let (training, total) = (&prepared.run.training, prepared.steps.total);
    let every = match training.save {
        Every::Steps(steps) => steps,
        Every::Epoch => prepared.steps.per_epoch,
        Every::Never => return None,
    };
    let (limit, saves) = (u64::from(training.save_total_limit), total.div_ceil(every));
    (limit > 0 && saves > limit).then(|| {
        format!(
            "save_total_limit = {limit} keeps {limit} of {saves} checkpoints: a replay of earlier updates begins at the base"
        )
    })
}

/// What the receipt says about this machine, for information.
fn environment(device: &str, prepared: &Prepared, team: &Team<'_>) -> BTreeMap<String, String> {
    let run = &prepared.run;
    let entries = [
        ("cpu_path", CpuPath::best().name().to_string()),
        ("device", device.to_string()),
        ("note", "nothing here influences a bit".to_string()),
        ("ranks", team.size().to_string()),
        ("system", format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
        ("threads", team.threads().to_string()),
        ("split", format!("{}x{}", run.training.micro_batch_size, run.training.gradient_accumulation_steps)),
    ];
    let drivers = drivers(device).map(|drivers| ("driver", drivers));
    entries.into_iter().chain(drivers).map(|(name, value)| (name.to_string(), value)).collect()
}

/// Every card among `devices` and its driver.
fn drivers(devices: &str) -> Option<String> {
    let described = |name: &str| {
        let api = name.parse::<gpu::Selector>().ok()?.api;
        let listing = gpu::list(api).ok()?.into_iter().find(|listing| listing.selector == name)?;
        Some(format!("{name}: {}, {}", listing.name, listing.runtime))
    };
    let all: Vec<String> = devices.split(',').filter_map(described).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// The work to do once the device is open.
struct Training<'a> {
    arguments: &'a Arguments,
    device: String,
    prepared: &'a Prepared,
    start: Start,
    team: &'a Team<'a>,
}

impl Job for Training<'_> {
    type Result = Result<(), Failure>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let (prepared, team) = (self.prepared, self.team);
        self.run_with(|start, console| train(backend, prepared, start, team, console))
    }
}

impl Training<'_> {
    fn run_on(self, stages: Vec<StageDevice>) -> Result<(), Failure> {
        let (prepared, team) = (self.prepared, self.team);
        let with_moments = !is_sharded(&prepared.run, team);
        self.run_with(|start, console| {
            std::thread::scope(|scope| {
                let model = Divided { config: &prepared.model, source: &prepared.weights };
                let make = |settings: &Settings| Stages::new(scope, model, settings, with_moments, stages);
                train_with(make, prepared, start, team, console)
            })
        })
    }

    /// Runs `train` and tells how it ended.
    fn run_with(self, train: impl FnOnce(Start, &mut Console<'_>) -> Result<Outcome, RunError>) -> Result<(), Failure> {
        let Self { arguments, device, prepared, start, team } = self;
        let (json, quiet) = (arguments.json && team.is_first(), arguments.quiet || !team.is_first());
        let output = &prepared.run.output_dir;
        let is_empty = std::fs::read_dir(output).map_or(true, |mut entries| entries.next().is_none());
        if arguments.resume && is_empty && !quiet {
            tell(&format!("note: {} holds no run yet: starting at step 0", output.display()));
        }
        let page = if team.is_first() { LivePage::of(&prepared.run) } else { None };
        let mut environment = environment(&device, prepared, team);
        if let Some(every) = arguments.audit_every {
            environment.insert("audit".to_string(), format!("one micro-batch {}", audit::interval(every)));
            if every > prepared.steps.total {
                let total = counted(prepared.steps.total, "update");
                tell(&format!("warning: --audit-every {every} audits nothing: the run has {total}"));
            }
        }
        let audit = audit::auditor(arguments.audit_every, arguments.audit_on.as_deref(), prepared)?;
        let console = Console::new(prepared, device, json, quiet).with_audit(audit);
        let mut console = console.with_page(page).with_receipt(environment, arguments.fixed);
        let outcome = train(start, &mut console);
        console.close();
        match outcome.map_err(|error| ranks::said(&error, team))? {
            Outcome::Finished { .. } if !team.is_first() => Ok(()),
            Outcome::Finished { step, early } => {
                samples::write(&prepared.run, quiet || json);
                // Once more: the final weights are there now.
                console.rewrite_page();
                ending::finished(prepared, &console, (step, early), team.size(), arguments.quiet)
            }
            Outcome::Stopped { signal, .. } if !team.is_first() => Err(Failure::printed(signal.exit_code())),
            Outcome::Stopped { step, signal } => {
                let output = prepared.run.output_dir.display();
                let mut event = serde_json::json!({"event": "stopped", "step": step, "signal": signal.name(),
                    "checkpoint": format!("checkpoint-{step}")});
                if let Some(agreed) = console.agreed() {
                    event["audits"] = agreed.json();
                }
                console.event(event);
                // A clean stop is not an error. Even a quiet run reports it: the user has just
                // requested it.
                tell(&format!(
                    "stopped after {} by {}, saved in {output}/checkpoint-{step}",
                    counted(step, "update"),
                    signal.name()
                ));
                if let Some(agreed) = console.agreed() {
                    tell(&agreed.line());
                }
                tell("run the same command with `--resume` to continue");
                Err(Failure::printed(signal.exit_code()))
            }
        }
    }
}

/// Layer kinds worth reporting before a run: routers, whose expert indices are kept, and
/// convolutions.
fn kinds(prepared: &Prepared) -> Option<String> {
    let layers = &prepared.model.layers;
    let sparse = layers.iter().filter(|layer| matches!(layer.mlp, MlpKind::Experts(_))).count();
    let convolved = layers.iter().filter(|layer| matches!(layer.attention, AttentionKind::Delta(_))).count();
    (sparse + convolved > 0).then(|| {
        format!(
            "{} layers, {sparse} with recorded expert indices, {convolved} with conv1d; checkpointing {}, profile {}",
            layers.len(),
            step_settings(&prepared.run).policy.name(),
            prepared.run.profile.name()
        )
    })
}
