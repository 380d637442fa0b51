//! A value times a number (`docs/numerics.md`, "Residual"), in place. The gradient is multiplied by
//! the same number; nothing is saved.

use crate::op::Node;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::Scale;
use std::rc::Rc;

pub(crate) struct Saved {
    factor: f32,
    input: usize,
    output: usize,
}

impl<B: Backend> Tape<'_, B> {
    /// `x·factor`. Consumes the value.
    pub fn scale(&mut self, x: Variable<B>, factor: f32) -> Variable<B> {
        self.scale_where(x, factor, true)
    }

    /// Computes the product only if `wanted`; its gradient always flows.
    pub(crate) fn scale_where(&mut self, x: Variable<B>, factor: f32, wanted: bool) -> Variable<B> {
        let (input, width, needs_gradient) = (x.id, x.width, x.needs_gradient);
        let mut data = x.data;
        if wanted {
            let mut owned = self.owned(data);
            self.backend.run(Scale { tensors: vec![owned.buffer_mut()], factor });
            data = Rc::new(owned);
        }
        let y = self.variable(data, width, needs_gradient);
        if needs_gradient {
            let saved = Saved { factor, input, output: y.id };
            self.record("scale", &[], || Node::Scale(saved));
        }
        y
    }
}

impl Saved {
    pub(crate) fn backward<B: Backend>(self, tape: &Tape<B>, values: &mut [Gradient<B>]) {
        let Some(gradient) = values[self.output].take() else { return };
        let mut gradient = tape.owned(gradient);
        tape.backend.run(Scale { tensors: vec![gradient.buffer_mut()], factor: self.factor });
        tape.contribute(values, self.input, Rc::new(gradient));
    }
}
