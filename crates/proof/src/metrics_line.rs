//! A line of `metrics.jsonl`: what a run writes, and what `verify` writes again from the chain.

use crate::line::{CHECK, checksum};
use serde::{Deserialize, Serialize};

pub const SCHEMA: &str = "isobit.metrics/1";

/// One line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Record {
    /// Completed updates.
    pub step: u64,
    pub epoch: f64,
    /// Tokens trained on so far.
    pub tokens: u64,
    pub event: Event,
    pub timing: Option<Timing>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// Mean loss since the last such line; learning rate of this step and its gradient norm before
    /// clipping.
    Train {
        loss: f64,
        learning_rate: f64,
        grad_norm: f64,
    },
    Eval {
        loss: f64,
        accuracy: f64,
        tokens: u64,
    },
}

/// Wall-clock measurements: never compared.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    pub seconds: f64,
    pub tokens_per_s: f64,
    /// Of the seconds, those spent waiting for other ranks; None without any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub communication_s: Option<f64>,
}

/// The form in the file; fields come in this order. A number that is not finite is written as null
/// and identified by its bits.
#[derive(Serialize)]
struct Line {
    schema: &'static str,
    step: u64,
    epoch: f64,
    tokens: u64,
    #[serde(flatten)]
    event: EventLine,
    // Last, so that it can be cut off.
    #[serde(skip_serializing_if = "Option::is_none")]
    timing: Option<Timing>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum EventLine {
    Train {
        loss: f64,
        loss_bits: String,
        learning_rate: f64,
        learning_rate_bits: String,
        grad_norm: f64,
        grad_norm_bits: String,
    },
    Eval {
        eval_loss: f64,
        eval_loss_bits: String,
        eval_accuracy: f64,
        eval_tokens: u64,
    },
}

impl Record {
    /// The values that TensorBoard shows.
    pub fn scalars(&self) -> Vec<(&'static str, f32)> {
        match self.event {
            Event::Train { loss, learning_rate, grad_norm } => vec![
                ("train/loss", loss as f32),
                ("train/learning_rate", learning_rate as f32),
                ("train/grad_norm", grad_norm as f32),
            ],
            Event::Eval { loss, accuracy, .. } => vec![("eval/loss", loss as f32), ("eval/accuracy", accuracy as f32)],
        }
    }

    /// The line of `metrics.jsonl`, without its newline.
    pub fn to_line(&self) -> String {
        let event = match self.event {
            Event::Train { loss, learning_rate, grad_norm } => EventLine::Train {
                loss,
                loss_bits: hex(loss),
                learning_rate,
                learning_rate_bits: hex(learning_rate),
                grad_norm,
                grad_norm_bits: hex(grad_norm),
            },
            Event::Eval { loss, accuracy, tokens } => EventLine::Eval {
                eval_loss: loss,
                eval_loss_bits: hex(loss),
                eval_accuracy: accuracy,
                eval_tokens: tokens,
            },
        };
        let Self { step, epoch, tokens, timing, .. } = *self;
        let line = Line { schema: SCHEMA, step, epoch, tokens, event, timing };
        let mut line = serde_json::to_string(&line).expect("strings and numbers have a JSON form");
        // The closing brace.
        line.pop();
        let check = checksum(&line);
        line + CHECK + &check + "\"}"
    }
}

fn hex(value: f64) -> String {
    format!("{:016x}", value.to_bits())
}
