//! Causal attention within documents, with or without sinks. The selective policy keeps its
//! results, which are those with the sinks: the backward pass of attention takes them as they are.

use crate::arena::Lease;
use crate::gradients::Gradients;
use crate::op::Node;
use crate::parameters::Vector;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::{
    Attention, AttentionBackward, AttentionForward, BiasBackward, SinkBackward, SinkForward, Span,
};
use isobit_kernels::tensor::F32;
use isobit_numerics::slices::Profile;
use std::rc::Rc;

/// Heads and widths of a layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub key_width: usize,
    pub value_width: usize,
    pub scale: f32,
    pub window: Option<usize>,
    /// Scores stay between plus and minus this.
    pub cap: Option<f32>,
}

impl AttentionShape {
    pub fn over(self, spans: &[Span], profile: Profile) -> Attention<'_> {
        let Self { heads, kv_heads, key_width, value_width, scale, window, cap } = self;
        Attention { spans, heads, kv_heads, key_width, value_width, softmax_scale: scale, window, cap, profile }
    }
}

pub(crate) struct Saved<'a, B: Backend> {
    q: Variable<B>,
    k: Variable<B>,
    v: Variable<B>,
    o: Rc<Lease<B>>,
    lse: Rc<Lease<B>>,
    shape: AttentionShape,
    sinks: Option<&'a Vector<B>>,
    output: usize,
}

impl<'a, B: Backend> Tape<'a, B> {
    /// `sinks` is a logit per head that joins the denominators.
    pub fn attention(
        &mut self,
        q: Variable<B>,
        k: Variable<B>,
        v: Variable<B>,
        shape: AttentionShape,
        sinks: Option<&'a Vector<B>>,
    ) -> Variable<B> {
        let width = shape.heads * shape.value_width;
        let results = |tape: &Self| tape.attention_results(&q.data, &k.data, &v.data, shape, sinks);
        let [o, lse] = self.kept_or([&q, &k, &v], results);
        let trains_sinks = sinks.is_some_and(|sinks| sinks.id().is_some());
        let needs_gradient = q.needs_gradient || k.needs_gradient || v.needs_gradient || trains_sinks;
        let y = self.variable(Rc::clone(&o), width, needs_gradient);
        if needs_gradient {
            let lengths = [&q.data, &k.data, &v.data, &o, &lse].map(|data| data.length());
            let output = y.id;
            // The gradients read all of `o`, what follows perhaps its slices alone.
            self.keep_aside(&o);
            self.keep_aside(&lse);
            self.record("attention", &lengths, || Node::Attention(Saved { q, k, v, o, lse, shape, sinks, output }));
        }
        y
    }

    /// Attention of the tape's tokens, the last ones of one document, over the keys and values of
    /// the whole document. Nothing is recorded.
    pub fn attention_over(
        &mut self,
        q: &Variable<B>,
        k: &F32<B>,
        v: &F32<B>,
        shape: AttentionShape,
        sinks: Option<&Vector<B>>,
    ) -> Variable<B> {
        let [o, _] = self.attention_results(&q.data, k, v, shape, sinks);
        self.variable(o, shape.heads * shape.value_width, false)
    }

    /// The output and the logarithms of the softmax denominators.
    fn attention_results(
        &self,
        q: &F32<B>,
        k: &F32<B>,
        v: &F32<B>,
        shape: AttentionShape,
        sinks: Option<&Vector<B>>,
    ) -> [Rc<Lease<B>>; 2] {
        let tokens = self.layout.tokens;
        let p = shape.over(&self.layout.spans, self.profile);
        let [mut o, mut lse] = [shape.heads * shape.value_width, shape.heads].map(|width| self.take(tokens * width));
        self.backend.run(AttentionForward { o: o.buffer_mut(), lse: lse.buffer_mut(), q, k, v, p });
        if let Some(sinks) = sinks {
            let sink = sinks.value(self.parameters);
            self.backend.run(SinkForward { o: o.buffer_mut(), lse: lse.buffer_mut(), sink });
        }
        [Rc::new(o), Rc::new(lse)]
    }
}

impl<B: Backend> Saved<'_, B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>], gradients: &mut Gradients<B>) {
        let Some(gradient) = values[self.output].take() else { return };
        self.sink_gradient(tape, &gradient, gradients);
        let inputs = [&self.q, &self.k, &self.v];
        let [mut dq, mut dk, mut dv] = inputs.map(|x| tape.take(x.data.length()));
        let p = self.shape.over(&tape.layout.spans, tape.profile);
        tape.backend.run(AttentionBackward {
            dq: dq.buffer_mut(),
            dk: dk.buffer_mut(),
            dv: dv.buffer_mut(),
            d_o: gradient.buffer(),
            q: self.q.buffer(),
            k: self.k.buffer(),
            v: self.v.buffer(),
            o: self.o.buffer(),
            lse: self.lse.buffer(),
            p,
        });
        for (variable, gradient) in inputs.into_iter().zip([dq, dk, dv]) {
            if variable.needs_gradient {
                tape.contribute(values, variable.id, Rc::new(gradient));
            }
        }
    }

    /// Adds to the gradient of sinks that are trained.
    fn sink_gradient(&self, tape: &Tape<B>, d_o: &Lease<B>, gradients: &mut Gradients<B>) {
        let Some((sinks, id)) = self.sinks.and_then(|sinks| Some((sinks, sinks.id()?))) else { return };
        let mut terms = tape.take(self.lse.length());
        tape.backend.run(SinkBackward {
            terms: terms.buffer_mut(),
            d_o: d_o.buffer(),
            o: self.o.buffer(),
            lse: self.lse.buffer(),
            sink: sinks.value(tape.parameters),
        });
        let dbias = gradients.reach(tape.backend, id);
        tape.backend.run(BiasBackward { dbias, dy: terms.buffer(), row_starts: &tape.layout.row_starts });
    }

    pub(crate) fn tensors(&self) -> Vec<&Lease<B>> {
        vec![&self.q.data, &self.k.data, &self.v.data, &self.o, &self.lse]
    }

    /// The same, to be replaced.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        vec![&mut self.q.data, &mut self.k.data, &mut self.v.data, &mut self.o, &mut self.lse]
    }
}
