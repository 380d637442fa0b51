//! Layers of a decoder: attention of some kind, then an MLP, both on the normalised stream.
//!
//! One file per kind; `config::layer` selects the kinds of a layer. Only the forward pass is
//! written here.

pub(crate) mod attention;
pub(crate) mod delta;
pub(crate) mod dense;
pub(crate) mod experts;
pub(crate) mod latent;

use crate::config::Rotary;
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
    pub(crate) attention_norm: Option<Norm<B>>,
    pub(crate) attention: AnyAttention<B>,
    pub(crate) attention_output: BranchEnd<B>,
    pub(crate) mlp_norm: Option<Norm<B>>,
    pub(crate) mlp: AnyMlp<B>,
    pub(crate) mlp_output: BranchEnd<B>,
}

/// What the output of attention or of a dense MLP goes through before it is added to the residual
/// stream: nothing in most families.
pub(crate) struct BranchEnd<B: Backend> {
    pub(crate) norm: Option<Norm<B>>,
    pub(crate) factor: Option<f32>,
}

impl<B: Backend> BranchEnd<B> {
    fn apply<'a>(&'a self, tape: &mut Tape<'a, B>, x: Variable<B>) -> Variable<B> {
        let x = match &self.norm {
            Some(norm) => tape.rms_norm(&x, norm),
            None => x,
        };
        match self.factor {
            Some(factor) => tape.scale(x, factor),
            None => x,
        }
    }
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
    /// That of layers with `Rotary::Local`.
    pub(crate) local_rotation: Option<Rotation<'a, B>>,
    /// The cache of earlier tokens, in generation.
    pub(crate) cache: Option<&'a RefCell<LayerCache>>,
}

impl<B: Backend> Clone for Context<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Backend> Copy for Context<'_, B> {}

impl<'a, B: Backend> Context<'a, B> {
    /// The rotation that a layer asks for, if any.
    fn rotation_of(&self, rotary: Rotary) -> Option<Rotation<'a, B>> {
        match rotary {
            Rotary::Global => Some(self.rotation),
            Rotary::Local => Some(self.local_rotation.expect("a config with such layers has their rotation")),
            Rotary::None => None,
        }
    }
}

impl<B: Backend> Block<B> {
    pub(crate) fn forward<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        x: &Variable<B>,
        context: Context<'a, B>,
    ) -> Result<Variable<B>, TapeError> {
        let normal = normalised(tape, x, self.attention_norm.as_ref());
        let mixed = match &self.attention {
            AnyAttention::Softmax(attention) => attention.forward(tape, normal, context)?,
            AnyAttention::Latent(latent) => latent.forward(tape, normal, context)?,
            AnyAttention::Delta(delta) => delta.forward(tape, normal, context)?,
        };
        let mixed = self.attention_output.apply(tape, mixed);
        let x = tape.add(x, &mixed);
        drop(mixed);
        let normal = normalised(tape, &x, self.mlp_norm.as_ref());
        match &self.mlp {
            AnyMlp::Dense(dense) => Ok(dense.finish(tape, &x, normal, &self.mlp_output)),
            AnyMlp::Experts(experts) => experts.finish(tape, &x, normal),
        }
    }
}

/// What a branch reads from the residual stream.
fn normalised<'a, B: Backend>(tape: &mut Tape<'a, B>, x: &Variable<B>, norm: Option<&'a Norm<B>>) -> Variable<B> {
    match norm {
        Some(norm) => tape.rms_norm(x, norm),
        None => x.clone(),
    }
}
