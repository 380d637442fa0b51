//! Layers of a decoder: attention of some kind, then an MLP, both on the normalised stream.
//!
//! One file per kind; `config::layer` selects the kinds of a layer. Only the forward pass is
//! written here.

pub(crate) mod attention;
pub(crate) mod delta;
pub(crate) mod dense;
pub(crate) mod experts;
pub(crate) mod latent;

use crate::generate::LayerCache;
use attention::Attention;
use delta::Delta;
use dense::Dense;
use experts::SparseMlp;
use isobit_autograd::{Norm, Rotation, Tape, TapeError, Variable};
use isobit_kernels::Backend;
use latent::Latent;
use std::cell::RefCell;

/// One decoder layer.
pub(crate) struct Block<B: Backend> {
    pub(crate) attention_norm: Norm<B>,
    pub(crate) attention: AnyAttention<B>,
    pub(crate) mlp_norm: Norm<B>,
    pub(crate) mlp: AnyMlp<B>,
}

pub(crate) enum AnyAttention<B: Backend> {
    Softmax(Attention<B>),
    Latent(Latent<B>),
    Delta(Delta<B>),
}

#[expect(clippy::large_enum_variant, reason = "there is one for each layer")]
pub(crate) enum AnyMlp<B: Backend> {
    Dense(Dense<B>),
    Experts(SparseMlp<B>),
}

/// What a layer needs besides its weights.
pub(crate) struct Context<'a, B: Backend> {
    pub(crate) rotation: Rotation<'a, B>,
    /// The cache of earlier tokens, in generation.
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
        let normal = tape.rms_norm(x, &self.attention_norm);
        let mixed = match &self.attention {
            AnyAttention::Softmax(attention) => attention.forward(tape, normal, context)?,
            AnyAttention::Latent(latent) => latent.forward(tape, normal, context)?,
            AnyAttention::Delta(delta) => delta.forward(tape, normal, context)?,
        };
        let x = tape.add(x, &mixed);
        drop(mixed);
        let normal = tape.rms_norm(&x, &self.mlp_norm);
        match &self.mlp {
            AnyMlp::Dense(dense) => Ok(dense.finish(tape, &x, normal)),
            AnyMlp::Experts(experts) => experts.finish(tape, &x, normal),
        }
    }
}
