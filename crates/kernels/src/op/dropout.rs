//! Dropout (`docs/numerics.md`, "Dropout"): an element is kept iff its Philox word is at least `threshold`; kept elements
//! are multiplied by `keep_scale`, others become +0. Backward is the same function of the gradient.
//!
//! The word is keyed by (seed, purpose, step, row, tensor, element): `row` counts from `first_row` along `row_starts`,
//! `element` from the start of its row. Which micro-batch a row sits in does not show.

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
