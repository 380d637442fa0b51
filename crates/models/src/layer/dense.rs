//! The gated MLP of a dense layer: `down(silu(gate)·up)`.

use isobit_autograd::{Linear, Tape, Variable};
use isobit_kernels::Backend;

pub(crate) struct Dense<B: Backend> {
    pub(crate) gate: Linear<B>,
    pub(crate) up: Linear<B>,
    pub(crate) down: Linear<B>,
}

impl<B: Backend> Dense<B> {
    /// Adds the MLP of `x` to the residual stream: the end of a block.
    pub(crate) fn finish<'a>(&'a self, tape: &mut Tape<'a, B>, residual: &Variable<B>, x: Variable<B>) -> Variable<B> {
        let [gate, up] = tape.linears_of(&x, [&self.gate, &self.up]);
        drop(x);
        let active = tape.swiglu(gate, up);
        tape.finish(residual, &active, &self.down)
    }
}
