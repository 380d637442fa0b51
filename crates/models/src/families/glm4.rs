//! GLM-4: half of each head is rotated, in pairs of neighbours; biases on queries, keys and values;
//! gate and up are one module. The newer files (`glm4`) also normalise what attention and MLP
//! return.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::{heads, rotated};
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionConfig, AttentionKind, LayerNames, NormStyle, mlp};

pub(super) static FAMILY: Family = Family {
    name: "GLM-4",
    model_types: &["glm4"],
    multimodal_types: &[],
    file_names: &[],
    defaults: SizeDefaults {
        vocabulary: Some(151_552),
        hidden: Some(4096),
        intermediate: Some(13696),
        layers: Some(40),
        heads: Some(32),
        kv_heads: Some(2),
        head_width: Some(128),
        positions: 131_072,
    },
    implied: Implied { eps: 0.000_000_156_25, ..Implied::COMMON },
    norm: NormStyle::Plain,
    layers,
    balance_loss: false,
    prediction: Prediction::NONE,
    peft: PeftRules::Plain,
    gguf: Some(GgufRules { interleaved: true, qkv_bias: true, ..GgufRules::plain("glm4") }),
};

/// The first files, without norms on what attention and MLP return.
pub(super) static FIRST: Family = Family {
    name: "GLM-4 (first files)",
    model_types: &["glm"],
    gguf: Some(GgufRules { interleaved: true, qkv_bias: true, heads_fill_hidden: true, ..GgufRules::plain("chatglm") }),
    ..FAMILY
};

/// Rotated share of a head, if the file does not specify it.
const ROTARY_SHARE: f64 = 0.5;
const NAMES: LayerNames = LayerNames {
    attention_output_norm: Some("post_self_attn_layernorm"),
    mlp_output_norm: Some("post_mlp_layernorm"),
    ..LayerNames::COMMON
};

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let names = if text.fields.text("model_type")? == "glm" { &LayerNames::COMMON } else { &NAMES };
    let heads = heads(text)?;
    let rotary_width = text.rope.width(text.fields, heads.head_width, ROTARY_SHARE)?;
    let attention = AttentionConfig {
        qkv_bias: text.fields.flag("attention_bias", true)?,
        output_bias: false,
        interleaved: true,
        ..rotated(text, &heads, rotary_width)?
    };
    let kinds = vec![AttentionKind::Softmax(attention); text.layer_count];
    Ok(Layers::new(names, rotary_width, kinds, vec![mlp::joined(text)?; text.layer_count]))
}
