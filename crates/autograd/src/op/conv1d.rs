//! Causal convolution within documents, one kernel per channel, then SiLU.

use crate::arena::Lease;
use crate::gradients::Gradients;
use crate::op::Node;
use crate::parameters::Vector;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::{Conv1d, Conv1dBackward, Conv1dForward};
use isobit_kernels::tensor::F32;
use std::rc::Rc;

/// A convolution with its weight, `[channels, kernel]`.
pub struct Convolution<B: Backend> {
    pub weight: Vector<B>,
    pub channels: usize,
    pub kernel: usize,
}

impl<B: Backend> Convolution<B> {
    fn over<'s>(&self, starts: &'s [usize]) -> Conv1d<'s> {
        Conv1d { channels: self.channels, kernel: self.kernel, starts }
    }
}

pub(crate) struct Saved<'a, B: Backend> {
    x: Variable<B>,
    convolution: &'a Convolution<B>,
    output: usize,
}

impl<'a, B: Backend> Tape<'a, B> {
    pub fn conv1d(&mut self, x: Variable<B>, convolution: &'a Convolution<B>) -> Variable<B> {
        let data = self.convolve(&x, convolution, None);
        let needs_gradient = x.needs_gradient || convolution.weight.id().is_some();
        let y = self.variable(data, x.width, needs_gradient);
        if needs_gradient {
            let (output, lengths) = (y.id, [x.data.length()]);
            self.record("conv1d", &lengths, || Node::Conv1d(Saved { x, convolution, output }));
        }
        y
    }

    /// The same for the last tokens of one document, given the `kernel − 1` inputs before them.
    /// Nothing is recorded.
    pub fn conv1d_after(&mut self, x: &Variable<B>, convolution: &Convolution<B>, history: &F32<B>) -> Variable<B> {
        let data = self.convolve(x, convolution, Some(history));
        self.variable(data, x.width, false)
    }

    fn convolve(&self, x: &Variable<B>, convolution: &Convolution<B>, history: Option<&F32<B>>) -> Rc<Lease<B>> {
        let starts = self.layout.document_starts();
        let mut y = self.take(x.data.length());
        let (weight, p) = (convolution.weight.value(self.parameters), convolution.over(&starts));
        self.backend.run(Conv1dForward { y: y.buffer_mut(), x: x.buffer(), weight, history, p });
        Rc::new(y)
    }
}

impl<B: Backend> Saved<'_, B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>], gradients: &mut Gradients<B>) {
        let Some(gradient) = values[self.output].take() else { return };
        let starts = tape.layout.document_starts();
        let mut dx = tape.take(self.x.data.length());
        let weight = self.convolution.weight.value(tape.parameters);
        let dweight = self.convolution.weight.id().map(|id| gradients.reach(tape.backend, id));
        tape.backend.run(Conv1dBackward {
            dx: dx.buffer_mut(),
            dweight,
            dy: gradient.buffer(),
            x: self.x.buffer(),
            weight,
            p: self.convolution.over(&starts),
            row_starts: &tape.layout.row_starts,
        });
        if self.x.needs_gradient {
            tape.contribute(values, self.x.id, Rc::new(dx));
        }
    }

    pub(crate) fn tensors(&self) -> Vec<&Lease<B>> {
        vec![&self.x.data]
    }

    /// The same, to be replaced.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        vec![&mut self.x.data]
    }
}
