//! Input to a family's file: the part of `config.json` that describes the text model, with the
//! fields common to all families and the family's default sizes.

use super::fields::Fields;
use super::layer::{Activation, AttentionKind, LayerConfig, LayerNames, MlpKind};
use super::rope::{LocalBase, Rope};
use isobit_numerics::rope::Yarn;

/// Sizes that a `config.json` may omit; without a default, the file must state them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SizeDefaults {
    pub(crate) vocabulary: Option<usize>,
    pub(crate) hidden: Option<usize>,
    /// Width of a dense MLP.
    pub(crate) intermediate: Option<usize>,
    pub(crate) layers: Option<usize>,
    pub(crate) heads: Option<usize>,
    /// The number of heads if none.
    pub(crate) kv_heads: Option<usize>,
    /// `hidden / heads` if none.
    pub(crate) head_width: Option<usize>,
    pub(crate) positions: usize,
}

impl SizeDefaults {
    /// The file must state every size except the number of positions.
    pub(crate) const REQUIRED: Self = Self {
        vocabulary: None,
        hidden: None,
        intermediate: None,
        layers: None,
        heads: None,
        kv_heads: None,
        head_width: None,
        positions: 32768,
    };
}

/// What holds where a file is silent, besides sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Implied {
    /// `rms_norm_eps`
    pub(crate) eps: f64,
    /// `rope_theta`
    pub(crate) theta: f64,
    /// `tie_word_embeddings`
    pub(crate) tied: bool,
    /// In families whose layers with a window have a rotation of their own.
    pub(crate) local: Option<LocalBase>,
    /// The rotation of a file that has neither `rope_parameters` nor `rope_scaling`.
    pub(crate) yarn: Option<Yarn>,
    pub(crate) activation: Activation,
}

impl Implied {
    pub(crate) const COMMON: Self =
        Self { eps: 1e-6, theta: 1e4, tied: false, local: None, yarn: None, activation: Activation::Silu };
}

pub(crate) struct TextConfig<'a> {
    pub(crate) fields: Fields<'a>,
    pub(crate) defaults: &'static SizeDefaults,
    pub(crate) hidden: usize,
    pub(crate) layer_count: usize,
    pub(crate) rope: &'a Rope,
    pub(crate) activation: Activation,
}

/// The layers of a model.
#[expect(clippy::struct_field_names, reason = "the layers, and what goes with them")]
pub(crate) struct Layers {
    pub(crate) layers: Vec<LayerConfig>,
    /// Rotated channels per head, the same in all layers that rotate any.
    pub(crate) rotary_width: usize,
    /// Factor on the embedding of tokens.
    pub(crate) embedding_scale: Option<f32>,
    /// Factor on what the head reads.
    pub(crate) head_scale: Option<f32>,
    /// Logits stay between plus and minus this.
    pub(crate) logit_cap: Option<f32>,
}

impl Layers {
    /// Attention and MLP of every layer.
    pub(crate) fn new(
        names: &'static LayerNames,
        rotary_width: usize,
        attention: impl IntoIterator<Item = AttentionKind>,
        mlp: impl IntoIterator<Item = MlpKind>,
    ) -> Self {
        let layer = |(attention, mlp)| LayerConfig { names, attention, mlp, attention_factor: None, mlp_factor: None };
        let layers = attention.into_iter().zip(mlp).map(layer).collect();
        Self { layers, rotary_width, embedding_scale: None, head_scale: None, logit_cap: None }
    }
}
