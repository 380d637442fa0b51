//! Rotation, gated activation and residual addition.

use crate::arena::Lease;
use crate::op::Node;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::{Add, Rope, RopeBackward, RopeForward, SwigluBackward, SwigluForward};
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

pub(crate) struct SavedRope<'a, B: Backend> {
    rotation: Rotation<'a, B>,
    shape: Rope,
    input: usize,
    output: usize,
}

pub(crate) struct SavedSwiglu<B: Backend> {
    gate: Variable<B>,
    up: Variable<B>,
    output: usize,
}

pub(crate) struct SavedAdd {
    a: Option<usize>,
    b: Option<usize>,
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
            self.record("rope", &[], || Node::Rope(SavedRope { rotation, shape, input, output }));
        }
        y
    }

    /// `silu(gate)·up`.
    pub fn swiglu(&mut self, gate: Variable<B>, up: Variable<B>) -> Variable<B> {
        let mut data = self.take(gate.data.length());
        self.backend.run(SwigluForward { h: data.buffer_mut(), gate: gate.buffer(), up: up.buffer() });
        let y = self.variable(Rc::new(data), gate.width, gate.needs_gradient || up.needs_gradient);
        if y.needs_gradient {
            let (output, lengths) = (y.id, [gate.data.length(), up.data.length()]);
            self.record("swiglu", &lengths, || Node::Swiglu(SavedSwiglu { gate, up, output }));
        }
        y
    }

    /// `a + b`.
    pub fn add(&mut self, a: &Variable<B>, b: &Variable<B>) -> Variable<B> {
        self.add_where(a, b, true)
    }

    /// Computes the sum only if `wanted`; its gradient always flows.
    pub(crate) fn add_where(&mut self, a: &Variable<B>, b: &Variable<B>, wanted: bool) -> Variable<B> {
        let mut data = self.take(a.data.length());
        if wanted {
            self.backend.run(Add { y: data.buffer_mut(), a: a.buffer(), b: b.buffer() });
        }
        let y = self.variable(Rc::new(data), a.width, a.needs_gradient || b.needs_gradient);
        if y.needs_gradient {
            let of = |x: &Variable<B>| x.needs_gradient.then_some(x.id);
            let saved = SavedAdd { a: of(a), b: of(b), output: y.id };
            self.record("add", &[], || Node::Add(saved));
        }
        y
    }
}

impl<B: Backend> SavedRope<'_, B> {
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

impl<B: Backend> SavedSwiglu<B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>]) {
        let Some(gradient) = values[self.output].take() else { return };
        let [mut gate, mut up]: [Lease<B>; 2] = [(); 2].map(|()| tape.take(gradient.length()));
        tape.backend.run(SwigluBackward {
            dgate: gate.buffer_mut(),
            dup: up.buffer_mut(),
            dh: gradient.buffer(),
            gate: self.gate.buffer(),
            up: self.up.buffer(),
        });
        drop(gradient);
        for (variable, gradient) in [(&self.gate, gate), (&self.up, up)] {
            if variable.needs_gradient {
                tape.contribute(values, variable.id, Rc::new(gradient));
            }
        }
    }

    pub(crate) fn tensors(&self) -> Vec<&Lease<B>> {
        vec![&self.gate.data, &self.up.data]
    }
}

impl SavedAdd {
    pub(crate) fn backward<B: Backend>(self, tape: &Tape<B>, values: &mut [Gradient<B>]) {
        let Some(gradient) = values[self.output].take() else { return };
        for id in [self.b, self.a].into_iter().flatten() {
            tape.contribute(values, id, Rc::clone(&gradient));
        }
    }
}
