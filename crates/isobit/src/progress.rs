//! Progress of `isobit train`: a bar on a terminal, plain lines otherwise, so that a log file
//! grows, and JSON events on stdout on request. Nothing here changes a result.

use crate::audit::{Agreed, Audit};
use crate::report::LivePage;
use crate::stderr::tell;
use crate::units::{size, time};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use isobit_proof::name::counted;
use isobit_training::audit::Auditor;
use isobit_training::metrics::{Event, Record};
use isobit_training::prepare::Prepared;
use isobit_training::run::Watch;
use isobit_training::signal::{self, Signal};
use isobit_training::step::{Evaluation, StepReport};
use serde_json::{Value, json};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::Path;

/// Schema of the events.
pub(crate) const SCHEMA: &str = "isobit.train/1";

/// How progress is shown on stderr.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Talk {
    Bar,
    Lines,
    Nothing,
}

pub(crate) struct Console<'a> {
    bar: ProgressBar,
    talk: Talk,
    json: bool,
    prepared: &'a Prepared,
    device: String,
    clock: Clock,
    pace: Pace,
    /// Tokens trained on by this process.
    pub(crate) tokens: usize,
    /// Updates before this process.
    pub(crate) from_step: u64,
    /// Tokens and seconds of updates in the lines that were logged, without evaluations and saves.
    pub(crate) logged: (f64, f64),
    /// Seconds spent waiting for other ranks.
    pub(crate) communication: f64,
    /// Of each device's own memory, where it has any.
    pub(crate) device_peaks: Vec<Option<u64>>,
    warned: bool,
    /// Whether an event could not be written.
    events_lost: Cell<bool>,
    /// The page that is rewritten at every save.
    page: Option<LivePage>,
    /// For the receipt.
    environment: BTreeMap<String, String>,
    needs_receipt: bool,
    audit: Option<Audit>,
}

/// A clock used only for display.
pub(crate) struct Clock(
    #[expect(clippy::disallowed_types, reason = "progress shows time; results never depend on it")] std::time::Instant,
);

impl Clock {
    #[expect(clippy::disallowed_types, reason = "as above")]
    pub(crate) fn start() -> Self {
        Self(std::time::Instant::now())
    }

    pub(crate) fn seconds(&self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }
}

/// The speed of this process. Earlier updates do not count, nor does its first one once there is
/// another: the first compiles kernels and allocates memory.
#[derive(Debug, Default)]
struct Pace {
    begun: f64,
    /// When the first update finished.
    first_done: f64,
    done: u64,
}

impl Pace {
    fn step(&mut self, now: f64) {
        self.done += 1;
        if self.done == 1 {
            self.first_done = now;
        }
    }

    /// Seconds for `left` more updates; None before the first finishes.
    fn seconds_left(&self, left: u64, now: f64) -> Option<f64> {
        match self.done {
            0 => None,
            1 => Some((self.first_done - self.begun) * left as f64),
            done => Some((now - self.first_done) / (done - 1) as f64 * left as f64),
        }
    }
}

/// A number of any size in few characters; only zero looks like zero.
fn short(value: f64) -> String {
    match value {
        0.0 => "0".to_string(),
        0.01..10_000.0 => format!("{value:.3}"),
        _ => format!("{value:.2e}"),
    }
}

