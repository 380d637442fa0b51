//! One update: gradients of the groups of rows, clipping, AdamW. What computes them is an
//! [`Engine`]; the order in which numbers are combined is fixed here, for every engine.
//!
//! The loss is weighted by tokens over the whole step, and within a gradient group every gradient
//! accumulates over rows in order, so grouping rows into micro-batches changes memory and time,
//! never a bit.
#![expect(clippy::float_arithmetic, reason = "norms and clipping, as numerics.md defines them")]

use crate::groups::Groups;
use crate::row::Row;
use crate::step::{Evaluated, Evaluation, Losses, StepError, StepReport, StepSettings, Update};
use isobit_kernels::float_state;
use isobit_models::TrainedTensor;
use isobit_numerics::digest::Digest;
use isobit_numerics::lanes::sum;
use isobit_numerics::slices::Profile;
use isobit_proof::chain::TensorDigests;
use std::ops::Range;

/// What computes an update. Trained tensors are named by their index in model order.
pub trait Engine {
    /// Gradients of the trained tensors, held where they were computed.
    type Gradients;

    /// The trained tensors in model order.
    fn tensors(&self) -> &[TrainedTensor];

    /// The gradients of a group of rows, micro-batch after micro-batch, and their losses. Every
    /// loss is finite.
    fn group_gradients(
        &self,
        update: &Update<'_>,
        group: Range<usize>,
        settings: &StepSettings,
    ) -> Result<(Self::Gradients, Losses), StepError>;

    /// A node of the tree: the sum of the gradients of two groups.
    fn add(&self, left: Self::Gradients, right: Self::Gradients) -> Result<Self::Gradients, StepError>;

    /// Adds the parts of a tied table, after the last group.
    fn combine(&self, gradients: &mut Self::Gradients) -> Result<(), StepError>;

    /// Copies the gradients to the host: a part per tensor, and before `combine` the second part of
    /// a tied table.
    fn download(&self, gradients: &Self::Gradients) -> Result<Vec<Vec<f32>>, StepError>;

    /// Gradients from the parts that `download` returns.
    fn upload(&self, parts: Vec<Vec<f32>>) -> Result<Self::Gradients, StepError>;

    /// The sum of the squares of each tensor's gradient.
    fn sums_of_squares(&self, gradients: &Self::Gradients) -> Result<Vec<f32>, StepError>;

    /// Multiplies the gradients by `factor`.
    fn scale(&self, gradients: &mut Self::Gradients, factor: f32) -> Result<(), StepError>;

    /// Applies AdamW in update number `step`. Returns the sum of the squares of each tensor's new
    /// values.
    fn apply(
        &mut self,
        gradients: &Self::Gradients,
        step: u64,
        learning_rate: f64,
        settings: &StepSettings,
    ) -> Result<Vec<f32>, StepError>;

    /// Losses and hits of the given rows, `micro_batch_size` at a time. Every loss is finite.
    fn evaluate_rows(
        &self,
        rows: &[&Row],
        range: Range<usize>,
        profile: Profile,
        micro_batch_size: usize,
    ) -> Result<Evaluated, StepError>;

    /// Copies a tensor to the host.
    fn read(&self, tensor: usize, which: Stored) -> Result<Vec<f32>, StepError>;

    /// Overwrites a tensor.
    fn write(&mut self, tensor: usize, which: Stored, values: Vec<f32>) -> Result<(), StepError>;

    /// Peak bytes of each device's own memory so far, in the order of the list; None where a device
    /// has none.
    fn device_peaks(&self) -> Result<Vec<Option<u64>>, StepError>;

    /// The gradients of an update, and the sum of its losses.
    fn gradients(
        &self,
        rows: &[&Row],
        step: u64,
        settings: &StepSettings,
    ) -> Result<StepGradients<Self::Gradients>, StepError> {
        let update = Update::new(rows, step);
        update.check()?;
        let mut losses = Losses::default();
        let mut leaf = |_, group| {
            let (gradients, of_group) = self.group_gradients(&update, group, settings)?;
            losses.append(of_group);
            Ok(gradients)
        };
        let groups = Groups::new(rows.len(), settings.gradient_groups);
        let gradients = groups.reduce(&mut leaf, &mut |left, right| self.add(left, right))?;
        let mut gradients = gradients.expect("a row with a target is in a group");
        self.combine(&mut gradients)?;
        Ok(StepGradients { gradients, loss: losses.total(), targets: update.targets })
    }

