//! Sum of two values (`docs/numerics.md`, "Residual"). The gradient goes to both and needs no saved
//! tensor.

use crate::op::Node;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::Add;
use std::rc::Rc;

pub(crate) struct Saved {
    a: Option<usize>,
    b: Option<usize>,
    output: usize,
}

impl<B: Backend> Tape<'_, B> {
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
            let saved = Saved { a: of(a), b: of(b), output: y.id };
            self.record("add", &[], || Node::Add(saved));
        }
        y
    }
}

impl Saved {
    pub(crate) fn backward<B: Backend>(self, tape: &Tape<B>, values: &mut [Gradient<B>]) {
        let Some(gradient) = values[self.output].take() else { return };
        for id in [self.b, self.a].into_iter().flatten() {
            tape.contribute(values, id, Rc::clone(&gradient));
        }
    }
}