impl<'a> Console<'a> {
    pub(crate) fn new(prepared: &'a Prepared, device: String, json: bool, quiet: bool) -> Self {
        let talk = match (quiet || json, std::io::stderr().is_terminal()) {
            (true, _) => Talk::Nothing,
            (false, true) => Talk::Bar,
            (false, false) => Talk::Lines,
        };
        let bar = ProgressBar::new(prepared.steps.total);
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        if talk != Talk::Bar {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        let clock = Clock::start();
        let (pace, events_lost) = (Pace::default(), Cell::new(false));
        Self {
            bar,
            talk,
            json,
            prepared,
            device,
            clock,
            pace,
            tokens: 0,
            from_step: 0,
            logged: (0.0, 0.0),
            communication: 0.0,
            device_peaks: Vec::new(),
            warned: false,
            events_lost,
            page: None,
            environment: BTreeMap::new(),
            needs_receipt: false,
            audit: None,
        }
    }

    /// The devices by name, with the peak of their own memory where they have any.
    pub(crate) fn devices(&self) -> Vec<(String, Option<u64>)> {
        self.device.split(',').map(ToString::to_string).zip(self.device_peaks.iter().copied()).collect()
    }

    /// What audits have found to agree, if there are any.
    pub(crate) fn agreed(&self) -> Option<&Agreed> {
        self.audit.as_ref().map(|audit| &audit.agreed)
    }

    /// With audits, if there are any.
    pub(crate) fn with_audit(self, audit: Option<Audit>) -> Self {
        Self { audit, ..self }
    }

    /// With what the receipt says about this machine, and whether there must be one.
    pub(crate) fn with_receipt(self, environment: BTreeMap<String, String>, needs_receipt: bool) -> Self {
        Self { environment, needs_receipt, ..self }
    }

    /// With a page of the run, if its config asks for one.
    pub(crate) fn with_page(self, page: Option<LivePage>) -> Self {
        Self { page, ..self }
    }

    /// Writes the page of the run, if there is one.
    pub(crate) fn rewrite_page(&mut self) {
        if let Some(warning) = self.page.as_mut().and_then(|page| page.rewrite(&self.prepared.run)) {
            self.bar.suspend(|| tell(&warning));
        }
    }

    pub(crate) fn event(&self, mut value: Value) {
        if self.json {
            value["schema"] = SCHEMA.into();
            // A closed pipe or a full disk ends the events, not the training.
            let written = writeln!(std::io::stdout().lock(), "{value}");
            let is_lost = |error: &std::io::Error| error.kind() != std::io::ErrorKind::BrokenPipe;
            if let Some(error) = written.err().filter(is_lost)
                && !self.events_lost.replace(true)
            {
                tell(&format!("warning: events are lost, training goes on: cannot write to stdout: {error}"));
            }
        }
    }

    /// Removes the bar; further output appears below earlier lines.
    pub(crate) fn close(&self) {
        self.bar.finish_and_clear();
    }

    /// Seconds since the first update of this process began.
    pub(crate) fn seconds_of_training(&self) -> f64 {
        self.clock.seconds() - self.pace.begun
    }

    fn say(&self, text: &str) {
        match self.talk {
            Talk::Bar => self.bar.println(text),
            Talk::Lines => tell(text),
            Talk::Nothing => (),
        }
    }

    fn eta(&self, step: u64) -> String {
        let left = self.prepared.steps.total.saturating_sub(step);
        self.pace.seconds_left(left, self.clock.seconds()).map_or("unknown".to_string(), time)
    }
}

impl Watch for Console<'_> {
    fn started(&mut self, prepared: &Prepared, trained: usize, from_step: u64) {
        self.pace.begun = self.clock.seconds();
        self.from_step = from_step;
        signal::saved(from_step);
        self.bar.set_position(from_step);
        let total = prepared.steps.total;
        if from_step > 0 {
            self.say(&format!("resuming after {from_step} of {}", counted(total, "update")));
        }
        self.event(json!({"event": "started", "device": self.device, "trained_parameters": trained,
            "from_step": from_step, "steps": total}));
    }

    fn seconds(&mut self) -> f64 {
        self.clock.seconds()
    }

