//! The engine of one device: weights, moments, and the buffers shared between steps.

use crate::batch::{Batch, BatchPosition};
use crate::engine::{Engine, Stored};
use crate::row::Row;
use crate::step::{Evaluated, Losses, StepError, StepSettings, Update};
use isobit_autograd::{Balance, Gradients, Memory, ParameterId, Parameters, Tape};
use isobit_kernels::Backend;
use isobit_kernels::backend::BegunDigest;
use isobit_kernels::op::{AdamWTensor, AdamWUpdate, AnyBuffer, IGNORED, Scale, SumSquares};
use isobit_kernels::tensor::F32;
use isobit_models::{Built, Model, TrainedTensor};
use isobit_numerics::adamw::AdamW;
use isobit_numerics::digest::Digest;
use isobit_numerics::slices::Profile;
use std::ops::Range;

/// A model in training on one device, or the part of a model that a device has. The copy of a tied
/// table (`Model::table_copy`) is none of its trained tensors: another device updates the table.
pub struct Trainer<B: Backend> {
    pub backend: B,
    pub model: Model<B>,
    pub parameters: Parameters<B>,
    /// First and second moments, in the order of the parameters.
    pub moments: Vec<[F32<B>; 2]>,
    tensors: Vec<TrainedTensor>,
    ids: Vec<ParameterId>,
    pub(crate) memory: Memory<B>,
}

impl<B: Backend> Trainer<B> {
    pub fn new(backend: B, built: Built<B>) -> Self {
        let zeros = |length: usize| [(); 2].map(|()| backend.zeros(length));
        let own = built.parameters.iter().filter(|(id, _)| Some(*id) != built.model.table_copy);
        let moments = own.map(|(_, parameter)| zeros(parameter.length())).collect();
        Self { moments, ..Self::without_moments(backend, built) }
    }

    /// Without optimizer state: ranks keep it in shards. Such an engine does not apply updates.
    pub fn without_moments(backend: B, built: Built<B>) -> Self {
        let Built { model, parameters } = built;
        let own = || parameters.iter().filter(|(id, _)| Some(*id) != model.table_copy);
        let tensors = own().map(|(id, parameter)| model.trained_tensor(id, parameter)).collect();
        let ids = own().map(|(id, _)| id).collect();
        Self { memory: Memory::new(), backend, model, parameters, moments: Vec::new(), tensors, ids }
    }

    /// Peak bytes of activations and workspace.
    pub fn peak_bytes(&self) -> usize {
        self.memory.peak_bytes()
    }

    /// Overwrites the copy of a tied table.
    pub(crate) fn write_table(&mut self, values: &[f32]) {
        if let Some(id) = self.model.table_copy {
            self.backend.overwrite(&mut self.parameters.get_mut(id).value, values);
        }
    }

    /// The forward and backward pass of one micro-batch; adds to `gradients` and `losses`.
    fn micro_batch(
        &self,
        update: &Update<'_>,
        rows: Range<usize>,
        settings: &StepSettings,
        gradients: &mut Gradients<B>,
        losses: &mut Losses,
    ) -> Result<(), StepError> {
        let (first_row, micro) = (rows.start, &update.rows[rows]);
        let batch = Batch::new(&self.backend, micro, BatchPosition::of(update, first_row, settings.seed));
        let mut tape = Tape::new(&self.backend, &self.parameters, &batch.layout, settings.profile, settings.policy)
            .with_buffers_of(&self.memory);
        if let Some(coefficient) = self.model.config.balance {
            let of_rows = micro.iter().map(|row| row.target_count()).collect();
            tape = tape.with_balance(Balance { coefficient, targets: of_rows, step_targets: update.targets });
        }
        let output = self.model.loss(&mut tape, &batch.ids, &batch.targets)?;
        let begun = self.backend.begin_download(&output.loss);
        tape.balance_loss(|of_row| losses.balance.push(of_row))?;
        // The device goes on with the backward pass while the losses are on their way.
        let backward = tape.backward(gradients);
        let of_tokens = self.backend.finish_download(&begun, &output.loss)?;
        check_losses(&of_tokens, &batch, update.step, first_row)?;
        losses.tokens.extend(of_tokens);
        Ok(backward?)
    }

    /// One number per tensor; synchronises with the device once.
    fn squares(&self, tensors: &[&F32<B>]) -> Result<Vec<f32>, StepError> {
        if tensors.is_empty() {
            return Ok(Vec::new());
        }
        let mut sums = self.backend.zeros(tensors.len());
        self.backend.run(SumSquares { sums: &mut sums, tensors });
        Ok(self.backend.download(&sums)?)
    }
}

impl<B: Backend> Engine for Trainer<B> {
    type Gradients = Gradients<B>;

    fn tensors(&self) -> &[TrainedTensor] {
        &self.tensors
    }

    fn group_gradients(
        &self,
        update: &Update<'_>,
        group: Range<usize>,
        settings: &StepSettings,
    ) -> Result<(Gradients<B>, Losses), StepError> {
        let mut gradients = Gradients::zeros(&self.backend, &self.parameters);
        let mut losses = Losses::default();
        for micro in micro_batches(group, settings.micro_batch_size) {
            self.micro_batch(update, micro, settings, &mut gradients, &mut losses)?;
        }
        Ok((gradients, losses))
    }

