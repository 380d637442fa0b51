//! Deferred weight gradients: the backward pass continues with input gradients; the gradients of
//! linear layers' parameters come later.
//!
//! Deferral changes no bit. A layer's contribution to its parameters depends only on its input and
//! its output's gradient, both of which are held; and the queue is first in, first out, so every
//! parameter receives its parts in the same order as without deferral.

use crate::gradients::Gradients;
use crate::op::linear::LayerGradients;
use crate::tape::Tape;
use isobit_kernels::Backend;

/// When the weights, biases and adapters of linear layers get their gradients.
///
/// Deferral costs memory: every deferred layer holds its input, the gradient of its output and what
/// its adapter saved. With [`Deferral::Tape`] that is about what the policy `none` keeps, whatever
/// the policy. It helps when something waits for the input's gradient: with layers split over
/// devices, the previous device can continue while this one computes its weight gradients, and
/// weight gradients computed together can share what they read. On a single device it gains
/// nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Deferral {
    /// With the input's gradient.
    #[default]
    None,
    /// Once the block's input has its gradient.
    Block,
    /// Once everything else on the tape is done.
    Tape,
}

impl Deferral {
    pub const ALL: [Self; 3] = [Self::None, Self::Block, Self::Tape];
}

/// Deferred work, oldest first.
pub(crate) type Queue<'a, B> = Vec<LayerGradients<'a, B>>;

impl<'a, B: Backend> Tape<'a, B> {
    /// Sets when the weight gradients of linear layers are computed; the bits are the same.
    #[must_use]
    pub fn defer_weight_gradients(self, deferral: Deferral) -> Self {
        Self { deferral, ..self }
    }

    /// Computes the gradients of a layer's parameters, now or later.
    pub(crate) fn take_on(&mut self, work: LayerGradients<'a, B>, gradients: &mut Gradients<B>) {
        if self.deferral == Deferral::None {
            work.compute(self, gradients);
        } else {
            work.parameters().for_each(|id| gradients.await_deferred(id));
            self.deferred.push(work);
        }
    }

    /// Computes all deferred gradients.
    pub(crate) fn catch_up(&mut self, gradients: &mut Gradients<B>) {
        gradients.end_deferral();
        // ORDER: as the layers came.
        for work in std::mem::take(&mut self.deferred) {
            work.compute(self, gradients);
        }
    }
}
