//! `isobit train`: runs a config, or goes on with a run. Progress on stderr, results in the output folder.

use crate::Failure;
use crate::backend::{Chosen, Job, on_device};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use isobit_kernels::Backend;
use isobit_models::config::{Feed, Mixer};
use isobit_training::batch::TokenRow;
use isobit_training::checkpoint::{Start, step_of};
use isobit_training::config::{self, Run, Settled};
use isobit_training::prepare::{Prepared, RunError, prepare, profile, step_settings};
use isobit_training::run::{Outcome, Watch, train};
use isobit_training::signal::{self, Signal};
use isobit_training::step::{Evaluation, StepReport};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Config file
    config: PathBuf,
    /// Go on from the latest checkpoint of the output folder
    #[arg(long)]
    resume: bool,
    /// Go on from this checkpoint of the output folder, `checkpoint-N`, instead of the latest
    #[arg(long, value_name = "CHECKPOINT", conflicts_with = "resume")]
    resume_from: Option<PathBuf>,
    /// Override a key of the config: `--set training.learning_rate=1e-4`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Start even if the plan says that the run does not fit into memory
    #[arg(long)]
    no_plan: bool,
    /// Print one JSON object per event on stdout
    #[arg(long)]
    json: bool,
    /// No progress bar and no summary
    #[arg(short, long)]
    quiet: bool,
}

impl Arguments {
    /// Where the run is to begin. A checkpoint is named alone, or by its path in the output folder.
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
    let settled = config::read(&arguments.config, &arguments.overrides);
    let Settled { run, notes } = settled.map_err(|error| failed(&RunError::Config(error)))?;
    if !arguments.quiet {
        for note in &notes {
            tell(&format!("note: {note}"));
        }
    }
    signal::install().map_err(|error| Failure::output(&error))?;
    let chosen = Chosen::of(&run)?;
    if !arguments.no_plan {
        crate::fits::check(&run)?;
    }
    let prepared = prepare(run).map_err(|error| failed(&error))?;
    if !arguments.quiet {
        tell(&format!(
            "{} rows, {} tokens, {} of them targets; {} updates",
            prepared.train.len(),
            prepared.train.iter().map(|row| row.tokens.len()).sum::<usize>(),
            prepared.train.iter().map(TokenRow::target_count).sum::<usize>(),
            prepared.steps.total
        ));
        if let Some(line) = kinds(&prepared) {
            tell(&line);
        }
        let (truncated, most) = (prepared.report.truncated.len(), prepared.report.max_seq_length);
        if truncated > 0 {
            tell(&format!("warning: {truncated} rows are cut at {most} tokens: `isobit data check` lists them"));
        }
        if !prepared.report.dropped.is_empty() {
            tell(&format!(
                "warning: {} rows are dropped: `isobit data check` lists them",
                prepared.report.dropped.len()
            ));
        }
    }
    on_device(&chosen, Training { arguments, prepared: &prepared })?
}

/// What the device does once it is open.
struct Training<'a> {
    arguments: &'a Arguments,
    prepared: &'a Prepared,
}

impl Job for Training<'_> {
    type Result = Result<(), Failure>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let mut watch = Console::new(self.arguments, self.prepared);
        let start = self.arguments.start(&self.prepared.run.output_dir)?;
        let outcome = train(backend, self.prepared, start, &mut watch);
        watch.bar.finish_and_clear();
        let output = self.prepared.run.output_dir.display();
        match outcome.map_err(|error| failed(&error))? {
            Outcome::Finished { step, early } => {
                if !self.arguments.quiet {
                    let why = if early { ", stopped early" } else { "" };
                    tell(&format!("finished after {step} updates{why}; weights in {output}/final"));
                }
                Ok(())
            }
            Outcome::Stopped { step, signal } => Err(Failure {
                code: signal.exit_code(),
                message: format!("stopped after {step} updates, saved in {output}"),
                hint: Some("run the same command with `--resume` to go on".to_string()),
            }),
        }
    }
}

