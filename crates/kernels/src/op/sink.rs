//! Attention sinks (`docs/numerics.md`, "Attention sinks"): one learned logit per head joins the
//! denominator of the softmax, and nothing is added to its numerator.
//!
//! Forward, in place on the results of attention, with `s = sink·f32(log2 e)`,
//! `x = (lse − s)·f32(ln 2)`: `o = o·sigmoid(x)`, `lse = lse + softplus(−x)·f32(log2 e)`. The
//! backward pass of attention takes these `o` and `lse`, and its gradients are those with the sink.
//!
//! Backward, the sink's own gradient, one term per token and head: `term = (−p)·D` with
//! `p = exp2(s − lse)` and `D` the lane sum over the width of `fma(dO, o, ·)`. The gradient is the
//! sum of the terms over tokens, as that of a bias ([`crate::op::BiasBackward`]).

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, lengths};

/// Takes `o[t, heads, width]` and `lse[t, heads]` of attention without sinks to those with them.
pub struct SinkForward<'a, M: Memory> {
    pub o: &'a mut F32<M>,
    /// Base 2.
    pub lse: &'a mut F32<M>,
    /// `[heads]`, base e.
    pub sink: &'a F32<M>,
}

/// Elements of a head: all of `o` over all of `lse`.
pub(crate) fn head_width(o: usize, lse: usize) -> usize {
    o.checked_div(lse).unwrap_or(0)
}

fn check(op: &'static str, o: usize, lse: usize, sink: usize) {
    assert!(sink > 0 && lse.is_multiple_of(sink), "{op}: {lse} logarithms of whole tokens with {sink} heads");
    lengths(op, &[("o", o, head_width(o, lse) * lse)]);
}

impl<M: Memory> Op<M> for SinkForward<'_, M> {
    const NAME: &'static str = "sink_forward";

    fn check(&self) {
        check(Self::NAME, self.o.len(), self.lse.len(), self.sink.len());
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.o), Output::Kept(self.lse)]
    }
}

/// What each token adds to the gradient of each head's sink.
pub struct SinkBackward<'a, M: Memory> {
    /// `[t, heads]`
    pub terms: &'a mut F32<M>,
    pub d_o: &'a F32<M>,
    /// With sinks, as `lse`.
    pub o: &'a F32<M>,
    pub lse: &'a F32<M>,
    pub sink: &'a F32<M>,
}

impl<M: Memory> Op<M> for SinkBackward<'_, M> {
    const NAME: &'static str = "sink_backward";

    fn check(&self) {
        check(Self::NAME, self.o.len(), self.lse.len(), self.sink.len());
        let (d_o, terms) = (self.d_o.len(), self.terms.len());
        lengths(Self::NAME, &[("d_o", d_o, self.o.len()), ("terms", terms, self.lse.len())]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.terms)]
    }
}