    fn wall_seconds(&mut self) -> f64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(0.0, |since| since.as_secs_f64())
    }

    fn step(&mut self, step: u64, report: &StepReport, learning_rate: f64) {
        self.tokens += report.tokens;
        self.pace.step(self.clock.seconds());
        if report.grad_norm == 0.0 && report.loss > 0.0 && !self.warned {
            self.warned = true;
            self.say(&format!("warning: step {step}: the gradient is zero: nothing is learned from here on"));
        }
        if self.talk == Talk::Bar {
            let rate = self.tokens as f64 / self.seconds_of_training().max(1e-9);
            let on_devices = self.device_peaks.iter().flatten().copied().max();
            let memory = size(on_devices.unwrap_or_else(crate::bench::peak_resident_bytes));
            let (loss, eta) = (report.loss, self.eta(step));
            self.bar.set_position(step);
            self.bar
                .set_message(format!("loss {loss:.4} lr {learning_rate:.2e} {rate:.0} tokens/s {memory} eta {eta}"));
        }
        self.event(json!({"event": "step", "step": step, "loss": report.loss, "grad_norm": report.grad_norm,
            "learning_rate": learning_rate, "tokens": report.tokens}));
    }

    fn noted(&mut self, what: &str) {
        self.bar.suspend(|| tell(&format!("note: {what}")));
    }

    fn auditor(&mut self, step: u64) -> Option<(&mut dyn Auditor, u64)> {
        let Audit { every, auditor, .. } = self.audit.as_mut()?;
        let (auditor, number): (&mut dyn Auditor, u64) = (&mut **auditor, step / *every);
        step.is_multiple_of(*every).then_some((auditor, number))
    }

    fn audited(&mut self, step: u64, tokens: usize) {
        let Some(Audit { agreed, .. }) = &mut self.audit else { return };
        agreed.micro_batches += 1;
        agreed.tokens += tokens;
        self.event(json!({"event": "audited", "step": step, "tokens": tokens}));
    }

    fn needs_receipt(&self) -> bool {
        self.needs_receipt
    }

    fn environment(&mut self) -> BTreeMap<String, String> {
        self.environment.clone()
    }

    fn device_memory(&mut self, bytes_peak: &[Option<u64>]) {
        self.device_peaks = bytes_peak.to_vec();
    }

    fn communicated(&mut self, seconds: f64) {
        self.communication = seconds;
    }

    fn logged(&mut self, record: &Record) {
        let Event::Train { loss, learning_rate, grad_norm } = record.event else { return };
        if let Some(timing) = record.timing {
            self.logged.0 += timing.tokens_per_s * timing.seconds;
            self.logged.1 += timing.seconds;
        }
        if self.talk == Talk::Lines {
            let rate = record.timing.map_or(0.0, |timing| timing.tokens_per_s);
            tell(&format!(
                "step {}/{}: loss {loss:.4}, lr {}, grad norm {}, {rate:.0} tokens/s, eta {}",
                record.step,
                self.prepared.steps.total,
                short(learning_rate),
                short(grad_norm),
                self.eta(record.step)
            ));
        }
    }

    fn evaluated(&mut self, step: u64, evaluation: &Evaluation, best: bool) {
        let (loss, perplexity, accuracy) = (evaluation.loss(), evaluation.perplexity(), evaluation.accuracy());
        let (total, note) = (self.prepared.steps.total, if best { " (best)" } else { "" });
        self.say(&format!(
            "step {step}/{total}: eval loss {loss:.4}, perplexity {perplexity:.2}, accuracy {accuracy:.4}{note}"
        ));
        self.event(json!({"event": "eval", "step": step, "loss": loss, "perplexity": perplexity, "accuracy": accuracy,
            "best": best}));
    }

    fn saved(&mut self, folder: &Path) {
        let name = folder.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        if let Some(step) = name.rsplit('-').next().and_then(|step| step.parse().ok()) {
            signal::saved(step);
        }
        self.event(json!({"event": "saved", "checkpoint": name}));
        self.rewrite_page();
    }

    fn stop(&mut self) -> Option<Signal> {
        signal::requested()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_counts_this_process_alone() {
        let mut pace = Pace { begun: 100.0, ..Pace::default() };
        assert_eq!(pace.seconds_left(9, 100.0), None);
        pace.step(130.0);
        assert_eq!(pace.seconds_left(9, 130.0), Some(270.0));
        // The first took 30 seconds, each later one two.
        pace.step(132.0);
        assert_eq!(pace.seconds_left(8, 132.0), Some(16.0));
        pace.step(134.0);
        assert_eq!(pace.seconds_left(7, 134.0), Some(14.0));
        assert_eq!(pace.seconds_left(0, 134.0), Some(0.0));
    }

    #[test]
    fn numbers_of_any_size() {
        assert_eq!([0.0, 2e-4, 0.531, 12.0, 31_500.0].map(short), ["0", "2.00e-4", "0.531", "12.000", "3.15e4"]);
    }
}
