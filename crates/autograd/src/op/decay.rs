//! Decay and write strength of the gated delta rule, from two projections and two trained vectors.

use crate::arena::Lease;
use crate::gradients::Gradients;
use crate::op::Node;
use crate::parameters::Vector;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::{Decay, DecayBackward, DecayForward};
use std::rc::Rc;

/// The parameters of a layer's decay, each with one number per value head.
pub struct DecayRates<B: Backend> {
    /// Logarithm of the rate.
    pub a_log: Vector<B>,
    pub dt_bias: Vector<B>,
    pub heads: usize,
}

impl<B: Backend> DecayRates<B> {
    fn ids(&self) -> [Option<crate::parameters::ParameterId>; 2] {
        [self.a_log.id(), self.dt_bias.id()]
    }
}

pub(crate) struct Saved<'a, B: Backend> {
    a: Variable<B>,
    b: Variable<B>,
    rates: &'a DecayRates<B>,
    shape: Decay,
    outputs: [usize; 2],
}

impl<'a, B: Backend> Tape<'a, B> {
    /// Logarithm of the decay, and the write strength: `−exp(a_log)·softplus(a + dt_bias)` and
    /// `sigmoid(b)`.
    pub fn decay(&mut self, a: Variable<B>, b: Variable<B>, rates: &'a DecayRates<B>) -> [Variable<B>; 2] {
        let shape = Decay { tokens: self.layout.tokens, heads: rates.heads };
        let [mut g, mut beta] = [(); 2].map(|()| self.take(a.data.length()));
        let [a_log, dt_bias] = [&rates.a_log, &rates.dt_bias].map(|vector| vector.value(self.parameters));
        self.backend.run(DecayForward {
            g: g.buffer_mut(),
            beta: beta.buffer_mut(),
            a: a.buffer(),
            b: b.buffer(),
            a_log,
            dt_bias,
            p: shape,
        });
        let trained = rates.ids().iter().any(Option::is_some);
        let needs_gradient = a.needs_gradient || b.needs_gradient || trained;
        let outputs = [g, beta].map(|data| self.variable(Rc::new(data), rates.heads, needs_gradient));
        if needs_gradient {
            let lengths = [a.data.length(), b.data.length()];
            let saved = Saved { a, b, rates, shape, outputs: [outputs[0].id, outputs[1].id] };
            self.record("decay", &lengths, || Node::Decay(saved));
        }
        outputs
    }
}

impl<B: Backend> Saved<'_, B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>], gradients: &mut Gradients<B>) {
        let [dg, dbeta] = self.outputs.map(|output| values[output].take());
        let (Some(dg), Some(dbeta)) = (dg, dbeta) else { return };
        let [mut da, mut db] = [(); 2].map(|()| tape.take(dg.length()));
        let [a_log, dt_bias] = [&self.rates.a_log, &self.rates.dt_bias].map(|vector| vector.value(tape.parameters));
        let dparameters = match self.rates.ids() {
            [Some(a_log), Some(dt_bias)] => Some(gradients.reach_both(tape.backend, a_log, dt_bias)),
            _ => None,
        };
        tape.backend.run(DecayBackward {
            da: da.buffer_mut(),
            db: db.buffer_mut(),
            dparameters,
            dg: dg.buffer(),
            dbeta: dbeta.buffer(),
            a: self.a.buffer(),
            b: self.b.buffer(),
            a_log,
            dt_bias,
            p: self.shape,
            row_starts: &tape.layout.row_starts,
        });
        for (variable, gradient) in [(&self.a, da), (&self.b, db)] {
            if variable.needs_gradient {
                tape.contribute(values, variable.id, Rc::new(gradient));
            }
        }
    }

    pub(crate) fn tensors(&self) -> Vec<&Lease<B>> {
        vec![&self.a.data, &self.b.data]
    }

    /// The same, to be replaced.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        vec![&mut self.a.data, &mut self.b.data]
    }
}