    fn add(&self, left: Gradients<B>, right: Gradients<B>) -> Result<Gradients<B>, StepError> {
        Ok(left.plus(&self.backend, right))
    }

    fn combine(&self, gradients: &mut Gradients<B>) -> Result<(), StepError> {
        gradients.combine(&self.backend, &self.parameters);
        Ok(())
    }

    fn download(&self, gradients: &Gradients<B>) -> Result<Vec<Vec<f32>>, StepError> {
        let parts = gradients.iter().chain(gradients.tied_part());
        parts.map(|part| Ok(self.backend.download(part)?)).collect()
    }

    fn upload(&self, parts: Vec<Vec<f32>>) -> Result<Gradients<B>, StepError> {
        let parts = parts.into_iter().map(|part| self.backend.upload(&part));
        Ok(Gradients::from_parts(parts.collect(), &self.parameters))
    }

    fn sums_of_squares(&self, gradients: &Gradients<B>) -> Result<Vec<f32>, StepError> {
        self.squares(&self.ids.iter().map(|id| gradients.get(*id)).collect::<Vec<_>>())
    }

    fn scale(&self, gradients: &mut Gradients<B>, factor: f32) -> Result<(), StepError> {
        let tensors: Vec<_> = gradients.iter_mut().take(self.ids.len()).collect();
        if !tensors.is_empty() {
            self.backend.run(Scale { tensors, factor });
        }
        Ok(())
    }

    fn apply(
        &mut self,
        gradients: &Gradients<B>,
        step: u64,
        learning_rate: f64,
        settings: &StepSettings,
    ) -> Result<Vec<f32>, StepError> {
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
        let tensors: Vec<_> = tensors.collect();
        if !tensors.is_empty() {
            self.backend.run(AdamWUpdate { tensors });
        }
        self.squares(&self.ids.iter().map(|id| &self.parameters.get(*id).value).collect::<Vec<_>>())
    }

    fn evaluate_rows(
        &self,
        rows: &[&Row],
        range: Range<usize>,
        profile: Profile,
        micro_batch_size: usize,
    ) -> Result<Evaluated, StepError> {
        let mut result = Evaluated::default();
        for micro in micro_batches(range, micro_batch_size) {
            let first_row = micro.start;
            let batch = Batch::new(&self.backend, &rows[micro], BatchPosition::of_evaluation(first_row));
            let mut tape =
                Tape::inference(&self.backend, &self.parameters, &batch.layout, profile).with_buffers_of(&self.memory);
            let output = self.model.loss(&mut tape, &batch.ids, &batch.targets)?;
            let losses = self.backend.download(&output.loss)?;
            check_losses(&losses, &batch, 0, first_row).map_err(StepError::in_evaluation)?;
            let best = self.backend.download(&output.best)?;
            result.append(hits(losses, &best, &batch.labels));
        }
        Ok(result)
    }

    fn read(&self, tensor: usize, which: Stored) -> Result<Vec<f32>, StepError> {
        let buffer = match which {
            Stored::Value => &self.parameters.get(self.ids[tensor]).value,
            Stored::Moment(order) => &self.moments[tensor][order],
        };
        Ok(self.backend.download(buffer)?)
    }

    fn write(&mut self, tensor: usize, which: Stored, values: Vec<f32>) -> Result<(), StepError> {
        let buffer = match which {
            Stored::Value => &mut self.parameters.get_mut(self.ids[tensor]).value,
            Stored::Moment(order) => &mut self.moments[tensor][order],
        };
        self.backend.overwrite(buffer, &values);
        Ok(())
    }

    fn digests(&self) -> Result<Vec<Digest>, StepError> {
        let values = self.parameters.iter().map(|(_, parameter)| &parameter.value);
        // All are begun before the first is waited for.
        let begun: Vec<_> = values.map(|value| BegunDigest::new(&self.backend, AnyBuffer::F32(value))).collect();
        begun.iter().map(|digest| Ok(digest.finish(&self.backend)?)).collect()
    }
}

/// The rows of each micro-batch.
pub(crate) fn micro_batches(rows: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(size).map(move |start| start..end.min(start + size))
}

/// The first loss that is not finite is an error.
pub(crate) fn check_losses<B: Backend>(
    losses: &[f32],
    batch: &Batch<B>,
    step: u64,
    first_row: usize,
) -> Result<(), StepError> {
    let Some(token) = losses.iter().position(|loss| !loss.is_finite()) else { return Ok(()) };
    let row = first_row + batch.layout.row_starts.partition_point(|start| *start <= token) - 1;
    Err(StepError::Loss { step, row, value: losses[token] })
}

/// Counts the targets that were predicted as the most likely token.
pub(crate) fn hits(losses: Vec<f32>, best: &[u32], labels: &[i32]) -> Evaluated {
    let mut result = Evaluated { losses, ..Evaluated::default() };
    for (best, label) in best.iter().zip(labels).filter(|(_, label)| **label != IGNORED) {
        result.targets += 1;
        result.correct += usize::from(*best as i32 == *label);
    }
    result
}