/// What of the layers needs saying before a run: routers, whose choices are kept, and convolutions.
fn kinds(prepared: &Prepared) -> Option<String> {
    let layers = &prepared.model.layers;
    let sparse = layers.iter().filter(|layer| matches!(layer.feed, Feed::Experts(_))).count();
    let convolved = layers.iter().filter(|layer| matches!(layer.mixer, Mixer::Delta(_))).count();
    (sparse + convolved > 0).then(|| {
        format!(
            "{} layers, {sparse} with kept choices of experts, {convolved} with conv1d; checkpointing {}, profile {}",
            layers.len(),
            step_settings(&prepared.run).policy.name(),
            profile(&prepared.run).name()
        )
    })
}

pub(crate) fn failed(error: &RunError) -> Failure {
    Failure { code: error.exit_code(), message: error.to_string(), hint: error.hint() }
}

/// Progress on stderr, events as JSON on stdout where asked for.
struct Console<'a> {
    bar: ProgressBar,
    json: bool,
    start: Clock,
    tokens: usize,
    prepared: &'a Prepared,
}

/// A clock whose only use is to be looked at.
struct Clock(
    #[expect(clippy::disallowed_types, reason = "progress shows time; results never depend on it")] std::time::Instant,
);

impl Clock {
    #[expect(clippy::disallowed_types, reason = "as above")]
    fn start() -> Self {
        Self(std::time::Instant::now())
    }

    fn seconds(&self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }
}

impl<'a> Console<'a> {
    fn new(arguments: &Arguments, prepared: &'a Prepared) -> Self {
        let bar = ProgressBar::new(prepared.steps.total);
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} eta {eta}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        if arguments.quiet || arguments.json || !std::io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        Self { bar, json: arguments.json, start: Clock::start(), tokens: 0, prepared }
    }

    fn event(&self, value: &serde_json::Value) {
        if self.json {
            // A closed pipe ends the events, not the training.
            let _ = writeln!(std::io::stdout().lock(), "{value}");
        }
    }
}

impl Watch for Console<'_> {
    fn started(&mut self, _prepared: &Prepared, trained: usize, from_step: u64) {
        self.bar.set_position(from_step);
        self.event(&serde_json::json!({"schema": "isobit.train/1", "event": "started", "trained_parameters": trained,
            "from_step": from_step, "steps": self.prepared.steps.total}));
    }

    fn seconds(&mut self) -> f64 {
        self.start.seconds()
    }

    fn wall_seconds(&mut self) -> f64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(0.0, |since| since.as_secs_f64())
    }

    fn step(&mut self, step: u64, report: &StepReport, learning_rate: f64) {
        self.tokens += report.tokens;
        let rate = self.tokens as f64 / self.start.seconds().max(1e-9);
        self.bar.set_position(step);
        let memory = crate::bench::peak_resident_bytes() as f64 / f64::from(1 << 30);
        self.bar
            .set_message(format!("loss {:.4} lr {learning_rate:.2e} {rate:.0} tokens/s {memory:.1} GiB", report.loss));
        self.event(&serde_json::json!({"schema": "isobit.train/1", "event": "step", "step": step, "loss": report.loss,
            "grad_norm": report.grad_norm, "learning_rate": learning_rate, "tokens": report.tokens}));
    }

    fn evaluated(&mut self, step: u64, evaluation: &Evaluation, best: bool) {
        let (loss, perplexity, accuracy) = (evaluation.loss(), evaluation.perplexity(), evaluation.accuracy());
        let text = format!("step {step}: eval loss {loss:.4}, perplexity {perplexity:.2}, accuracy {accuracy:.4}");
        self.bar.println(if best { text + " (best)" } else { text });
        self.event(&serde_json::json!({"schema": "isobit.train/1", "event": "eval", "step": step, "loss": loss,
            "perplexity": perplexity, "accuracy": accuracy, "best": best}));
    }

    fn saved(&mut self, folder: &Path) {
        self.event(&serde_json::json!({"schema": "isobit.train/1", "event": "saved",
            "checkpoint": folder.file_name().map(|name| name.to_string_lossy())}));
    }

    fn stop(&mut self) -> Option<Signal> {
        signal::requested()
    }
}

/// Talk, not results.
pub(crate) fn tell(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// The device that a config names.
impl Chosen {
    pub(crate) fn of(run: &Run) -> Result<Self, Failure> {
        let [device] = run.devices[..] else {
            return Err(Failure::usage("layers cannot be split over devices yet", "name one device"));
        };
        Self::parse(&device.to_string(), run.threads as usize)
    }
}
