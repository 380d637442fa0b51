//! The gated delta rule inside documents. The selective policy keeps its output.

use crate::arena::Lease;
use crate::op::Node;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::{DeltaRule, DeltaRuleBackward, DeltaRuleForward};
use isobit_kernels::tensor::F32;
use std::rc::Rc;

/// Heads and widths of a layer's delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_width: usize,
    pub value_width: usize,
}

impl DeltaShape {
    fn over(self, row_starts: &[usize]) -> DeltaRule<'_> {
        let Self { key_heads, value_heads, key_width, value_width } = self;
        DeltaRule { row_starts, key_heads, value_heads, key_width, value_width }
    }

    /// Elements of the state of one document.
    pub fn state(self) -> usize {
        self.value_heads * self.key_width * self.value_width
    }

    /// Elements per token of `q`, `k`, `v`, the decay and the write strength.
    pub fn widths(self) -> [usize; 5] {
        let keys = self.key_heads * self.key_width;
        [keys, keys, self.value_heads * self.value_width, self.value_heads, self.value_heads]
    }
}

pub(crate) struct Saved<B: Backend> {
    inputs: [Variable<B>; 5],
    shape: DeltaShape,
    output: usize,
}

impl<B: Backend> Tape<'_, B> {
    /// `inputs` are `q`, `k`, `v`, the logarithm of the decay and the write strength. The state is
    /// zero at the start of a document.
    pub fn delta_rule(&mut self, inputs: [Variable<B>; 5], shape: DeltaShape) -> Variable<B> {
        let width = shape.value_heads * shape.value_width;
        let [o] = self.kept_or(inputs.each_ref(), |tape| {
            let starts = tape.layout.document_starts();
            let mut o = tape.take(tape.layout.tokens * width);
            tape.delta_rule_into(&mut o, None, inputs.each_ref().map(Variable::buffer), None, shape, &starts);
            [Rc::new(o)]
        });
        let needs_gradient = inputs.iter().any(|x| x.needs_gradient);
        let y = self.variable(o, width, needs_gradient);
        if needs_gradient {
            let (output, lengths) = (y.id, inputs.each_ref().map(|x| x.data.length()));
            self.record("delta_rule", &lengths, || Node::DeltaRule(Saved { inputs, shape, output }));
        }
        y
    }

    /// The output of `tokens` tokens of one document, and the state after them. They begin at a
    /// chunk boundary, with the given state, or with none at the document's start. For generation:
    /// takes buffers instead of values and records nothing.
    pub fn delta_rule_from(
        &self,
        inputs: [&F32<B>; 5],
        tokens: usize,
        state: Option<&F32<B>>,
        shape: DeltaShape,
    ) -> [F32<B>; 2] {
        let mut o = self.backend.zeros(tokens * shape.value_heads * shape.value_width);
        let mut after = self.backend.zeros(shape.state());
        self.delta_rule_into(&mut o, Some(&mut after), inputs, state, shape, &[0, tokens]);
        [o, after]
    }

    fn delta_rule_into(
        &self,
        o: &mut F32<B>,
        after: Option<&mut F32<B>>,
        [q, k, v, g, beta]: [&F32<B>; 5],
        state: Option<&F32<B>>,
        shape: DeltaShape,
        starts: &[usize],
    ) {
        let p = shape.over(starts);
        self.backend.run(DeltaRuleForward { o, final_state: after, q, k, v, g, beta, initial_state: state, p });
    }
}

impl<B: Backend> Saved<B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>]) {
        let Some(gradient) = values[self.output].take() else { return };
        let mut gradients: [Lease<B>; 5] = self.inputs.each_ref().map(|x| tape.take(x.data.length()));
        let starts = tape.layout.document_starts();
        let p = self.shape.over(&starts);
        let [dq, dk, dv, dg, dbeta] = gradients.each_mut().map(Lease::buffer_mut);
        let [q, k, v, g, beta] = self.inputs.each_ref().map(Variable::buffer);
        let d_o = gradient.buffer();
        tape.backend.run(DeltaRuleBackward { dq, dk, dv, dg, dbeta, d_o, q, k, v, g, beta, p });
        drop(gradient);
        for (variable, gradient) in self.inputs.iter().zip(gradients) {
            if variable.needs_gradient {
                tape.contribute(values, variable.id, Rc::new(gradient));
            }
        }
    }

    pub(crate) fn tensors(&self) -> Vec<&Lease<B>> {
        self.inputs.iter().map(|input| &*input.data).collect()
    }

    /// The same, to be replaced.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        self.inputs.iter_mut().map(|input| &mut input.data).collect()
    }
}
