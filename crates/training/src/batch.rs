//! Rows of a step as a micro-batch: tokens one after another, no padding, documents and positions beside them.

use isobit_autograd::{Layout, Targets};
use isobit_kernels::Backend;
use isobit_kernels::op::{IGNORED, Span};
use isobit_kernels::tensor::U32;
use isobit_numerics::philox::{Key, Purpose};

/// One row of training: tokens, which of them are targets, and where its documents start.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenRow {
    pub tokens: Vec<u32>,
    /// Token `t` counts: it is predicted from the tokens before it in its document.
    pub targets: Vec<bool>,
    /// Starts of the documents, then the end.
    pub document_starts: Vec<usize>,
}

impl TokenRow {
    /// A single document.
    pub fn document(tokens: Vec<u32>, targets: Vec<bool>) -> Self {
        let document_starts = vec![0, tokens.len()];
        Self { tokens, targets, document_starts }
    }

    /// Tokens that count. The first of a document never does: nothing predicts it.
    pub fn target_count(&self) -> usize {
        let first = |token: &usize| self.document_starts.contains(token);
        (0..self.tokens.len()).filter(|token| self.targets[*token] && !first(token)).count()
    }
}

/// Where a micro-batch stands in the run.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub seed: u64,
    pub step: u32,
    /// Number of its first row inside the step.
    pub first_row: u32,
    /// What each target's loss counts.
    pub weight: f32,
}

/// A micro-batch on the device.
pub struct Batch<B: Backend> {
    pub layout: Layout<B>,
    pub ids: U32<B>,
    pub targets: Targets<B>,
    /// What the tokens should predict, on the host too.
    pub labels: Vec<i32>,
}

impl<B: Backend> Batch<B> {
    pub fn new(backend: &B, rows: &[&TokenRow], place: Place) -> Self {
        let (mut ids, mut labels, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        let (mut row_starts, mut spans) = (vec![0], Vec::new());
        for row in rows {
            for document in row.document_starts.windows(2) {
                let (start, range) = (ids.len(), document[0]..document[1]);
                let span = start..start + range.len();
                spans.push(Span { queries: span.clone(), keys: span });
                positions.extend((0..range.len()).map(|position| position as u32));
                ids.extend_from_slice(&row.tokens[range.clone()]);
                labels.extend(range.clone().map(|token| {
                    let next = token + 1;
                    if next < range.end && row.targets[next] { row.tokens[next] as i32 } else { IGNORED }
                }));
            }
            row_starts.push(ids.len());
        }
        let weight: Vec<f32> = labels.iter().map(|label| if *label == IGNORED { 0.0 } else { place.weight }).collect();
        Self {
            layout: Layout {
                tokens: ids.len(),
                row_starts,
                spans,
                positions: backend.upload(&positions),
                key: Key::new(place.seed, Purpose::Dropout),
                step: place.step,
                first_row: place.first_row,
            },
            ids: backend.upload(&ids),
            targets: Targets { labels: backend.upload(&labels), weight: backend.upload(&weight) },
            labels,
        }
    }
}
