//! Granite 3, dense: as Llama with four multipliers, on the embedding, on the scores of attention,
//! on what each branch adds to the residual stream, and on the logits.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::{factor, read};
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionConfig, AttentionKind, LayerNames, MlpKind, NormStyle, mlp};

pub(super) static FAMILY: Family = Family {
    name: "Granite 3",
    model_types: &["granite"],
    multimodal_types: &[],
    file_names: &[],
    defaults: DEFAULTS,
    implied: Implied::COMMON,
    norm: NormStyle::Plain,
    layers,
    balance_loss: false,
    prediction: Prediction::NONE,
    peft: PeftRules::Plain,
    gguf: Some(GgufRules {
        interleaved: true,
        qkv_bias: true,
        other_bias: true,
        multipliers: true,
        ..GgufRules::plain("granite")
    }),
};

pub(super) const DEFAULTS: SizeDefaults = SizeDefaults {
    vocabulary: Some(32000),
    hidden: Some(4096),
    intermediate: Some(11008),
    layers: Some(32),
    heads: Some(32),
    kv_heads: None,
    head_width: None,
    positions: 2048,
};

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let mut layers = scaled(text, &LayerNames::COMMON, &mlp::dense_with_switch(text)?)?;
    for layer in &mut layers.layers {
        layer.mlp_factor = layer.attention_factor;
    }
    Ok(layers)
}

/// Layers with the multipliers of the family, except that on the MLP's output.
pub(super) fn scaled(text: &TextConfig, names: &'static LayerNames, mlp: &MlpKind) -> Result<Layers, ModelError> {
    let fields = text.fields;
    let scale = factor(fields, "attention_multiplier")?.unwrap_or(1.0);
    let attention = AttentionConfig { scale, ..read(text)? };
    let rotary_width = attention.rotary_width;
    let kinds = vec![AttentionKind::Softmax(attention); text.layer_count];
    let mut layers = Layers::new(names, rotary_width, kinds, vec![mlp.clone(); text.layer_count]);
    layers.embedding_scale = factor(fields, "embedding_multiplier")?;
    // The file divides logits; here what the head reads is multiplied, rounded once.
    factor(fields, "logits_scaling")?;
    #[expect(clippy::float_arithmetic, reason = "a parameter of the op, host arithmetic")]
    let head_scale = fields.positive("logits_scaling")?.map(|divisor| (1.0 / divisor) as f32);
    layers.head_scale = head_scale.filter(|scale| *scale != 1.0);
    let residual = factor(fields, "residual_multiplier")?;
    for layer in &mut layers.layers {
        layer.attention_factor = residual;
    }
    Ok(layers)
}
