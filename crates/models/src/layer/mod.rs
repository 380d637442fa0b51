//! Layers of a decoder: a mixer of tokens, then a network that every token goes through, both on the normalised stream.
//!
//! One file per kind; `config::layer` says which of them a layer has. Only the forward pass is written.

pub(crate) mod attention;
pub(crate) mod delta;
pub(crate) mod dense;
pub(crate) mod experts;
pub(crate) mod latent;

use crate::generate::LayerCache;
use attention::Attention;
use delta::Delta;
use dense::Dense;
use experts::Sparse;
use isobit_autograd::{Norm, Rotation, Tape, TapeError, Variable};
use isobit_kernels::Backend;
use latent::Latent;
use std::cell::RefCell;

/// One decoder layer.
pub(crate) struct Block<B: Backend> {
    pub(crate) input_norm: Norm<B>,
    pub(crate) mixer: Mixer<B>,
    pub(crate) post_norm: Norm<B>,
    pub(crate) feed: Feed<B>,
}

pub(crate) enum Mixer<B: Backend> {
    Attention(Attention<B>),
    Latent(Latent<B>),
    Delta(Delta<B>),
}

#[expect(clippy::large_enum_variant, reason = "there is one for each layer")]
pub(crate) enum Feed<B: Backend> {
    Dense(Dense<B>),
    Experts(Sparse<B>),
}

/// What a layer computes with besides its weights.
pub(crate) struct Context<'a, B: Backend> {
    pub(crate) rotation: Rotation<'a, B>,
    /// What earlier tokens left behind, in generation.
    pub(crate) cache: Option<&'a RefCell<LayerCache>>,
}

impl<B: Backend> Clone for Context<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Backend> Copy for Context<'_, B> {}

impl<B: Backend> Block<B> {
    pub(crate) fn forward<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        x: &Variable<B>,
        context: Context<'a, B>,
    ) -> Result<Variable<B>, TapeError> {
        let normal = tape.rms_norm(x, &self.input_norm);
        let mixed = match &self.mixer {
            Mixer::Attention(attention) => attention.forward(tape, normal, context)?,
            Mixer::Latent(latent) => latent.forward(tape, normal, context)?,
            Mixer::Delta(delta) => delta.forward(tape, normal, context)?,
        };
        let x = tape.add(x, &mixed);
        drop(mixed);
        let normal = tape.rms_norm(&x, &self.post_norm);
        match &self.feed {
            Feed::Dense(dense) => Ok(dense.finish(tape, &x, normal)),
            Feed::Experts(experts) => experts.finish(tape, &x, normal),
        }
    }
}
