//! What an update is made of: its settings, its rows, their losses, what it reports, and why it
//! stops. `engine.rs` holds the update itself.
#![expect(clippy::float_arithmetic, reason = "losses, as numerics.md defines their sums")]

use crate::row::Row;
use isobit_autograd::{Policy, TapeError};
use isobit_kernels::DeviceFailure;
use isobit_numerics::adamw::{AdamW, Coefficients};
use isobit_numerics::slices::Profile;
use isobit_proof::chain::TensorDigests;

/// Why a step stops before the update.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Tape(#[from] TapeError),
    #[error(transparent)]
    Device(#[from] DeviceFailure),
    /// The thread of a device panicked, or ended.
    #[error("{device}: {what}")]
    Stage { device: String, what: String },
    #[error("step {step}: the loss of row {row} is {value}")]
    Loss { step: u64, row: usize, value: f32 },
    #[error("the loss of evaluation row {row} is {value}")]
    EvaluationLoss { row: usize, value: f32 },
    #[error("step {step}: the gradient of {tensor} is not finite")]
    Gradient { step: u64, tensor: String },
    #[error("step {step}: {tensor} is not finite after the update")]
    Parameter { step: u64, tensor: String },
    /// Two computations of one micro-batch differ.
    #[error("step {step}: an audit of {rows} found a difference: {what}")]
    Audit { step: u64, rows: String, what: String },
    #[error("step {step} has no target")]
    NoTarget { step: u64 },
}

impl StepError {
    /// Whether a device had no memory for a buffer.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Device(failure) | Self::Tape(TapeError::Device(failure)) if failure.is_out_of_memory())
    }

    /// The same failure in rows that are evaluated.
    pub(crate) fn in_evaluation(self) -> Self {
        match self {
            Self::Loss { row, value, .. } => Self::EvaluationLoss { row, value },
            other => other,
        }
    }
}

/// How a step is computed and applied.
#[derive(Clone, Debug)]
pub struct StepSettings {
    pub profile: Profile,
    pub policy: Policy,
    /// Rows computed together.
    pub micro_batch_size: usize,
    /// Groups of rows whose gradients are summed on their own.
    pub gradient_groups: usize,
    pub seed: u64,
    /// Largest gradient norm; None if clipping is off.
    pub max_grad_norm: Option<f32>,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// Whether a step also gives the digests of its gradient, weights and optimizer state.
    pub digests: bool,
}

impl StepSettings {
    /// The coefficients of AdamW in update number `step`, by whether a tensor decays.
    pub(crate) fn coefficients(&self, step: u64, learning_rate: f64) -> impl Fn(bool) -> Coefficients + use<> {
        let Self { beta1, beta2, eps, weight_decay, .. } = *self;
        let of = |weight_decay| AdamW { lr: learning_rate, beta1, beta2, eps, weight_decay }.coefficients(step);
        let [decaying, plain] = [weight_decay, 0.0].map(of);
        move |decays| if decays { decaying } else { plain }
    }
}

/// What a step reports.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Mean loss of the targets, summed in float64 in the order of rows and tokens, plus the
    /// load-balancing loss if the model uses one.
    pub loss: f64,
    /// Before clipping.
    pub grad_norm: f32,
    pub tokens: usize,
    pub targets: usize,
    /// Of the trained tensors in model order; empty if they were not asked for.
    pub digests: Vec<TensorDigests>,
}

/// Loss and accuracy over rows that are not trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluation {
    pub loss_sum: f64,
    pub correct: usize,
    pub targets: usize,
}

impl Evaluation {
    /// Mean loss of the targets.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.targets as f64
    }

    pub fn perplexity(&self) -> f64 {
        libm::exp(self.loss())
    }

    /// Share of targets that were predicted as the most likely token.
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.targets as f64
    }
}

/// The rows of an update.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    pub rows: &'a [&'a Row],
    /// Counted from one.
    pub step: u64,
    /// Tokens to predict in all rows.
    pub targets: usize,
}

impl<'a> Update<'a> {
    pub fn new(rows: &'a [&'a Row], step: u64) -> Self {
        Self { rows, step, targets: rows.iter().map(|row| row.target_count()).sum() }
    }

    /// Without a target there is no mean loss.
    pub(crate) fn check(&self) -> Result<(), StepError> {
        if self.targets == 0 { Err(StepError::NoTarget { step: self.step }) } else { Ok(()) }
    }

    /// What the update reports, from the sum of its losses.
    pub(crate) fn report(&self, loss_sum: f64, grad_norm: f32, digests: Vec<TensorDigests>) -> StepReport {
        let (targets, tokens) = (self.targets, self.rows.iter().map(|row| row.tokens().len()).sum());
        StepReport { loss: loss_sum / targets as f64, grad_norm, tokens, targets, digests }
    }
}

/// The losses of rows, in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Losses {
    /// One per token.
    pub tokens: Vec<f32>,
    /// Load balancing, one per row; empty if the model uses none.
    pub balance: Vec<f64>,
}

impl Losses {
    /// Appends the losses of the rows that follow.
    pub fn append(&mut self, mut next: Self) {
        self.tokens.append(&mut next.tokens);
        self.balance.append(&mut next.balance);
    }

    pub fn total(&self) -> f64 {
        // ORDER: token after token, and apart from that row after row, so that neither
        // micro-batches nor groups show.
        add_losses(0.0, &self.tokens) + self.balance.iter().fold(0.0, |sum, of_row| sum + of_row)
    }
}

/// The results of rows that are evaluated, in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evaluated {
    /// One per token.
    pub losses: Vec<f32>,
    /// Targets that were predicted as the most likely token.
    pub correct: usize,
    pub targets: usize,
}

impl Evaluated {
    /// Appends the results of the rows that follow.
    pub fn append(&mut self, mut next: Self) {
        self.losses.append(&mut next.losses);
        self.correct += next.correct;
        self.targets += next.targets;
    }

    pub fn total(&self) -> Evaluation {
        Evaluation { loss_sum: add_losses(0.0, &self.losses), correct: self.correct, targets: self.targets }
    }
}

/// Sums in float64.
fn add_losses(sum: f64, losses: &[f32]) -> f64 {
    // ORDER: token after token.
    losses.iter().fold(sum, |sum, loss| sum + f64::from(*loss))
}
