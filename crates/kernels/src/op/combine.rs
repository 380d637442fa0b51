//! Combine (`docs/numerics.md`, "Combine"): sums the outputs of a token's experts.
//!
//! `places[t, j]` is the row of the grouped matrix that belongs to slot `j` of token `t`; each row
//! belongs to one pair. Forward: a chain over slots, `acc = fma(weight[t, j], row, acc)`, or
//! `acc = acc + row` without weights, which is also the backward pass of gathering tokens into
//! grouped rows. Backward: `drow = weight·dy`, and `dweight` is the lane sum of `fma(dy, row, ·)`.

use crate::backend::{F32, Length, Memory, U32};
use crate::op::{Op, Output, lengths};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Combine {
    pub tokens: usize,
    pub slots: usize,
    pub width: usize,
    /// Forward only: start from what the output holds.
    pub accumulate: bool,
}

impl Combine {
    /// Rows of the grouped matrix.
    pub fn rows(&self) -> usize {
        self.tokens * self.slots
    }
}

/// `y[t] = Σ weights[t, j]·rows[places[t, j]]`.
pub struct CombineForward<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub rows: &'a F32<M>,
    pub weights: Option<&'a F32<M>>,
    pub places: &'a U32<M>,
    pub p: Combine,
}

impl<M: Memory> Op<M> for CombineForward<'_, M> {
    const NAME: &'static str = "combine_forward";

    fn check(&self) {
        let p = &self.p;
        let (tokens, rows) = (p.tokens * p.width, p.rows() * p.width);
        lengths(
            Self::NAME,
            &[("y", self.y.len(), tokens), ("rows", self.rows.len(), rows), ("places", self.places.len(), p.rows())],
        );
        if let Some(weights) = self.weights {
            lengths(Self::NAME, &[("weights", weights.len(), p.rows())]);
        }
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}

/// Gradients of rows and weights.
pub struct CombineBackward<'a, M: Memory> {
    pub drows: &'a mut F32<M>,
    pub dweights: &'a mut F32<M>,
    pub dy: &'a F32<M>,
    pub rows: &'a F32<M>,
    pub weights: &'a F32<M>,
    pub places: &'a U32<M>,
    pub p: Combine,
}

impl<M: Memory> Op<M> for CombineBackward<'_, M> {
    const NAME: &'static str = "combine_backward";

    fn check(&self) {
        let p = &self.p;
        let (tokens, rows) = (p.tokens * p.width, p.rows() * p.width);
        lengths(
            Self::NAME,
            &[
                ("drows", self.drows.len(), rows),
                ("dweights", self.dweights.len(), p.rows()),
                ("dy", self.dy.len(), tokens),
                ("rows", self.rows.len(), rows),
                ("weights", self.weights.len(), p.rows()),
                ("places", self.places.len(), p.rows()),
            ],
        );
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.drows), Output::F32(self.dweights)]
    }
}
