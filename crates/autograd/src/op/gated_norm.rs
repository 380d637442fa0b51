//! RMS norm of every head, gated: `weight·norm(h)·silu(z)`.

use crate::arena::Lease;
use crate::gradients::Gradients;
use crate::op::Node;
use crate::op::rms_norm::Norm;
use crate::parameters::Vector;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::{GatedNorm, GatedNormBackward, GatedNormForward};
use std::rc::Rc;

pub(crate) struct Saved<'a, B: Backend> {
    h: Variable<B>,
    z: Variable<B>,
    inverse: Rc<Lease<B>>,
    weight: &'a Vector<B>,
    shape: GatedNorm,
    output: usize,
}

impl<'a, B: Backend> Tape<'a, B> {
    /// The norm's weight covers one head; zero-centred weights are not supported here.
    pub fn gated_norm(&mut self, h: Variable<B>, z: Variable<B>, norm: &'a Norm<B>) -> Variable<B> {
        let &Norm { ref weight, width, eps, zero_centred } = norm;
        assert!(!zero_centred, "the weight of a gated norm is plain");
        let shape = GatedNorm { tokens: self.layout.tokens * (h.width / width), width, eps };
        let (mut y, mut inverse) = (self.take(h.data.length()), self.take(shape.tokens));
        self.backend.run(GatedNormForward {
            y: y.buffer_mut(),
            inverse: inverse.buffer_mut(),
            h: h.buffer(),
            z: z.buffer(),
            weight: weight.value(self.parameters),
            p: shape,
        });
        let needs_gradient = h.needs_gradient || z.needs_gradient || weight.id().is_some();
        let y = self.variable(Rc::new(y), h.width, needs_gradient);
        if needs_gradient {
            let lengths = [h.data.length(), z.data.length(), shape.tokens];
            let (inverse, output) = (Rc::new(inverse), y.id);
            self.keep_aside(&inverse);
            self.record("gated_norm", &lengths, || Node::GatedNorm(Saved { h, z, inverse, weight, shape, output }));
        }
        y
    }
}

impl<B: Backend> Saved<'_, B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>], gradients: &mut Gradients<B>) {
        let Some(gradient) = values[self.output].take() else { return };
        let [mut dh, mut dz] = [(); 2].map(|()| tape.take(gradient.length()));
        let heads = self.h.width / self.shape.width;
        let row_starts: Vec<usize> = tape.layout.row_starts.iter().map(|start| start * heads).collect();
        tape.backend.run(GatedNormBackward {
            dh: dh.buffer_mut(),
            dz: dz.buffer_mut(),
            dweight: self.weight.id().map(|id| gradients.reach(tape.backend, id)),
            dy: gradient.buffer(),
            h: self.h.buffer(),
            z: self.z.buffer(),
            inverse: self.inverse.buffer(),
            weight: self.weight.value(tape.parameters),
            p: self.shape,
            row_starts: &row_starts,
        });
        drop(gradient);
        for (variable, gradient) in [(&self.h, dh), (&self.z, dz)] {
            if variable.needs_gradient {
                tape.contribute(values, variable.id, Rc::new(gradient));
            }
        }
    }

    pub(crate) fn tensors(&self) -> Vec<&Lease<B>> {
        vec![&self.h.data, &self.z.data, &self.inverse]
    }

    /// The same, to be replaced.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        vec![&mut self.h.data, &mut self.z.data, &mut self.inverse]
    }
}