    /// Update number `step`, counted from one, over `rows`.
    fn step(
        &mut self,
        rows: &[&Row],
        step: u64,
        learning_rate: f64,
        settings: &StepSettings,
    ) -> Result<StepReport, StepError> {
        // Norms and coefficients are computed on the calling thread.
        float_state::restore();
        let StepGradients { mut gradients, loss, .. } = self.gradients(rows, step, settings)?;
        let Applied { grad_norm, digests } = self.clip_and_apply(&mut gradients, step, learning_rate, settings)?;
        Ok(Update::new(rows, step).report(loss, grad_norm, digests))
    }

    /// The second half of an update: clips the gradients, applies them and checks the new values.
    fn clip_and_apply(
        &mut self,
        gradients: &mut Self::Gradients,
        step: u64,
        learning_rate: f64,
        settings: &StepSettings,
    ) -> Result<Applied, StepError> {
        let grad_norm = clip(self, gradients, step, settings.max_grad_norm)?;
        let squares = self.apply(gradients, step, learning_rate, settings)?;
        if let Some(tensor) = first_not_finite(self, &squares) {
            return Err(StepError::Parameter { step, tensor });
        }
        let digests = if settings.digests { self.update_digests(gradients)? } else { Vec::new() };
        Ok(Applied { grad_norm, digests })
    }

    /// Digests of the gradient that was applied, and of the new values and moments, by tensor.
    fn update_digests(&self, gradients: &Self::Gradients) -> Result<Vec<TensorDigests>, StepError>;

    /// The digest of the values of each trained tensor.
    fn digests(&self) -> Result<Vec<Digest>, StepError> {
        let all = 0..self.tensors().len();
        all.map(|tensor| Ok(Digest::of_f32(&self.read(tensor, Stored::Value)?))).collect()
    }

    /// Loss and accuracy of rows; `micro_batch_size` does not affect the result.
    fn evaluate(&self, rows: &[&Row], profile: Profile, micro_batch_size: usize) -> Result<Evaluation, StepError> {
        Ok(self.evaluate_rows(rows, 0..rows.len(), profile, micro_batch_size)?.total())
    }
}

/// The gradients of an update.
pub struct StepGradients<G> {
    pub gradients: G,
    /// Sum of the losses of all targets, including load balancing.
    pub loss: f64,
    pub targets: usize,
}

/// How gradients were applied.
pub struct Applied {
    /// Before clipping.
    pub grad_norm: f32,
    /// Empty if they were not asked for.
    pub digests: Vec<TensorDigests>,
}

/// What is stored of a trained tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    Value,
    /// The optimizer's first (0) or second (1) moment.
    Moment(usize),
}

/// Scales the gradients down to the largest allowed norm; returns the norm before that.
fn clip<E: Engine + ?Sized>(
    engine: &E,
    gradients: &mut E::Gradients,
    step: u64,
    max_norm: Option<f32>,
) -> Result<f32, StepError> {
    let squares = engine.sums_of_squares(gradients)?;
    let (total, coefficient) = norm(engine, &squares, step, max_norm)?;
    if let Some(coefficient) = coefficient {
        engine.scale(gradients, coefficient)?;
    }
    Ok(total)
}

/// The norm of all gradients from the sums of the squares of each, and the factor that clips it, if
/// there is a largest norm.
pub(crate) fn norm<E: Engine + ?Sized>(
    engine: &E,
    squares: &[f32],
    step: u64,
    max_norm: Option<f32>,
) -> Result<(f32, Option<f32>), StepError> {
    if let Some(tensor) = first_not_finite(engine, squares) {
        return Err(StepError::Gradient { step, tensor });
    }
    let total = sum(squares).sqrt();
    if !total.is_finite() {
        return Err(StepError::Gradient { step, tensor: "all tensors together".to_string() });
    }
    let coefficient = max_norm.map(|max_norm| {
        let ratio = max_norm / (total + 1e-6);
        if ratio < 1.0 { ratio } else { 1.0 }
    });
    Ok((total, coefficient))
}

/// The name of the first tensor whose number is not finite.
pub(crate) fn first_not_finite<E: Engine + ?Sized>(engine: &E, numbers: &[f32]) -> Option<String> {
    let mut named = engine.tensors().iter().zip(numbers);
    named.find(|(_, number)| !number.is_finite()).map(|(tensor, _)| tensor.name.clone())
}
