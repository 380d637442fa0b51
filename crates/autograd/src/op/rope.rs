//! Rotary embedding (`docs/numerics.md`, "Rotary embedding"): heads rotated in place by the
//! positions of their tokens.

use crate::op::Node;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::{Rope, RopeBackward, RopeForward};
use isobit_kernels::tensor::F32;
use std::rc::Rc;

/// Cosines and sines by position.
pub struct Rotation<'a, B: Backend> {
    pub cos: &'a F32<B>,
    pub sin: &'a F32<B>,
    /// Rotated channels per head.
    pub width: usize,
}

impl<B: Backend> Clone for Rotation<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Backend> Copy for Rotation<'_, B> {}

/// Which channels of a head are rotated: `rotation.width` of them, starting at `offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotatedHead {
    pub width: usize,
    pub offset: usize,
    /// Pairs are adjacent channels.
    pub interleaved: bool,
}

impl RotatedHead {
    /// The first channels, with pairs half of them apart.
    pub fn first(width: usize) -> Self {
        Self { width, offset: 0, interleaved: false }
    }
}

pub(crate) struct Saved<'a, B: Backend> {
    rotation: Rotation<'a, B>,
    shape: Rope,
    input: usize,
    output: usize,
}

impl<'a, B: Backend> Tape<'a, B> {
    /// Rotates the heads of a value by its tokens' positions. Consumes the value.
    pub fn rope(&mut self, x: Variable<B>, head: RotatedHead, rotation: Rotation<'a, B>) -> Variable<B> {
        let shape = Rope {
            tokens: self.layout.tokens,
            heads: x.width / head.width,
            head_width: head.width,
            rotary_width: rotation.width,
            offset: head.offset,
            interleaved: head.interleaved,
        };
        let (input, width, needs_gradient) = (x.id, x.width, x.needs_gradient);
        let mut data = self.owned(x.data);
        self.backend.run(RopeForward {
            x: data.buffer_mut(),
            cos: rotation.cos,
            sin: rotation.sin,
            positions: &self.layout.positions,
            p: shape,
        });
        let y = self.variable(Rc::new(data), width, needs_gradient);
        if needs_gradient {
            let output = y.id;
            self.record("rope", &[], || Node::Rope(Saved { rotation, shape, input, output }));
        }
        y
    }
}

impl<B: Backend> Saved<'_, B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>]) {
        let Some(gradient) = values[self.output].take() else { return };
        let mut gradient = tape.owned(gradient);
        let (cos, sin) = (self.rotation.cos, self.rotation.sin);
        tape.backend.run(RopeBackward {
            dx: gradient.buffer_mut(),
            cos,
            sin,
            positions: &tape.layout.positions,
            p: self.shape,
        });
        tape.contribute(values, self.input, Rc::new(gradient));
    }
}
