//! Qwen2 and Qwen2.5: grouped attention with biases only on queries, keys and values. Its files
//! must state their sizes.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::{read, windows};
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionConfig, AttentionKind, LayerNames, NormStyle, mlp};

pub(super) static FAMILY: Family = Family {
    name: "Qwen2 and Qwen2.5",
    model_types: &["qwen2"],
    multimodal_types: &[],
    file_names: &[],
    defaults: SizeDefaults::REQUIRED,
    implied: Implied::COMMON,
    norm: NormStyle::Plain,
    layers,
    balance_loss: false,
    prediction: Prediction::NONE,
    peft: PeftRules::Plain,
    gguf: Some(GgufRules { qkv_bias: true, ..GgufRules::plain("qwen2") }),
};

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    // The transformers class has no switch for biases: only the type of `attention_bias` is
    // checked.
    let attention = AttentionConfig { qkv_bias: true, output_bias: false, ..read(text)? };
    let windows = windows(text)?.into_iter();
    let kinds = windows.map(|window| AttentionKind::Softmax(AttentionConfig { window, ..attention.clone() }));
    let mlps = vec![mlp::dense(text)?; text.layer_count];
    Ok(Layers::new(&LayerNames::COMMON, attention.rotary_width, kinds, mlps))
}
