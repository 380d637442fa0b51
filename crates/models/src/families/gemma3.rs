//! Gemma 3, text: norms before and after attention and MLP, zero-centred; queries and keys
//! normalised per head; GELU; a scaled embedding. Five of six layers have a window and a rotation
//! of their own. Most published files wrap the text model in a multimodal one.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::{read, scale_of, typed_windows};
use crate::config::fields::{AXIS_MAX, POSITIONS_MAX};
use crate::config::rope::LocalBase;
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{Activation, AttentionConfig, AttentionKind, LayerNames, NormStyle, Rotary, mlp};
use crate::gguf::{WindowRotation, Windows};

pub(super) static FAMILY: Family = Family {
    name: "Gemma 3 (text)",
    model_types: &["gemma3_text", "gemma3"],
    multimodal_types: &["gemma3"],
    file_names: &[],
    defaults: SizeDefaults {
        vocabulary: Some(262_208),
        hidden: Some(2304),
        intermediate: Some(9216),
        layers: Some(26),
        heads: Some(8),
        kv_heads: Some(4),
        head_width: Some(256),
        positions: 131_072,
    },
    implied: Implied {
        theta: 1e6,
        tied: true,
        local: Some(LocalBase { key: Some("rope_local_base_freq"), theta: 1e4 }),
        activation: Activation::GeluTanh,
        ..Implied::COMMON
    },
    norm: NormStyle::ZeroCentred,
    layers,
    balance_loss: false,
    prediction: Prediction::NONE,
    peft: PeftRules::Plain,
    gguf: Some(GgufRules {
        windows: Windows::Periodic { period: 6, needed: true, rotation: WindowRotation::OwnBase },
        gemma: Some(62),
        ..GgufRules::plain("gemma3")
    }),
};

pub(super) const NAMES: LayerNames = LayerNames {
    attention_norm: Some("input_layernorm"),
    attention_output_norm: Some("post_attention_layernorm"),
    mlp_norm: Some("pre_feedforward_layernorm"),
    mlp_output_norm: Some("post_feedforward_layernorm"),
    mlp: "mlp",
};
const WINDOW: usize = 4096;

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let fields = text.fields;
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if fields.number(key)?.is_some() {
            return Err(fields.wrong(format!("`{key}` is not null: this family has no capped scores or logits")));
        }
    }
    let attention = AttentionConfig { head_norms: true, ..attention(text)? };
    let windows = windows(text, fields.size("sliding_window_pattern", AXIS_MAX, Some(6))?)?;
    let kinds = windows.into_iter().map(|window| {
        let rotary = if window.is_some() { Rotary::Local } else { Rotary::Global };
        AttentionKind::Softmax(AttentionConfig { window, rotary, ..attention.clone() })
    });
    let mlps = vec![mlp::dense(text)?; text.layer_count];
    let layers = Layers::new(&NAMES, attention.rotary_width, kinds, mlps);
    Ok(Layers { embedding_scale: Some(embedding_scale(text.hidden)), ..layers })
}

/// Attention whose scores are divided by the root of `query_pre_attn_scalar`.
pub(super) fn attention(text: &TextConfig) -> Result<AttentionConfig, ModelError> {
    let fields = text.fields;
    if fields.flag("use_bidirectional_attention", false)? {
        return Err(fields.wrong("`use_bidirectional_attention` is true: attention is causal here"));
    }
    let width = fields.positive("query_pre_attn_scalar")?.unwrap_or(256.0);
    Ok(AttentionConfig { scale: scale_of(fields, "query_pre_attn_scalar", width)?, ..read(text)? })
}

/// From `layer_types`, or every `interval`-th layer sees all keys.
pub(super) fn windows(text: &TextConfig, interval: usize) -> Result<Vec<Option<usize>>, ModelError> {
    if let Some(windows) = typed_windows(text)?.layers {
        return Ok(windows);
    }
    let window = text.fields.size("sliding_window", POSITIONS_MAX, Some(WINDOW))?;
    Ok((1..=text.layer_count).map(|number| (!number.is_multiple_of(interval)).then_some(window)).collect())
}

/// `√hidden` in float64, rounded once.
pub(super) fn embedding_scale(hidden: usize) -> f32 {
    (hidden as f64).sqrt() as f32
}
