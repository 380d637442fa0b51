//! Fused ops on the tape: each file has the forward call, what it saves, and its backward.
//!
//! A value that is used several times receives its gradients in the reverse order of its uses: the
//! first is stored, later ones are added (`docs/numerics.md`, "Composition").

pub(crate) mod add;
pub(crate) mod attention;
pub(crate) mod balance;
pub(crate) mod columns;
pub(crate) mod conv1d;
pub(crate) mod decay;
pub(crate) mod delta_rule;
pub(crate) mod embedding;
pub(crate) mod experts;
pub(crate) mod gate;
pub(crate) mod gated_norm;
pub(crate) mod geglu;
pub(crate) mod head_loss;
pub(crate) mod l2_norm;
pub(crate) mod linear;
pub(crate) mod product4;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod router;
pub(crate) mod scale;
pub(crate) mod shared;
pub(crate) mod swiglu;

use crate::TapeError;
use crate::arena::Lease;
use crate::gradients::Gradients;
use crate::recompute::Recomputation;
use crate::tape::{Gradient, Tape};
use isobit_kernels::op::{Add, ToF32};
use isobit_kernels::{Backend, StoredMatrix};
use std::rc::Rc;

/// One recorded op.
pub(crate) enum Node<'a, B: Backend> {
    Embedding(embedding::Saved<'a, B>),
    RmsNorm(rms_norm::Saved<'a, B>),
    Linears(linear::Saved<'a, B>),
    Rope(rope::Saved<'a, B>),
    Attention(attention::Saved<'a, B>),
    Swiglu(swiglu::Saved<B>),
    Geglu(geglu::Saved<B>),
    Add(add::Saved),
    Scale(scale::Saved),
    Columns(columns::Saved),
    Gate(gate::Saved<B>),
    Conv1d(conv1d::Saved<'a, B>),
    L2Norm(l2_norm::Saved<B>),
    Decay(decay::Saved<'a, B>),
    DeltaRule(delta_rule::Saved<B>),
    GatedNorm(gated_norm::Saved<'a, B>),
    Router(router::Saved<'a, B>),
    ExpertsUp(experts::SavedUp<'a, B>),
    ExpertsDown(experts::SavedDown<'a, B>),
    TokenGate(shared::SavedGate<B>),
    Head(head_loss::Saved<'a, B>),
    Recomputation(Recomputation<'a, B>),
    /// Where the nodes of a block begin; the backward pass reaches it once the block is done.
    BlockStart,
    /// Where they end; `start` is the index of the first.
    BlockEnd {
        layer: usize,
        start: usize,
    },
}

impl<'a, B: Backend> Node<'a, B> {
    pub(crate) fn backward(
        self,
        tape: &mut Tape<'a, B>,
        values: &mut [Gradient<B>],
        gradients: &mut Gradients<B>,
    ) -> Result<(), TapeError> {
        match self {
            Self::Embedding(saved) => saved.backward(tape, values, gradients),
            Self::RmsNorm(saved) => saved.backward(tape, values, gradients),
            Self::Linears(saved) => saved.backward(tape, values, gradients),
            Self::Rope(saved) => saved.backward(tape, values),
            Self::Attention(saved) => saved.backward(tape, values, gradients),
            Self::Swiglu(saved) => saved.backward(tape, values),
            Self::Geglu(saved) => saved.backward(tape, values),
            Self::Add(saved) => saved.backward(tape, values),
            Self::Scale(saved) => saved.backward(tape, values),
            Self::Columns(saved) => saved.backward(tape, values),
            Self::Gate(saved) => saved.backward(tape, values),
            Self::Conv1d(saved) => saved.backward(tape, values, gradients),
            Self::L2Norm(saved) => saved.backward(tape, values),
            Self::Decay(saved) => saved.backward(tape, values, gradients),
            Self::DeltaRule(saved) => saved.backward(tape, values),
            Self::GatedNorm(saved) => saved.backward(tape, values, gradients),
            Self::Router(saved) => saved.backward(tape, values, gradients),
            Self::ExpertsUp(saved) => saved.backward(tape, values, gradients),
            Self::ExpertsDown(saved) => saved.backward(tape, values, gradients),
            Self::TokenGate(saved) => saved.backward(tape, values),
            Self::Head(saved) => {
                saved.backward(tape, values, gradients);
                gradients.leave_block(tape.backend)?;
            }
            Self::Recomputation(saved) => return saved.backward(tape, values, gradients),
            Self::BlockStart => return tape.leave_block(gradients),
            Self::BlockEnd { layer, start } => tape.reenter_block(layer, start),
        }
        Ok(())
    }

    /// What it saved, to be replaced.
    pub(crate) fn saved_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        match self {
            Self::RmsNorm(saved) => saved.tensors_mut(),
            Self::Linears(saved) => saved.tensors_mut(),
            Self::Attention(saved) => saved.tensors_mut(),
            Self::Swiglu(saved) => saved.tensors_mut(),
            Self::Geglu(saved) => saved.tensors_mut(),
            Self::Gate(saved) => saved.tensors_mut(),
            Self::Conv1d(saved) => saved.tensors_mut(),
            Self::L2Norm(saved) => saved.tensors_mut(),
            Self::Decay(saved) => saved.tensors_mut(),
            Self::DeltaRule(saved) => saved.tensors_mut(),
            Self::GatedNorm(saved) => saved.tensors_mut(),
            Self::Router(saved) => saved.tensors_mut(),
            Self::ExpertsUp(saved) => saved.tensors_mut(),
            Self::ExpertsDown(saved) => saved.tensors_mut(),
            Self::TokenGate(saved) => saved.tensors_mut(),
            Self::Columns(_) | Self::Rope(_) | Self::Add(_) | Self::Scale(_) => Vec::new(),
            // Not inside a block.
            Self::Embedding(_) | Self::Head(_) | Self::Recomputation(_) | Self::BlockStart | Self::BlockEnd { .. } => {
                Vec::new()
            }
        }
    }

    /// The op, and what it saved in the forward pass: for finding where two computations of a block
    /// differ.
    pub(crate) fn saved(&self) -> (&'static str, Vec<&Lease<B>>) {
        match self {
            Self::RmsNorm(saved) => ("rms_norm", saved.tensors()),
            Self::Linears(saved) => ("linear", saved.tensors()),
            Self::Attention(saved) => ("attention", saved.tensors()),
            Self::Swiglu(saved) => ("swiglu", saved.tensors()),
            Self::Geglu(saved) => ("geglu", saved.tensors()),
            Self::Gate(saved) => ("gate", saved.tensors()),
            Self::Conv1d(saved) => ("conv1d", saved.tensors()),
            Self::L2Norm(saved) => ("l2_norm", saved.tensors()),
            Self::Decay(saved) => ("decay", saved.tensors()),
            Self::DeltaRule(saved) => ("delta_rule", saved.tensors()),
            Self::GatedNorm(saved) => ("gated_norm", saved.tensors()),
            Self::Columns(_) => ("columns", Vec::new()),
            Self::Router(saved) => ("router", saved.tensors()),
            Self::ExpertsUp(saved) => ("experts_up", saved.tensors()),
            Self::ExpertsDown(saved) => ("experts_down", saved.tensors()),
            Self::TokenGate(saved) => ("gate", saved.tensors()),
            Self::Rope(_) => ("rope", Vec::new()),
            Self::Add(_) => ("add", Vec::new()),
            Self::Scale(_) => ("scale", Vec::new()),
            // Not inside a block.
            Self::Embedding(_) | Self::Head(_) | Self::Recomputation(_) | Self::BlockStart | Self::BlockEnd { .. } => {
                ("block", Vec::new())
            }
        }
    }
}

impl<B: Backend> Tape<'_, B> {
    /// Adds to a value's gradient, or stores it if it is the first.
    pub(crate) fn contribute(&self, values: &mut [Gradient<B>], id: usize, gradient: Rc<Lease<B>>) {
        values[id] = Some(match values[id].take() {
            None => gradient,
            Some(before) => {
                let mut sum = self.take(before.length());
                self.backend.run(Add { y: sum.buffer_mut(), a: before.buffer(), b: gradient.buffer() });
                Rc::new(sum)
            }
        });
    }

    /// The gradient, owned: copied if it is still shared.
    pub(crate) fn owned(&self, gradient: Rc<Lease<B>>) -> Lease<B> {
        Rc::try_unwrap(gradient).unwrap_or_else(|shared| {
            let mut copy = self.take(shared.length());
            self.backend.run(ToF32 { y: copy.buffer_mut(), x: StoredMatrix::F32(shared.buffer()) });
            copy
        })
    }
}
