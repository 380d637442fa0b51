//! The gated MLP of a dense layer: `down(activation(gate)·up)`, gate and up from two modules or
//! from one.

use crate::config::Activation;
use crate::layer::BranchEnd;
use isobit_autograd::{Linear, Move, Tape, Variable};
use isobit_kernels::Backend;

pub(crate) struct Dense<B: Backend> {
    pub(crate) gate_up: GateUp<B>,
    pub(crate) activation: Activation,
    pub(crate) down: Linear<B>,
}

pub(crate) enum GateUp<B: Backend> {
    Separate {
        gate: Linear<B>,
        up: Linear<B>,
    },
    /// Gate rows, then up rows.
    Joined(Linear<B>),
}

impl<B: Backend> Dense<B> {
    /// Adds the MLP of `x` to the residual stream: the end of a block.
    pub(crate) fn finish<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        residual: &Variable<B>,
        x: Variable<B>,
        end: &'a BranchEnd<B>,
    ) -> Variable<B> {
        let [gate, up] = match &self.gate_up {
            GateUp::Separate { gate, up } => tape.linears_of(&x, [gate, up]),
            GateUp::Joined(both) => {
                let width = both.outputs / 2;
                let both = tape.linear(&x, both);
                tape.rearrange(&[&both], [width; 2], &[Move::cut(0, width, 0), Move::cut(width, width, 1)])
            }
        };
        drop(x);
        let active = match self.activation {
            Activation::Silu => tape.swiglu(gate, up),
            Activation::GeluTanh => tape.geglu(gate, up),
        };
        match (&end.norm, end.factor) {
            (None, None) => tape.finish(residual, &active, &self.down),
            (None, Some(factor)) => tape.finish_scaled(residual, &active, &self.down, factor),
            (Some(norm), factor) => tape.finish_normalised(residual, &active, &self.down, norm, factor),
        }
    }
}
