//! GeGLU (`docs/numerics.md`, "GeGLU"): the gated activation of MLPs that use GELU. Gate and up are
//! saved; the backward pass computes `gelu` again.

use crate::arena::Lease;
use crate::op::Node;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::{GegluBackward, GegluForward};
use std::rc::Rc;

pub(crate) struct Saved<B: Backend> {
    gate: Variable<B>,
    up: Variable<B>,
    output: usize,
}

impl<B: Backend> Tape<'_, B> {
    /// `gelu(gate)·up`.
    pub fn geglu(&mut self, gate: Variable<B>, up: Variable<B>) -> Variable<B> {
        let mut data = self.take(gate.data.length());
        self.backend.run(GegluForward { h: data.buffer_mut(), gate: gate.buffer(), up: up.buffer() });
        let y = self.variable(Rc::new(data), gate.width, gate.needs_gradient || up.needs_gradient);
        if y.needs_gradient {
            let (output, lengths) = (y.id, [gate.data.length(), up.data.length()]);
            self.record("geglu", &lengths, || Node::Geglu(Saved { gate, up, output }));
        }
        y
    }
}

impl<B: Backend> Saved<B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>]) {
        let Some(gradient) = values[self.output].take() else { return };
        let [mut gate, mut up]: [Lease<B>; 2] = [(); 2].map(|()| tape.take(gradient.length()));
        tape.backend.run(GegluBackward {
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

    /// The same, to be replaced.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        vec![&mut self.gate.data, &mut self.up.data]
    }
}
