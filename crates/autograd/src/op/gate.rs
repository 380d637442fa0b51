//! Sigmoid gates on an attention's output, one per element.

use crate::arena::Lease;
use crate::op::Node;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::{Gate, GateBackward, GateForward};
use std::rc::Rc;

pub(crate) struct Saved<B: Backend> {
    x: Variable<B>,
    gate: Variable<B>,
    shape: Gate,
    output: usize,
}

impl<B: Backend> Tape<'_, B> {
    /// `x·sigmoid(gate)`.
    pub fn gate(&mut self, x: Variable<B>, gate: Variable<B>) -> Variable<B> {
        assert_eq!(gate.width, x.width, "a gate per element");
        let shape = Gate { tokens: self.layout.tokens, width: x.width, per_token: false };
        let mut data = self.take(x.data.length());
        self.backend.run(GateForward { y: data.buffer_mut(), x: x.buffer(), g: gate.buffer(), p: shape });
        let y = self.variable(Rc::new(data), x.width, x.needs_gradient || gate.needs_gradient);
        if y.needs_gradient {
            let (output, lengths) = (y.id, [x.data.length(), gate.data.length()]);
            self.record("gate", &lengths, || Node::Gate(Saved { x, gate, shape, output }));
        }
        y
    }
}

impl<B: Backend> Saved<B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>]) {
        let Some(gradient) = values[self.output].take() else { return };
        let [mut dx, mut dgate] = [&self.x, &self.gate].map(|x| tape.take(x.data.length()));
        tape.backend.run(GateBackward {
            dx: dx.buffer_mut(),
            dg: dgate.buffer_mut(),
            dy: gradient.buffer(),
            x: self.x.buffer(),
            g: self.gate.buffer(),
            p: self.shape,
        });
        drop(gradient);
        for (variable, gradient) in [(&self.x, dx), (&self.gate, dgate)] {
            if variable.needs_gradient {
                tape.contribute(values, variable.id, Rc::new(gradient));
            }
        }
    }

    pub(crate) fn tensors(&self) -> Vec<&Lease<B>> {
        vec![&self.x.data, &self.gate.data]
    }

    /// The same, to be replaced.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        vec![&mut self.x.data, &mut self.gate.data]
    }
}
