//! Dropout (`docs/numerics.md`, "Dropout"): an element is kept iff its Philox word is at least
//! `threshold`; kept elements are multiplied by `keep_scale`, others become +0. Backward is the
//! same function of the gradient.
//!
//! The word is keyed by (seed, purpose, step, row, tensor, element): `row` counts from `first_row`
//! along `row_starts`, `element` from the start of its row. The result does not depend on which
//! micro-batch a row is in.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, end, lengths};
use isobit_numerics::philox::Key;

#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    pub key: Key,
    pub step: u32,
    pub tensor: u32,
    pub first_row: u32,
    pub row_starts: &'a [usize],
    pub width: usize,
    pub threshold: u32,
    pub keep_scale: f32,
}

/// `y = x`, some elements dropped and the others scaled.
pub struct ApplyDropout<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub x: &'a F32<M>,
    pub p: Dropout<'a>,
}

impl<M: Memory> Op<M> for ApplyDropout<'_, M> {
    const NAME: &'static str = "dropout";

    fn check(&self) {
        assert!(self.p.row_starts.is_sorted(), "{}: row starts ascend", Self::NAME);
        let length = end(self.p.row_starts) * self.p.width;
        lengths(Self::NAME, &[("y", self.y.len(), length), ("x", self.x.len(), length)]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}
