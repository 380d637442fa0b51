//! One update: forward and backward over the micro-batches of a step, clipping, AdamW.
//!
//! The loss is weighted by tokens over the whole step, and within a gradient group every gradient
//! accumulates over rows in order, so grouping rows into micro-batches changes memory and time,
//! never a bit.
#![expect(clippy::float_arithmetic, reason = "norms and schedules, as numerics.md defines them")]

use crate::batch::{Batch, BatchPosition};
use crate::groups::Groups;
use crate::row::Row;
use isobit_autograd::{Balance, Gradients, Memory, Parameters, Policy, Tape, TapeError};
use isobit_kernels::op::{AdamWTensor, AdamWUpdate, IGNORED, Scale, SumSquares};
use isobit_kernels::tensor::F32;
use isobit_kernels::{Backend, DeviceFailure, float_state};
use isobit_models::{Built, Model};
use isobit_numerics::adamw::AdamW;
use isobit_numerics::lanes::sum;
use isobit_numerics::slices::Profile;
use std::ops::Range;

/// Why a step stops before the update.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Tape(#[from] TapeError),
    #[error(transparent)]
    Device(#[from] DeviceFailure),
    #[error("step {step}: the loss of row {row} is {value}")]
    Loss { step: u64, row: usize, value: f32 },
    #[error("the loss of evaluation row {row} is {value}")]
    EvaluationLoss { row: usize, value: f32 },
    #[error("step {step}: the gradient of {tensor} is not finite")]
    Gradient { step: u64, tensor: String },
    #[error("step {step}: {tensor} is not finite after the update")]
    Parameter { step: u64, tensor: String },
    #[error("step {step} has no target")]
    NoTarget { step: u64 },
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
}

/// The gradients of an update.
pub struct StepGradients<B: Backend> {
    pub gradients: Gradients<B>,
    /// Sum of the losses of all targets, including load balancing.
    pub loss: f64,
    pub targets: usize,
}

/// What a step reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Mean loss of the targets, summed in float64 in the order of rows and tokens, plus the
    /// load-balancing loss if the model uses one.
    pub loss: f64,
    /// Before clipping.
    pub grad_norm: f32,
    pub tokens: usize,
    pub targets: usize,
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

/// A model in training: weights, moments, and the memory shared between steps.
pub struct Trainer<B: Backend> {
    pub backend: B,
    pub model: Model<B>,
    pub parameters: Parameters<B>,
    /// First and second moments, in the order of the parameters.
    pub moments: Vec<[F32<B>; 2]>,
    memory: Memory<B>,
}

impl<B: Backend> Trainer<B> {
    pub fn new(backend: B, built: Built<B>) -> Self {
        let Built { model, parameters } = built;
        let zeros = |length: usize| [(); 2].map(|()| backend.zeros(length));
        let moments = parameters.iter().map(|(_, parameter)| zeros(parameter.length())).collect();
        Self { memory: Memory::new(), backend, model, parameters, moments }
    }

    /// Peak bytes of activations and workspace.
    pub fn peak_bytes(&self) -> usize {
        self.memory.peak_bytes()
    }

    /// Update number `step`, counted from one, over `rows`.
    pub fn step(
        &mut self,
        rows: &[&Row],
        step: u64,
        learning_rate: f64,
        settings: &StepSettings,
    ) -> Result<StepReport, StepError> {
        // Norms and coefficients are computed on the calling thread.
        float_state::restore();
        let StepGradients { mut gradients, loss, targets } = self.gradients(rows, step, settings)?;
        let grad_norm = self.clip(&mut gradients, step, settings.max_grad_norm)?;
        self.update(&gradients, step, learning_rate, settings)?;
        let tokens = rows.iter().map(|row| row.tokens().len()).sum();
        Ok(StepReport { loss: loss / targets as f64, grad_norm, tokens, targets })
    }

