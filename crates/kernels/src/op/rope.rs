//! Rotary embedding, in place (`docs/numerics.md`, "Rotary embedding").
//!
//! With `h = rotary_width / 2` and pairs `(a, b)` of each head, `c`, `s` from the tables at the
//! token's position: `a' = fma(a, c, −(b·s))`, `b' = fma(b, c, a·s)`. Backward is the inverse
//! rotation: `a' = fma(a, c, b·s)`, `b' = fma(b, c, −(a·s))`. Pair `i` is
//! `(x[offset + i], x[offset + i + h])`, or `(x[offset + 2i], x[offset + 2i + 1])` when
//! interleaved; results replace their arguments. Channels outside `offset .. offset + rotary_width`
//! pass through.
//!
//! Tables are `[position, h]`, made on the host in float64 (`isobit_numerics::rope`).

use crate::backend::{F32, Length, Memory, U32};
use crate::op::{Op, Output, lengths};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope {
    pub tokens: usize,
    pub heads: usize,
    pub head_width: usize,
    pub rotary_width: usize,
    /// The first rotated channel of a head.
    pub offset: usize,
    /// Pairs are adjacent channels instead of channels half the rotary width apart.
    pub interleaved: bool,
}

impl Rope {
    /// Panics on unsupported parameters.
    pub fn check(&self) {
        assert!(self.rotary_width.is_multiple_of(2), "rotated channels come in pairs");
        assert!(self.offset + self.rotary_width <= self.head_width, "rotated channels lie inside the head");
    }

    /// Channels of pair `i` inside a head.
    pub fn pair(&self, i: usize) -> (usize, usize) {
        let [step, distance] = self.steps();
        (self.offset + i * step, self.offset + i * step + distance)
    }

    /// Channel strides between pairs, and between the two elements of a pair.
    pub fn steps(&self) -> [usize; 2] {
        if self.interleaved { [2, 1] } else { [1, self.rotary_width / 2] }
    }
}

/// Rotates in place.
pub struct RopeForward<'a, M: Memory> {
    pub x: &'a mut F32<M>,
    pub cos: &'a F32<M>,
    pub sin: &'a F32<M>,
    pub positions: &'a U32<M>,
    pub p: Rope,
}

impl<M: Memory> Op<M> for RopeForward<'_, M> {
    const NAME: &'static str = "rope_forward";

    fn check(&self) {
        let p = &self.p;
        p.check();
        lengths(
            Self::NAME,
            &[
                ("x", self.x.len(), p.tokens * p.heads * p.head_width),
                ("positions", self.positions.len(), p.tokens),
                ("sin", self.sin.len(), self.cos.len()),
            ],
        );
        let pairs = p.rotary_width / 2;
        assert!(pairs == 0 || self.cos.len().is_multiple_of(pairs), "{}: tables of whole positions", Self::NAME);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.x)]
    }
}

/// The inverse rotation, in place.
pub struct RopeBackward<'a, M: Memory> {
    pub dx: &'a mut F32<M>,
    pub cos: &'a F32<M>,
    pub sin: &'a F32<M>,
    pub positions: &'a U32<M>,
    pub p: Rope,
}

impl<M: Memory> Op<M> for RopeBackward<'_, M> {
    const NAME: &'static str = "rope_backward";

    fn check(&self) {
        let p = &self.p;
        p.check();
        lengths(
            Self::NAME,
            &[
                ("dx", self.dx.len(), p.tokens * p.heads * p.head_width),
                ("positions", self.positions.len(), p.tokens),
                ("sin", self.sin.len(), self.cos.len()),
            ],
        );
        let pairs = p.rotary_width / 2;
        assert!(pairs == 0 || self.cos.len().is_multiple_of(pairs), "{}: tables of whole positions", Self::NAME);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dx)]
    }
}
