//! Weight gradients that wait: the backward pass goes on with input gradients, the gradients of
//! linear layers' parameters come after.
//!
//! Waiting changes no bit. What a layer adds to its parameters depends only on its input and its
//! output's gradient, both of which are held; and the queue is first in, first out, so every
//! parameter gets its parts in the order it would have got them at once.

use crate::op::linear::LayerGradients;
use crate::parameters::Gradients;
use crate::tape::Tape;
use isobit_kernels::Backend;

/// When the weights, biases and adapters of linear layers get their gradients.
///
/// Waiting costs memory: of every layer that waits its input, the gradient of its output and what
/// its adapter saved stay. With [`Deferral::Tape`] that is about what the policy `none` keeps,
/// whatever the policy. It is good where somebody waits for the gradient of the input: with layers
/// split over devices the device before can go on while this one does its weights, and weights that
/// are done in one go can share what they read. On a single device alone it gains nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Deferral {
    /// With the input's gradient.
    #[default]
    None,
    /// When the block's input has its gradient.
    Block,
    /// When everything else of the tape is done.
    Tape,
}

impl Deferral {
    pub const ALL: [Self; 3] = [Self::None, Self::Block, Self::Tape];
}

/// Work that waits, oldest first.
pub(crate) type Queue<'a, B> = Vec<LayerGradients<'a, B>>;

impl<'a, B: Backend> Tape<'a, B> {
    /// When weight gradients of linear layers are computed; the bits do not differ.
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

    /// Computes what waits.
    pub(crate) fn catch_up(&mut self, gradients: &mut Gradients<B>) {
        gradients.end_deferral();
        // ORDER: as the layers came.
        for work in std::mem::take(&mut self.deferred) {
            work.compute(self, gradients);
        }
    }
}
