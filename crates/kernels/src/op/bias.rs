//! Bias (`docs/numerics.md`, "Bias"). Both ops take the width from the length of the bias.
//!
//! Forward, in place: `y[t, n] = y[t, n] + bias[n]`. Backward: `dbias[n]` accumulates the sum over
//! tokens of `dy[t, n]`: inside each block of [`super::TOKEN_BLOCK`] tokens (blocks restart at row
//! starts) a chain of additions from +0 in ascending `t`; the block's sum is then added to
//! `dbias[n]`, blocks in order. The gradient of `y` passes through.

use crate::backend::{F32, Length, Memory, Workspaces};
use crate::op::{Op, Output, end, lengths};

/// `y += bias` for every token.
pub struct BiasForward<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub bias: &'a F32<M>,
}

impl<M: Memory> Op<M> for BiasForward<'_, M> {
    const NAME: &'static str = "bias_forward";

    fn check(&self) {
        let width = self.bias.len();
        assert!(
            if width == 0 { self.y.len() == 0 } else { self.y.len().is_multiple_of(width) },
            "{}: whole tokens",
            Self::NAME
        );
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}

/// `dbias += Σ dy` over tokens.
pub struct BiasBackward<'a, M: Memory> {
    pub dbias: &'a mut F32<M>,
    pub dy: &'a F32<M>,
    pub row_starts: &'a [usize],
}

impl<M: Memory> Op<M> for BiasBackward<'_, M> {
    const NAME: &'static str = "bias_backward";

    fn check(&self) {
        lengths(Self::NAME, &[("dy", self.dy.len(), end(self.row_starts) * self.dbias.len())]);
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.token_sums(self.row_starts, self.dbias.len())
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dbias)]
    }
}
