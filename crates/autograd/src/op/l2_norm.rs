//! L2 norm of every head, times a constant.

use crate::arena::Lease;
use crate::op::Node;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::{L2Norm, L2NormBackward, L2NormForward};
use std::rc::Rc;

pub(crate) struct Saved<B: Backend> {
    x: Variable<B>,
    inverse: Rc<Lease<B>>,
    shape: L2Norm,
    output: usize,
}

impl<B: Backend> Tape<'_, B> {
    /// Scales each group of `width` channels to the length `factor`.
    pub fn l2_norm(&mut self, x: Variable<B>, width: usize, eps: f32, factor: f32) -> Variable<B> {
        let tokens = self.layout.tokens * (x.width / width);
        let shape = L2Norm { tokens, width, eps, factor };
        let (mut y, mut inverse) = (self.take(x.data.length()), self.take(tokens));
        self.backend.run(L2NormForward { y: y.buffer_mut(), inverse: inverse.buffer_mut(), x: x.buffer(), p: shape });
        let y = self.variable(Rc::new(y), x.width, x.needs_gradient);
        if y.needs_gradient {
            let (inverse, output, lengths) = (Rc::new(inverse), y.id, [x.data.length(), tokens]);
            self.keep_aside(&inverse);
            self.record("l2_norm", &lengths, || Node::L2Norm(Saved { x, inverse, shape, output }));
        }
        y
    }
}

impl<B: Backend> Saved<B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>]) {
        let Some(gradient) = values[self.output].take() else { return };
        let mut dx = tape.take(self.x.data.length());
        tape.backend.run(L2NormBackward {
            dx: dx.buffer_mut(),
            dy: gradient.buffer(),
            x: self.x.buffer(),
            inverse: self.inverse.buffer(),
            p: self.shape,
        });
        tape.contribute(values, self.x.id, Rc::new(dx));
    }

    pub(crate) fn tensors(&self) -> Vec<&Lease<B>> {
        vec![&self.x.data, &self.inverse]
    }

    /// The same, to be replaced.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        vec![&mut self.x.data, &mut self.inverse]
    }
}