    /// The gradients of an update, and the sum of its losses.
    pub fn gradients(&self, rows: &[&Row], step: u64, settings: &StepSettings) -> Result<StepGradients<B>, StepError> {
        let targets: usize = rows.iter().map(|row| row.target_count()).sum();
        if targets == 0 {
            return Err(StepError::NoTarget { step });
        }
        let update = Update { rows, step, targets };
        let mut losses = Losses::default();
        let gradients = Groups::new(rows.len(), settings.gradient_groups)
            .reduce(&mut |_, rows| self.group_gradients(&update, rows, settings, &mut losses), &mut |left, right| {
                Ok(left.plus(&self.backend, right))
            })?;
        let mut gradients = gradients.expect("a row with a target is in a group");
        gradients.combine(&self.backend, &self.parameters);
        Ok(StepGradients { gradients, loss: losses.total(), targets })
    }

    /// The gradients of a group of rows, micro-batch after micro-batch. Appends the group's losses.
    fn group_gradients(
        &self,
        update: &Update<'_>,
        group: Range<usize>,
        settings: &StepSettings,
        losses: &mut Losses,
    ) -> Result<Gradients<B>, StepError> {
        let mut gradients = Gradients::zeros(&self.backend, &self.parameters);
        let weight = (1.0 / update.targets as f64) as f32;
        for first_row in group.clone().step_by(settings.micro_batch_size) {
            let micro = &update.rows[first_row..group.end.min(first_row + settings.micro_batch_size)];
            let (step, of_batch) = (update.step as u32, first_row as u32);
            let place = BatchPosition { seed: settings.seed, step, first_row: of_batch, weight };
            let batch = Batch::new(&self.backend, micro, place);
            let mut tape = Tape::new(&self.backend, &self.parameters, &batch.layout, settings.profile, settings.policy)
                .with_buffers_of(&self.memory);
            if let Some(coefficient) = self.model.config.balance {
                let of_rows = micro.iter().map(|row| row.target_count()).collect();
                tape = tape.with_balance(Balance { coefficient, targets: of_rows, step_targets: update.targets });
            }
            let output = self.model.loss(&mut tape, &batch.ids, &batch.targets)?;
            let of_tokens = self.backend.download(&output.loss)?;
            check_losses(&of_tokens, &batch, update.step, first_row)?;
            losses.tokens.extend(of_tokens);
            tape.balance_loss(|of_row| losses.balance.push(of_row))?;
            tape.backward(&mut gradients)?;
        }
        Ok(gradients)
    }

    /// Scales the gradients down to the largest allowed norm; returns the norm before that.
    fn clip(&self, gradients: &mut Gradients<B>, step: u64, max_norm: Option<f32>) -> Result<f32, StepError> {
        let tensors: Vec<&F32<B>> = self.parameters.iter().map(|(id, _)| gradients.get(id)).collect();
        let squares = self.sums_of_squares(&tensors)?;
        if let Some(tensor) = self.first_not_finite(&squares) {
            return Err(StepError::Gradient { step, tensor });
        }
        let total = sum(&squares).sqrt();
        if !total.is_finite() {
            return Err(StepError::Gradient { step, tensor: "all tensors together".to_string() });
        }
        if let Some(max_norm) = max_norm {
            let ratio = max_norm / (total + 1e-6);
            let coefficient = if ratio < 1.0 { ratio } else { 1.0 };
            self.backend.run(Scale { tensors: gradients.iter_mut().collect(), factor: coefficient });
        }
        Ok(total)
    }

