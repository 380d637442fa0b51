//! LM head and cross-entropy: the last op of a tape. Its gradient starts from the token weights.

use crate::arena::{Lease, RowsLease};
use crate::gradients::Gradients;
use crate::op::Node;
use crate::parameters::{Matrix, ParameterId};
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::op::{
    Elementary, HeadLoss, HeadLossBackward, HeadLossForward, HeadLossStep, Product, ProductForward, Scale, SliceShape,
};
use isobit_kernels::tensor::{F32, I32, U32};
use isobit_kernels::{Backend, Matrix as Operand};
use isobit_numerics::elementary::{Function, SoftCap};
use std::rc::Rc;

/// What the tokens should predict.
pub struct LossTargets<B: Backend> {
    /// The next token, or `IGNORED`.
    pub labels: I32<B>,
    /// The weight of each token's loss in the step.
    pub weight: F32<B>,
}

/// Rows of the head, and what its logits are limited to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadShape {
    pub vocabulary: usize,
    /// Logits stay between plus and minus this.
    pub cap: Option<f32>,
}

impl From<usize> for HeadShape {
    fn from(vocabulary: usize) -> Self {
        Self { vocabulary, cap: None }
    }
}

/// Results per token.
pub struct HeadOutput<B: Backend> {
    pub loss: F32<B>,
    /// The most likely token.
    pub best: U32<B>,
}

pub(crate) enum Saved<'a, B: Backend> {
    /// A trained head: its gradient is computed in the backward pass.
    Trained {
        h: Variable<B>,
        rows: RowsLease<B>,
        lse: Lease<B>,
        head: &'a Matrix<B>,
        id: ParameterId,
        shape: HeadShape,
        targets: &'a LossTargets<B>,
    },
    /// A frozen head: the token weights are already known, so the forward pass computes the
    /// gradient of the hidden states too.
    Frozen { h: Variable<B>, dh: Lease<B> },
}

impl<'a, B: Backend> Tape<'a, B> {
    pub fn head_loss(
        &mut self,
        h: Variable<B>,
        head: &'a Matrix<B>,
        shape: impl Into<HeadShape>,
        targets: &'a LossTargets<B>,
    ) -> HeadOutput<B> {
        let shape = shape.into();
        let vocabulary = shape.vocabulary;
        let tokens = self.layout.tokens;
        let rows = self.slice(&h.data, h.width);
        let mut lse = self.take(tokens);
        let (mut loss, mut best) = (self.backend.zeros(tokens), self.backend.zeros(tokens));
        let p = self.head_shape(h.width, shape);
        let LossTargets { labels, weight } = targets;
        let lengths = [h.data.length(), tokens];
        if let (Matrix::Frozen(frozen), true) = (head, self.recording && h.needs_gradient) {
            let mut dh = self.take(h.data.length());
            self.backend.run(HeadLossStep {
                loss: &mut loss,
                lse: lse.buffer_mut(),
                best: &mut best,
                dh: dh.buffer_mut(),
                rows: rows.slices(),
                h: h.buffer(),
                head: Operand::Sliced(frozen),
                labels,
                weight,
                p,
            });
            self.record("head_loss", &lengths, || Node::Head(Saved::Frozen { h, dh }));
            return HeadOutput { loss, best };
        }
        self.with_head(head, h.width, vocabulary, |operand| {
            self.backend.run(HeadLossForward {
                loss: &mut loss,
                lse: lse.buffer_mut(),
                best: &mut best,
                h: rows.slices(),
                head: operand,
                labels,
                p,
            });
        });
        if let Matrix::Trained(id) = head {
            let id = *id;
            let saved = || Node::Head(Saved::Trained { h, rows, lse, head, id, shape, targets });
            self.record("head_loss", &lengths, saved);
        }
        HeadOutput { loss, best }
    }

    /// Logits of all tokens: `[tokens, vocabulary]`. Nothing is recorded.
    pub fn project(&mut self, h: &Variable<B>, head: &Matrix<B>, shape: impl Into<HeadShape>) -> Variable<B> {
        let HeadShape { vocabulary, cap } = shape.into();
        let rows = self.slice(&h.data, h.width);
        let segments = [0, self.layout.tokens];
        let p = Product { segments: &segments, n: vocabulary, k: h.width, profile: self.profile, accumulate: false };
        let mut z = self.take(self.layout.tokens * vocabulary);
        self.with_head(head, h.width, vocabulary, |operand| {
            self.backend.run(ProductForward { y: z.buffer_mut(), x: rows.slices(), w: operand, p });
        });
        if let Some(SoftCap { limit, inverse }) = cap.map(|cap| SoftCap::new(f64::from(cap))) {
            // The steps of soft-capping, each an op.
            let mut capped = self.take(self.layout.tokens * vocabulary);
            self.backend.run(Scale { tensors: vec![z.buffer_mut()], factor: inverse });
            self.backend.run(Elementary { y: capped.buffer_mut(), x: z.buffer(), function: Function::Tanh });
            self.backend.run(Scale { tensors: vec![capped.buffer_mut()], factor: limit });
            z = capped;
        }
        self.variable(Rc::new(z), vocabulary, false)
    }

    fn head_shape(&self, hidden: usize, HeadShape { vocabulary, cap }: HeadShape) -> HeadLoss<'a> {
        HeadLoss { row_starts: &self.layout.row_starts, hidden, vocabulary, cap, profile: self.profile }
    }

    fn with_head<R>(
        &self,
        head: &Matrix<B>,
        hidden: usize,
        vocabulary: usize,
        use_it: impl FnOnce(Operand<B::Memory>) -> R,
    ) -> R {
        let shape = SliceShape { rows: vocabulary, width: hidden, profile: self.profile };
        head.with_slices(self.backend, self.parameters, 1, shape, use_it)
    }
}

impl<B: Backend> Saved<'_, B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>], gradients: &mut Gradients<B>) {
        let (h, dh) = match self {
            Self::Frozen { h, dh } => (h, dh),
            Self::Trained { h, rows, lse, head, id, shape, targets } => {
                let mut dh = tape.take(h.data.length());
                let p = tape.head_shape(h.width, shape);
                let dhead = Some(gradients.reach(tape.backend, id));
                tape.with_head(head, h.width, shape.vocabulary, |operand| {
                    let (labels, weight) = (&targets.labels, &targets.weight);
                    let (dh, rows, h, lse) = (dh.buffer_mut(), rows.slices(), h.buffer(), lse.buffer());
                    tape.backend.run(HeadLossBackward { dh, dhead, rows, h, head: operand, labels, lse, weight, p });
                });
                (h, dh)
            }
        };
        if h.needs_gradient {
            tape.contribute(values, h.id, Rc::new(dh));
        }
    }
}
