//! Packs the rows of a step into a micro-batch: concatenated tokens without padding, with their
//! documents and positions.

use crate::row::Row;
use crate::step::Update;
use isobit_autograd::{BatchLayout, LossTargets};
use isobit_kernels::Backend;
use isobit_kernels::op::{IGNORED, Span};
use isobit_kernels::tensor::U32;
use isobit_models::Part;
use isobit_numerics::philox::{Key, Purpose};

/// The position of a micro-batch in the run.
#[derive(Clone, Copy, Debug)]
pub struct BatchPosition {
    pub seed: u64,
    pub step: u32,
    /// Index of its first row within the step.
    pub first_row: u32,
    /// The weight of each target's loss.
    pub weight: f32,
}

impl BatchPosition {
    /// Of a micro-batch in an update.
    #[expect(clippy::float_arithmetic, reason = "the weight of a target, as numerics.md defines it")]
    pub(crate) fn of(update: &Update<'_>, first_row: usize, seed: u64) -> Self {
        let weight = (1.0 / update.targets as f64) as f32;
        Self { seed, step: update.step as u32, first_row: first_row as u32, weight }
    }

    /// Of a micro-batch that is evaluated.
    pub(crate) fn of_evaluation(first_row: usize) -> Self {
        Self { seed: 0, step: 0, first_row: first_row as u32, weight: 0.0 }
    }
}

/// A micro-batch on the device.
pub struct Batch<B: Backend> {
    pub layout: BatchLayout<B>,
    pub ids: U32<B>,
    pub targets: LossTargets<B>,
    /// The tokens to predict, also kept on the host.
    pub labels: Vec<i32>,
}

impl<B: Backend> Batch<B> {
    pub fn new(backend: &B, rows: &[&Row], place: BatchPosition) -> Self {
        Self::of_ends(backend, rows, place, [true; 2])
    }

    /// With the ids only for the first part of a model, and with the targets only for the last.
    pub(crate) fn of_part(backend: &B, rows: &[&Row], place: BatchPosition, part: &Part) -> Self {
        Self::of_ends(backend, rows, place, [part.is_first(), part.is_last()])
    }

    fn of_ends(backend: &B, rows: &[&Row], place: BatchPosition, [with_ids, with_targets]: [bool; 2]) -> Self {
        let (mut ids, mut labels, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        let (mut row_starts, mut spans) = (vec![0], Vec::new());
        for row in rows {
            let start = ids.len();
            for document in row.document_starts().windows(2) {
                let span = start + document[0]..start + document[1];
                positions.extend((0..span.len()).map(|position| position as u32));
                spans.push(Span { queries: span.clone(), keys: span });
            }
            // Each token predicts the next one, if that is a target.
            let next = row.tokens().iter().zip(row.targets()).skip(1);
            labels.extend(next.map(|(token, target)| if *target { *token as i32 } else { IGNORED }));
            labels.extend(row.tokens().last().map(|_| IGNORED));
            ids.extend_from_slice(row.tokens());
            row_starts.push(ids.len());
        }
        let weight: Vec<f32> = labels.iter().map(|label| if *label == IGNORED { 0.0 } else { place.weight }).collect();
        let tokens = ids.len();
        if !with_ids {
            ids.clear();
        }
        let (shown, weight) = if with_targets { (&labels[..], &weight[..]) } else { (&[][..], &[][..]) };
        Self {
            layout: BatchLayout {
                tokens,
                row_starts,
                spans,
                positions: backend.upload(&positions),
                key: Key::new(place.seed, Purpose::Dropout),
                step: place.step,
                first_row: place.first_row,
            },
            ids: backend.upload(&ids),
            targets: LossTargets { labels: backend.upload(shown), weight: backend.upload(weight) },
            labels,
        }
    }
}
