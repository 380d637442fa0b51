//! Where the lines of a run go, and what a line of the metrics says: the loss since the line before
//! it, and the time it took.
#![expect(clippy::float_arithmetic, reason = "means of losses, and rates")]

use crate::checkpoint::Progress;
use crate::metrics::{Event, Metrics, Record, Timing};
use crate::prepare::{Prepared, RunError};
use crate::record::Recorder;
use crate::run::Watch;
use crate::step::StepReport;
use crate::tensorboard::EventFile;
use std::path::Path;

/// Where lines go: `metrics.jsonl`, the chain, and TensorBoard's file if requested.
pub(crate) struct Log {
    pub(crate) metrics: Metrics,
    pub(crate) events: Option<EventFile>,
    /// None if the run continues one that has no chain.
    pub(crate) record: Option<Recorder>,
}

impl Log {
    pub(crate) fn write_receipt(&self, progress: &Progress, output_dir: &Path) -> Result<(), RunError> {
        self.record.as_ref().map_or(Ok(()), |record| record.write(output_dir, progress, self.metrics.digest()))
    }

    pub(crate) fn append(&mut self, record: &Record, watch: &mut dyn Watch) -> Result<(), RunError> {
        self.metrics.append(record)?;
        watch.logged(record);
        if let Some(events) = &mut self.events {
            events.scalars(record.step, watch.wall_seconds(), &record.scalars())?;
            events.flush()?;
        }
        Ok(())
    }
}

/// Time since the last line of the metrics. Not part of the state: timing is never compared.
#[derive(Default)]
pub(crate) struct SinceLog {
    seconds: f64,
    tokens: usize,
    /// Of the seconds, those spent waiting for other ranks; None without any.
    communication: Option<f64>,
}

impl SinceLog {
    pub(crate) fn add(&mut self, report: &StepReport, seconds: f64, communication: Option<f64>) {
        self.seconds += seconds;
        self.tokens += report.tokens;
        self.communication = communication.map(|more| self.communication.unwrap_or(0.0) + more);
    }

    pub(crate) fn record(
        &self,
        prepared: &Prepared,
        progress: &Progress,
        last: &StepReport,
        learning_rate: f64,
    ) -> Record {
        let loss = progress.loss_sum / progress.loss_count as f64;
        let event = Event::Train { loss, learning_rate, grad_norm: f64::from(last.grad_norm) };
        record(prepared, progress, event, timing(self.seconds, self.tokens, self.communication))
    }
}

pub(crate) fn timing(seconds: f64, tokens: usize, communication_s: Option<f64>) -> Timing {
    Timing { seconds, tokens_per_s: if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }, communication_s }
}

pub(crate) fn record(prepared: &Prepared, progress: &Progress, event: Event, timing: Timing) -> Record {
    let epoch = progress.step as f64 / prepared.steps.per_epoch as f64;
    Record { step: progress.step, epoch, tokens: progress.tokens_seen, event, timing: Some(timing) }
}
