//! Sum of squares (`docs/numerics.md`, "Sum of squares and clipping"), level by level.
//!
//! Level 0: blocks of [`BLOCK`] elements, the last one shorter, each a lane sum of `fma(x, x, ·)`.
//! Every further level: lane sums of blocks of [`BLOCK`] values of the previous level, until one
//! value is left. An empty tensor sums to +0.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, lengths};

/// Elements per block on every level.
pub const BLOCK: usize = 4096;

/// `sums[i] = Σ tensors[i]²`.
pub struct SumSquares<'a, M: Memory> {
    pub sums: &'a mut F32<M>,
    pub tensors: &'a [&'a F32<M>],
}

impl<M: Memory> Op<M> for SumSquares<'_, M> {
    const NAME: &'static str = "sum_squares";

    fn check(&self) {
        lengths(Self::NAME, &[("sums", self.sums.len(), self.tensors.len())]);
        assert!(self.tensors.iter().all(|x| x.len() <= BLOCK * BLOCK * BLOCK), "a tensor has at most 2³⁶ elements");
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.sums)]
    }
}
