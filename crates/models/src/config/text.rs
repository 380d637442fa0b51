//! What a family's file reads its layers from: the part of `config.json` that describes the text
//! model, with what is read alike for all families and the sizes that the family has as defaults.

use super::fields::Fields;
use super::layer::{AttentionKind, LayerConfig, LayerNames, MlpKind};
use super::rope::Rope;

/// Sizes that a `config.json` may leave out; where there is none, the file must say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SizeDefaults {
    pub(crate) vocabulary: Option<usize>,
    pub(crate) hidden: Option<usize>,
    /// Width of a dense MLP.
    pub(crate) intermediate: Option<usize>,
    pub(crate) layers: Option<usize>,
    pub(crate) heads: Option<usize>,
    /// As many as heads where there is none.
    pub(crate) kv_heads: Option<usize>,
    /// `hidden / heads` where there is none.
    pub(crate) head_width: Option<usize>,
    pub(crate) positions: usize,
}

impl SizeDefaults {
    /// The file must say every size but the number of positions.
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

pub(crate) struct TextConfig<'a> {
    pub(crate) fields: Fields<'a>,
    pub(crate) defaults: &'static SizeDefaults,
    pub(crate) hidden: usize,
    pub(crate) layer_count: usize,
    pub(crate) rope: &'a Rope,
}

/// The layers of a model.
pub(crate) struct Layers {
    pub(crate) layers: Vec<LayerConfig>,
    /// Channels of a head that are rotated, the same in all layers that rotate any.
    pub(crate) rotary_width: usize,
}

impl Layers {
    /// Attention and MLP of every layer.
    pub(crate) fn new(
        names: &'static LayerNames,
        rotary_width: usize,
        attention: impl IntoIterator<Item = AttentionKind>,
        mlp: impl IntoIterator<Item = MlpKind>,
    ) -> Self {
        let layer = |(attention, mlp)| LayerConfig { names, attention, mlp };
        Self { layers: attention.into_iter().zip(mlp).map(layer).collect(), rotary_width }
    }
}
