//! RMS norm over the whole width or over each head.

use crate::arena::Lease;
use crate::gradients::Gradients;
use crate::op::Node;
use crate::parameters::Vector;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::{RmsNorm, RmsNormBackward, RmsNormForward};
use std::rc::Rc;

/// A norm with its weight.
pub struct Norm<B: Backend> {
    pub weight: Vector<B>,
    pub width: usize,
    pub eps: f32,
    /// Whether the multiplier is `1 + weight`.
    pub zero_centred: bool,
}

pub(crate) struct Saved<'a, B: Backend> {
    x: Variable<B>,
    inverse: Rc<Lease<B>>,
    weight: &'a Vector<B>,
    shape: RmsNorm,
    output: usize,
}

impl<'a, B: Backend> Tape<'a, B> {
    /// Normalises every `norm.width` channels with one weight per channel: the whole value, or one
    /// head at a time.
    pub fn rms_norm(&mut self, x: &Variable<B>, norm: &'a Norm<B>) -> Variable<B> {
        let &Norm { ref weight, width, eps, zero_centred } = norm;
        let tokens = self.layout.tokens * (x.width / width);
        let shape = RmsNorm { tokens, width, eps, zero_centred, accumulate: false };
        let (mut y, mut inverse) = (self.take(x.data.length()), self.take(tokens));
        self.backend.run(RmsNormForward {
            y: y.buffer_mut(),
            inverse: inverse.buffer_mut(),
            x: x.buffer(),
            weight: weight.value(self.parameters),
            p: shape,
        });
        let needs_gradient = x.needs_gradient || weight.id().is_some();
        let y = self.variable(Rc::new(y), x.width, needs_gradient);
        if needs_gradient {
            let (x, inverse, output) = (x.clone(), Rc::new(inverse), y.id);
            let lengths = [x.data.length(), tokens];
            self.keep_aside(&inverse);
            self.record("rms_norm", &lengths, || Node::RmsNorm(Saved { x, inverse, weight, shape, output }));
        }
        y
    }
}

impl<B: Backend> Saved<'_, B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>], gradients: &mut Gradients<B>) {
        let Some(gradient) = values[self.output].take() else { return };
        // The op accumulates onto an existing gradient.
        let before = values[self.x.id].take();
        let accumulate = before.is_some();
        let mut dx = before.map_or_else(|| tape.take(self.x.data.length()), |before| tape.owned(before));
        let groups = self.x.width / self.shape.width;
        let row_starts: Vec<usize> = tape.layout.row_starts.iter().map(|start| start * groups).collect();
        tape.backend.run(RmsNormBackward {
            dx: dx.buffer_mut(),
            dweight: self.weight.id().map(|id| gradients.reach(tape.backend, id)),
            dy: gradient.buffer(),
            x: self.x.buffer(),
            inverse: self.inverse.buffer(),
            weight: self.weight.value(tape.parameters),
            p: RmsNorm { accumulate, ..self.shape },
            row_starts: &row_starts,
        });
        if self.x.needs_gradient {
            values[self.x.id] = Some(Rc::new(dx));
        }
    }

    pub(crate) fn tensors(&self) -> Vec<&Lease<B>> {
        vec![&self.x.data, &self.inverse]
    }

    /// The same, to be replaced.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        vec![&mut self.x.data, &mut self.inverse]
    }
}
