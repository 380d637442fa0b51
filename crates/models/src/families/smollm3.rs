//! SmolLM3: as Llama, but every fourth layer does not rotate queries and keys, and only such layers
//! may have a window.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::{read, typed_windows, window_in_use};
use crate::config::fields::AXIS_MAX;
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionConfig, AttentionKind, LayerNames, NormStyle, Rotary, mlp};

pub(super) static FAMILY: Family = Family {
    name: "SmolLM3",
    model_types: &["smollm3"],
    multimodal_types: &[],
    file_names: &[],
    defaults: SizeDefaults {
        vocabulary: Some(128_256),
        hidden: Some(2048),
        intermediate: Some(11008),
        layers: Some(36),
        heads: Some(16),
        kv_heads: Some(4),
        head_width: None,
        positions: 32768,
    },
    implied: Implied { theta: 2e6, tied: true, ..Implied::COMMON },
    norm: NormStyle::Plain,
    layers,
    balance_loss: false,
    prediction: Prediction::NONE,
    peft: PeftRules::Plain,
    gguf: Some(GgufRules { interleaved: true, unrotated: Some(4), ..GgufRules::plain("smollm3") }),
};

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let attention = read(text)?;
    let rotated = rotated(text)?;
    let windows = windows(text, &rotated)?;
    let kinds = rotated.iter().zip(windows).map(|(&rotated, window)| {
        let rotary = if rotated { Rotary::Global } else { Rotary::None };
        AttentionKind::Softmax(AttentionConfig { window, rotary, ..attention.clone() })
    });
    let mlps = vec![mlp::dense_with_switch(text)?; text.layer_count];
    Ok(Layers::new(&LayerNames::COMMON, attention.rotary_width, kinds, mlps))
}

/// Which layers rotate: `no_rope_layers` holds a 1 for each that does.
fn rotated(text: &TextConfig) -> Result<Vec<bool>, ModelError> {
    let Some(layers) = text.fields.numbers("no_rope_layers", 1)? else {
        let interval = text.fields.size("no_rope_layer_interval", AXIS_MAX, Some(4))?;
        return Ok((1..=text.layer_count).map(|number| !number.is_multiple_of(interval)).collect());
    };
    if layers.len() != text.layer_count {
        return Err(text.fields.wrong("`no_rope_layers` does not have one entry per layer"));
    }
    Ok(layers.into_iter().map(|rotated| rotated == 1).collect())
}

fn windows(text: &TextConfig, rotated: &[bool]) -> Result<Vec<Option<usize>>, ModelError> {
    let typed = typed_windows(text)?;
    let window = window_in_use(text.fields, typed.window)?;
    match typed.layers {
        Some(layers) if window.is_some() || layers.iter().all(Option::is_none) => Ok(layers),
        Some(_) => Err(text.fields.wrong("`layer_types` and `use_sliding_window` disagree")),
        None => Ok(rotated.iter().map(|rotated| window.filter(|_| !rotated)).collect()),
    }
}