    fn update(
        &mut self,
        gradients: &Gradients<B>,
        step: u64,
        learning_rate: f64,
        settings: &StepSettings,
    ) -> Result<(), StepError> {
        let coefficients = |weight_decay: f64| {
            let StepSettings { beta1, beta2, eps, .. } = *settings;
            AdamW { lr: learning_rate, beta1, beta2, eps, weight_decay }.coefficients(step)
        };
        let [decaying, plain] = [settings.weight_decay, 0.0].map(coefficients);
        let tensors = self.parameters.iter_mut().zip(&mut self.moments).zip(gradients.iter());
        let tensors = tensors.map(|((parameter, [m, v]), gradient)| {
            let coefficients = if parameter.decays { decaying } else { plain };
            AdamWTensor { parameter: &mut parameter.value, m, v, gradient, coefficients }
        });
        self.backend.run(AdamWUpdate { tensors: tensors.collect() });
        let values: Vec<&F32<B>> = self.parameters.iter().map(|(_, parameter)| &parameter.value).collect();
        let squares = self.sums_of_squares(&values)?;
        self.first_not_finite(&squares).map_or(Ok(()), |tensor| Err(StepError::Parameter { step, tensor }))
    }

    /// One number per tensor; synchronises with the device once.
    fn sums_of_squares(&self, tensors: &[&F32<B>]) -> Result<Vec<f32>, StepError> {
        let mut sums = self.backend.zeros(tensors.len());
        self.backend.run(SumSquares { sums: &mut sums, tensors });
        Ok(self.backend.download(&sums)?)
    }

    /// The name of the first parameter whose number is not finite.
    fn first_not_finite(&self, numbers: &[f32]) -> Option<String> {
        let mut named = self.parameters.iter().zip(numbers);
        named.find(|(_, number)| !number.is_finite()).map(|((_, parameter), _)| parameter.name.clone())
    }

    /// Loss and accuracy of rows, `micro_batch_size` at a time; the size does not affect the
    /// result.
    pub fn evaluate(&self, rows: &[&Row], profile: Profile, micro_batch_size: usize) -> Result<Evaluation, StepError> {
        let mut result = Evaluation::default();
        for (index, micro) in rows.chunks(micro_batch_size).enumerate() {
            let first_row = index * micro_batch_size;
            let place = BatchPosition { seed: 0, step: 0, first_row: first_row as u32, weight: 0.0 };
            let batch = Batch::new(&self.backend, micro, place);
            let mut tape =
                Tape::inference(&self.backend, &self.parameters, &batch.layout, profile).with_buffers_of(&self.memory);
            let output = self.model.loss(&mut tape, &batch.ids, &batch.targets)?;
            let losses = self.backend.download(&output.loss)?;
            check_losses(&losses, &batch, 0, first_row).map_err(|error| match error {
                StepError::Loss { row, value, .. } => StepError::EvaluationLoss { row, value },
                other => other,
            })?;
            result.loss_sum = add_losses(result.loss_sum, &losses);
            let best = self.backend.download(&output.best)?;
            for (best, label) in best.into_iter().zip(&batch.labels).filter(|(_, label)| **label != IGNORED) {
                result.targets += 1;
                result.correct += usize::from(best as i32 == *label);
            }
        }
        Ok(result)
    }
}

/// The rows of an update.
struct Update<'a> {
    rows: &'a [&'a Row],
    step: u64,
    targets: usize,
}

/// The losses of an update in the order of its rows.
#[derive(Default)]
struct Losses {
    tokens: Vec<f32>,
    /// Load balancing, one per row.
    balance: Vec<f64>,
}

impl Losses {
    fn total(&self) -> f64 {
        // ORDER: token after token, and apart from that row after row, so that neither
        // micro-batches nor groups show.
        add_losses(0.0, &self.tokens) + self.balance.iter().fold(0.0, |sum, of_row| sum + of_row)
    }
}

/// The first loss that is not finite is an error.
fn check_losses<B: Backend>(losses: &[f32], batch: &Batch<B>, step: u64, first_row: usize) -> Result<(), StepError> {
    let Some(token) = losses.iter().position(|loss| !loss.is_finite()) else { return Ok(()) };
    let row = first_row + batch.layout.row_starts.partition_point(|start| *start <= token) - 1;
    Err(StepError::Loss { step, row, value: losses[token] })
}

/// Sums in float64, token after token.
fn add_losses(sum: f64, losses: &[f32]) -> f64 {
    losses.iter().fold(sum, |sum, loss| sum + f64::from(*loss))
}
