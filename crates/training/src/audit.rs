//! Audits: every N updates one micro-batch is computed twice, by the engine of the run and by
//! another one, on another device or with other threads. Both have the same weights, so every bit
//! of gradient and loss must be the same; otherwise one of them computes wrongly, and the run stops
//! before it learns from that.

use crate::engine::{Engine, Stored};
use crate::row::Row;
use crate::step::{Losses, StepError, StepSettings, Update};
use crate::trainer::micro_batches;
use isobit_models::TrainedTensor;
use std::ops::Range;

/// What computes a micro-batch a second time.
pub trait Auditor {
    /// Gradients by tensor and losses of rows of an update, with these weights.
    fn compute(
        &mut self,
        weights: Vec<Vec<f32>>,
        update: &Update<'_>,
        rows: Range<usize>,
        settings: &StepSettings,
    ) -> Result<(Vec<Vec<f32>>, Losses), StepError>;
}

impl<E: Engine> Auditor for E {
    fn compute(
        &mut self,
        weights: Vec<Vec<f32>>,
        update: &Update<'_>,
        rows: Range<usize>,
        settings: &StepSettings,
    ) -> Result<(Vec<Vec<f32>>, Losses), StepError> {
        for (at, values) in weights.into_iter().enumerate() {
            self.write(at, Stored::Value, values)?;
        }
        gradients(self, update, rows, settings)
    }
}

fn gradients<E: Engine + ?Sized>(
    engine: &E,
    update: &Update<'_>,
    rows: Range<usize>,
    settings: &StepSettings,
) -> Result<(Vec<Vec<f32>>, Losses), StepError> {
    let (mut gradients, losses) = engine.group_gradients(update, rows, settings)?;
    engine.combine(&mut gradients)?;
    Ok((engine.download(&gradients)?, losses))
}

/// Computes the `number`-th micro-batch of an update, counted round, on both and compares. Returns
/// how many tokens agree; none if the update has nothing to learn from.
pub fn check<E: Engine>(
    engine: &E,
    auditor: &mut dyn Auditor,
    rows: &[&Row],
    (step, number): (u64, u64),
    settings: &StepSettings,
) -> Result<Option<usize>, StepError> {
    let update = Update::new(rows, step);
    let micro: Vec<Range<usize>> = micro_batches(0..rows.len(), settings.micro_batch_size).collect();
    if update.targets == 0 || micro.is_empty() {
        return Ok(None);
    }
    let range = micro[(number % micro.len() as u64) as usize].clone();
    let all = 0..engine.tensors().len();
    let weights = all.map(|at| engine.read(at, Stored::Value)).collect::<Result<Vec<_>, _>>()?;
    let (ours, our_losses) = gradients(engine, &update, range.clone(), settings)?;
    let (theirs, their_losses) = auditor.compute(weights, &update, range.clone(), settings)?;
    let tokens = rows[range.clone()].iter().map(|row| row.tokens().len()).sum();
    let rows = format!("rows {} to {}", range.start + 1, range.end);
    match first_difference(engine.tensors(), (&ours, &our_losses), (&theirs, &their_losses)) {
        None => Ok(Some(tokens)),
        Some(what) => Err(StepError::Audit { step, rows, what }),
    }
}

/// Where two computations part, in words.
fn first_difference(
    tensors: &[TrainedTensor],
    (ours, our_losses): (&[Vec<f32>], &Losses),
    (theirs, their_losses): (&[Vec<f32>], &Losses),
) -> Option<String> {
    let differing = |a: &[f32], b: &[f32]| a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
    let shown = |a: f32, b: f32| format!("{a:?} (0x{:08x}) here, {b:?} (0x{:08x}) there", a.to_bits(), b.to_bits());
    if let Some(at) = differing(&our_losses.tokens, &their_losses.tokens) {
        return Some(format!("the loss of token {at} is {}", shown(our_losses.tokens[at], their_losses.tokens[at])));
    }
    for ((tensor, ours), theirs) in tensors.iter().zip(ours).zip(theirs) {
        if let Some(at) = differing(ours, theirs) {
            return Some(format!("element {at} of the gradient of {} is {}", tensor.name, shown(ours[at], theirs[at])));
        }
    }
    (our_losses != their_losses).then(|| "the load-balancing losses differ".to_string())
}
