//! Mistral: as Llama, with one sliding window for all layers and a head width that may be set
//! separately. Mistral Small's files wrap the text model in a multimodal one.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::{one_window, read, with_windows};
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionConfig, LayerNames, NormStyle, mlp};

pub(super) static FAMILY: Family = Family {
    name: "Mistral",
    model_types: &["mistral", "mistral3"],
    multimodal_types: &["mistral3"],
    file_names: &[],
    defaults: SizeDefaults {
        vocabulary: Some(32000),
        hidden: Some(4096),
        intermediate: Some(14336),
        layers: Some(32),
        heads: Some(32),
        kv_heads: Some(8),
        head_width: None,
        positions: 131_072,
    },
    implied: Implied::COMMON,
    norm: NormStyle::Plain,
    layers,
    balance_loss: false,
    prediction: Prediction::NONE,
    peft: PeftRules::Plain,
    gguf: Some(GgufRules { interleaved: true, ..GgufRules::plain("llama") }),
};

/// Where the file has no `sliding_window`; null means none.
const WINDOW: usize = 4096;

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let attention = attention(text)?;
    let default = (!text.fields.is_null("sliding_window")).then_some(WINDOW);
    let kinds = with_windows(&attention, vec![one_window(text, default)?; text.layer_count]);
    let mlps = vec![mlp::dense(text)?; text.layer_count];
    Ok(Layers::new(&LayerNames::COMMON, attention.rotary_width, kinds, mlps))
}

/// The transformers classes of Mistral and Mixtral have no switch for biases: only the type of
/// `attention_bias` is checked.
pub(super) fn attention(text: &TextConfig) -> Result<AttentionConfig, ModelError> {
    Ok(AttentionConfig { qkv_bias: false, output_bias: false, ..read(text)? })
}
