//! Gated RMS norm (`docs/numerics.md`, "Gated norm") after the gated delta rule. Here a "token" is
//! one head of a token; heads share the weight, and rows of data count heads as well (row starts
//! times the number of heads).
//!
//! Forward: `inv = 1 / sqrt(S / f32(width) + eps)`, `S` the lane sum of `fma(h, h, ·)`;
//! `y = (weight·(h·inv))·silu(z)`. `inv` is kept.
//!
//! Backward: `n = h·inv`, `d = dy·silu(z)`, `g = d·weight`,
//! `c = (lane sum of fma(g, n, ·)) / f32(width)`; `dh = fma(−n, c, g)·inv`;
//! `dz = (dy·(weight·n))·silu_grad(z)`; `dweight` accumulates the sum over tokens (heads) of `d·n`,
//! the product rounded, then added.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, norm_lengths, norm_weight_gradient};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedNorm {
    /// Heads of all tokens.
    pub tokens: usize,
    pub width: usize,
    pub eps: f32,
}

/// `y = (weight·(h·inverse))·silu(z)`.
pub struct GatedNormForward<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    /// One per token, for the backward pass.
    pub inverse: &'a mut F32<M>,
    pub h: &'a F32<M>,
    pub z: &'a F32<M>,
    pub weight: &'a F32<M>,
    pub p: GatedNorm,
}

impl<M: Memory> Op<M> for GatedNormForward<'_, M> {
    const NAME: &'static str = "gated_norm_forward";

    fn check(&self) {
        let shape = (self.p.tokens, self.p.width);
        let whole = [("y", self.y.len()), ("h", self.h.len()), ("z", self.z.len())];
        norm_lengths(Self::NAME, shape, &whole, self.inverse.len(), self.weight.len());
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y), Output::Kept(self.inverse)]
    }
}

/// `dh`, `dz`, and `dweight` if requested.
pub struct GatedNormBackward<'a, M: Memory> {
    pub dh: &'a mut F32<M>,
    pub dz: &'a mut F32<M>,
    pub dweight: Option<&'a mut F32<M>>,
    pub dy: &'a F32<M>,
    pub h: &'a F32<M>,
    pub z: &'a F32<M>,
    pub inverse: &'a F32<M>,
    pub weight: &'a F32<M>,
    pub p: GatedNorm,
    /// In heads, like `p.tokens`.
    pub row_starts: &'a [usize],
}

impl<M: Memory> Op<M> for GatedNormBackward<'_, M> {
    const NAME: &'static str = "gated_norm_backward";

    fn check(&self) {
        let shape = (self.p.tokens, self.p.width);
        let whole = [
            ("dh", self.dh.len()),
            ("dz", self.dz.len()),
            ("dy", self.dy.len()),
            ("h", self.h.len()),
            ("z", self.z.len()),
        ];
        norm_lengths(Self::NAME, shape, &whole, self.inverse.len(), self.weight.len());
        let dweight = self.dweight.as_ref().map(|dweight| dweight.len());
        norm_weight_gradient(Self::NAME, shape, dweight, self.row_starts);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        let mut outputs = vec![Output::F32(self.dh), Output::F32(self.dz)];
        outputs.extend(self.dweight.as_deref_mut().map(Output::F32));
        outputs
    }
}
