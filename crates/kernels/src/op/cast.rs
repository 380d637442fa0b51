//! Casts (`docs/numerics.md`, "Casts"): narrowing rounds to nearest, ties to even; widening is
//! exact.
//!
//! A NaN becomes the canonical NaN of the target format, except from float32 to float32, which
//! copies the bits.

use crate::backend::{F32, Length, Memory, StoredMatrix};
use crate::op::{Op, Output, lengths};
use half::{bf16, f16};

/// To bfloat16.
pub struct ToBf16<'a, M: Memory> {
    pub y: &'a mut M::Buffer<bf16>,
    pub x: &'a F32<M>,
}

impl<M: Memory> Op<M> for ToBf16<'_, M> {
    const NAME: &'static str = "to_bf16";

    fn check(&self) {
        lengths(Self::NAME, &[("y", self.y.len(), self.x.len())]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::Bf16(self.y)]
    }
}

/// To float16.
pub struct ToF16<'a, M: Memory> {
    pub y: &'a mut M::Buffer<f16>,
    pub x: &'a F32<M>,
}

impl<M: Memory> Op<M> for ToF16<'_, M> {
    const NAME: &'static str = "to_f16";

    fn check(&self) {
        lengths(Self::NAME, &[("y", self.y.len(), self.x.len())]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F16(self.y)]
    }
}

/// To float32.
pub struct ToF32<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub x: StoredMatrix<'a, M>,
}

impl<M: Memory> Op<M> for ToF32<'_, M> {
    const NAME: &'static str = "to_f32";

    fn check(&self) {
        lengths(Self::NAME, &[("y", self.y.len(), self.x.len())]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}
