//! Gemma 2: norms, GELU and scaled embedding as in Gemma 3; every other layer has a window, scores
//! and logits are soft-capped.

use super::{Family, GgufRules, gemma3};
use crate::ModelError;
use crate::config::attention::{factor, with_windows};
use crate::config::fields::Fields;
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{Activation, AttentionConfig, mlp};
use crate::gguf::{HeadRule, WindowRotation, Windows};

pub(super) static FAMILY: Family = Family {
    name: "Gemma 2",
    model_types: &["gemma2"],
    multimodal_types: &[],
    defaults: SizeDefaults {
        vocabulary: Some(256_000),
        hidden: Some(2304),
        intermediate: Some(9216),
        layers: Some(26),
        heads: Some(8),
        kv_heads: Some(4),
        head_width: Some(256),
        positions: 8192,
    },
    implied: Implied { tied: true, activation: Activation::GeluTanh, ..Implied::COMMON },
    layers,
    gguf: Some(GgufRules {
        head: HeadRule::Tied,
        windows: Windows::Periodic { period: 2, needed: true, rotation: WindowRotation::Same },
        gemma: Some(46),
        capped: true,
        ..GgufRules::plain("gemma2")
    }),
    ..gemma3::FAMILY
};

const ATTENTION_CAP: f32 = 50.0;
const LOGIT_CAP: f32 = 30.0;
/// Without `layer_types`, every second layer sees all keys.
const FULL_INTERVAL: usize = 2;

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let cap = cap(text.fields, "attn_logit_softcapping", ATTENTION_CAP)?;
    let attention = AttentionConfig { cap, ..gemma3::attention(text)? };
    let kinds = with_windows(&attention, gemma3::windows(text, FULL_INTERVAL)?);
    let mlps = vec![mlp::dense(text)?; text.layer_count];
    let layers = Layers::new(&gemma3::NAMES, attention.rotary_width, kinds, mlps);
    let logit_cap = self::cap(text.fields, "final_logit_softcapping", LOGIT_CAP)?;
    Ok(Layers { embedding_scale: Some(gemma3::embedding_scale(text.hidden)), logit_cap, ..layers })
}

/// Null means none.
fn cap(fields: Fields, key: &str, default: f32) -> Result<Option<f32>, ModelError> {
    match fields.positive(key)? {
        None if fields.is_null(key) => Ok(None),
        None => Ok(Some(default)),
        Some(_) => Ok(Some(factor(fields, key)?.unwrap_or(1.0))),
    }
}
