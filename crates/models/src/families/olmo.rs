//! OLMo 2 and OLMo 3: norms on what attention and MLP return instead of on what they read, queries
//! and keys normalised over all heads at once. Most layers of OLMo 3 have a window, and a rotation
//! that is not stretched for long texts.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::{read, typed_windows};
use crate::config::fields::POSITIONS_MAX;
use crate::config::rope::LocalBase;
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionConfig, AttentionKind, LayerNames, NormStyle, Rotary, mlp};
use crate::gguf::{HeadRule, WindowRotation, Windows};

pub(super) static OLMO2: Family = Family {
    name: "OLMo 2",
    model_types: &["olmo2"],
    multimodal_types: &[],
    file_names: &[],
    defaults: DEFAULTS,
    implied: Implied { eps: 1e-5, ..Implied::COMMON },
    norm: NormStyle::Plain,
    layers: olmo2,
    balance_loss: false,
    prediction: Prediction::NONE,
    peft: PeftRules::Plain,
    gguf: Some(GGUF),
};

pub(super) static OLMO3: Family = Family {
    name: "OLMo 3",
    model_types: &["olmo3"],
    implied: Implied { eps: 1e-5, theta: THETA, local: Some(LocalBase { key: None, theta: THETA }), ..Implied::COMMON },
    layers: olmo3,
    ..OLMO2
};

const GGUF: GgufRules = GgufRules {
    head: HeadRule::Needed,
    windows: Windows::Periodic { period: 4, needed: false, rotation: WindowRotation::SameBase },
    heads_fill_hidden: true,
    ..GgufRules::plain("olmo2")
};

const DEFAULTS: SizeDefaults = SizeDefaults {
    vocabulary: Some(50304),
    hidden: Some(4096),
    intermediate: Some(11008),
    layers: Some(32),
    heads: Some(32),
    kv_heads: None,
    head_width: None,
    positions: 2048,
};
/// OLMo 3's, in all layers.
const THETA: f64 = 5e5;
const WINDOW: usize = 4096;
/// Without `layer_types`, every fourth layer sees all keys.
const FULL_INTERVAL: usize = 4;

const NAMES: LayerNames = LayerNames {
    attention_norm: None,
    attention_output_norm: Some("post_attention_layernorm"),
    mlp_norm: None,
    mlp_output_norm: Some("post_feedforward_layernorm"),
    mlp: "mlp",
};

fn olmo2(text: &TextConfig) -> Result<Layers, ModelError> {
    layers(text, vec![None; text.layer_count])
}

fn olmo3(text: &TextConfig) -> Result<Layers, ModelError> {
    if let Some(windows) = typed_windows(text)?.layers {
        return layers(text, windows);
    }
    let window = text.fields.size("sliding_window", POSITIONS_MAX, Some(WINDOW))?;
    let of = |number: usize| (!number.is_multiple_of(FULL_INTERVAL)).then_some(window);
    layers(text, (1..=text.layer_count).map(of).collect())
}

/// Layers with a window have the local rotation.
fn layers(text: &TextConfig, windows: Vec<Option<usize>>) -> Result<Layers, ModelError> {
    let attention = AttentionConfig { head_norms: true, norms_span_heads: true, ..read(text)? };
    let kinds = windows.into_iter().map(|window| {
        let rotary = if window.is_some() { Rotary::Local } else { Rotary::Global };
        AttentionKind::Softmax(AttentionConfig { window, rotary, ..attention.clone() })
    });
    let mlps = vec![mlp::dense(text)?; text.layer_count];
    Ok(Layers::new(&NAMES, attention.rotary_width, kinds, mlps))
}
