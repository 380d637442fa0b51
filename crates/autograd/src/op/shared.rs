//! The end of a layer of experts: routed branch, shared branch and residual stream.
//!
//! Every token goes through the shared expert in addition to its chosen experts; some models
//! multiply its output by the sigmoid of one number per token ("Gates").

use crate::TapeError;
use crate::arena::Lease;
use crate::op::Node;
use crate::op::experts::Experts;
use crate::op::linear::Linear;
use crate::op::router::Routes;
use crate::recompute::Policy;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::{Gate, GateBackward, GateForward};
use std::rc::Rc;

/// A shared expert, before its last product.
pub struct SharedBranch<'a, B: Backend> {
    pub active: Variable<B>,
    pub down: &'a Linear<B>,
    /// One number per token, before the sigmoid.
    pub gate: Option<Variable<B>>,
}

pub(crate) struct SavedGate<B: Backend> {
    x: Variable<B>,
    gate: Variable<B>,
    shape: Gate,
    output: usize,
}

impl<'a, B: Backend> Tape<'a, B> {
    /// `residual + (experts + shared)`, the end of a block. A recomputation skips the sums and what
    /// only they need. The ends are the inputs of the last products and what their gradients use:
    /// the experts' activations, weights and output rows, and a shared expert's activations, its
    /// gate and what the gate multiplies.
    pub fn finish_experts(
        &mut self,
        residual: &Variable<B>,
        active: &Variable<B>,
        routes: &Routes<B>,
        experts: &'a Experts<B>,
        shared: Option<SharedBranch<'a, B>>,
    ) -> Result<Variable<B>, TapeError> {
        let wanted = !self.recomputing;
        self.end(&active.data);
        self.end(&routes.weights.data);
        let mut y = self.experts_down(active, routes, experts, wanted)?;
        if let Some(SharedBranch { active, down, gate }) = shared {
            self.end(&active.data);
            let mut part = self.linear_where(&active, down, wanted || gate.is_some());
            if let Some(gate) = gate {
                self.end(&part.data);
                self.end(&gate.data);
                part = self.token_gate(part, gate, wanted);
            }
            y = self.add_where(&y, &part, wanted);
        }
        Ok(self.add_where(residual, &y, wanted))
    }

    /// Makes a value an end of the running block, if the block will be or is being recomputed.
    pub(crate) fn end(&mut self, data: &Rc<Lease<B>>) {
        if self.recomputing || self.policy != Policy::None {
            self.ends.push(Rc::clone(data));
        }
    }

    /// Includes a value that the gradients use in the running block's digests, if the block will be
    /// or is being recomputed: nothing later derives from it, or not from all of its bits.
    pub(crate) fn keep_aside(&mut self, data: &Rc<Lease<B>>) {
        let is_new = || !self.ends.iter().chain(&self.aside).any(|known| Rc::ptr_eq(known, data));
        if (self.recomputing || self.policy != Policy::None) && is_new() {
            self.aside.push(Rc::clone(data));
        }
    }

    /// `x·sigmoid(gate)`, one gate per token.
    fn token_gate(&mut self, x: Variable<B>, gate: Variable<B>, wanted: bool) -> Variable<B> {
        let shape = Gate { tokens: self.layout.tokens, width: x.width, per_token: true };
        let mut data = self.take(x.data.length());
        if wanted {
            self.backend.run(GateForward { y: data.buffer_mut(), x: x.buffer(), g: gate.buffer(), p: shape });
        }
        let y = self.variable(Rc::new(data), x.width, x.needs_gradient || gate.needs_gradient);
        if y.needs_gradient {
            let (output, lengths) = (y.id, [x.data.length(), gate.data.length()]);
            self.record("gate", &lengths, || Node::TokenGate(SavedGate { x, gate, shape, output }));
        }
        y
    }
}

impl<B: Backend> SavedGate<B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>]) {
        let Some(gradient) = values[self.output].take() else { return };
        let [mut dx, mut dgate] = [&self.x, &self.gate].map(|variable| tape.take(variable.data.length()));
        tape.backend.run(GateBackward {
            dx: dx.buffer_mut(),
            dg: dgate.buffer_mut(),
            dy: gradient.buffer(),
            x: self.x.buffer(),
            g: self.gate.buffer(),
            p: self.shape,
        });
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
