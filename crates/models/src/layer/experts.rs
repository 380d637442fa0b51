//! The MLP of a mixture of experts: a router sends every token to some experts, and a shared
//! expert, if any, processes all tokens.

use isobit_autograd::{Experts, Linear, Router, SharedBranch, Tape, TapeError, Variable};
use isobit_kernels::Backend;

pub(crate) struct SparseMlp<B: Backend> {
    pub(crate) router: Router<B>,
    pub(crate) experts: Experts<B>,
    pub(crate) shared: Option<SharedExpert<B>>,
}

/// The MLP that every token goes through.
pub(crate) struct SharedExpert<B: Backend> {
    pub(crate) gate: Linear<B>,
    pub(crate) up: Linear<B>,
    pub(crate) down: Linear<B>,
    /// One number per token, whose sigmoid multiplies the expert's output.
    pub(crate) switch: Option<Linear<B>>,
}

impl<B: Backend> SparseMlp<B> {
    /// Adds the experts of `x` to the residual stream: the end of a block.
    pub(crate) fn finish<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        residual: &Variable<B>,
        x: Variable<B>,
    ) -> Result<Variable<B>, TapeError> {
        let routes = tape.route(&x, &self.router);
        let active = tape.experts_up(&x, &routes, &self.experts)?;
        let shared = self.shared.as_ref().map(|shared| shared.branch(tape, &x));
        drop(x);
        tape.finish_experts(residual, &active, &routes, &self.experts, shared)
    }
}

impl<B: Backend> SharedExpert<B> {
    fn branch<'a>(&'a self, tape: &mut Tape<'a, B>, x: &Variable<B>) -> SharedBranch<'a, B> {
        let layers: Vec<&Linear<B>> = [&self.gate, &self.up].into_iter().chain(&self.switch).collect();
        let mut outputs = tape.linears(x, &layers).into_iter();
        let mut next = || outputs.next().expect("an output for every layer");
        let (gate, up) = (next(), next());
        let active = tape.swiglu(gate, up);
        SharedBranch { active, down: &self.down, gate: outputs.next() }
    }
}
