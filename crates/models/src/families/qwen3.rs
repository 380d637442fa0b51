//! Qwen3, dense: queries and keys are normalised per head, the head width is set separately, biases
//! are a switch. Its files must state every size except that width.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::{read, windows};
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionConfig, AttentionKind, LayerNames, NormStyle, mlp};

pub(super) static FAMILY: Family = Family {
    name: "Qwen3",
    model_types: &["qwen3"],
    multimodal_types: &[],
    file_names: &[],
    defaults: SizeDefaults { head_width: Some(128), ..SizeDefaults::REQUIRED },
    implied: Implied::COMMON,
    norm: NormStyle::Plain,
    layers,
    balance_loss: false,
    prediction: Prediction::NONE,
    peft: PeftRules::Plain,
    gguf: Some(GgufRules::plain("qwen3")),
};

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let attention = AttentionConfig { head_norms: true, ..read(text)? };
    let windows = windows(text)?.into_iter();
    let kinds = windows.map(|window| AttentionKind::Softmax(AttentionConfig { window, ..attention.clone() }));
    let mlps = vec![mlp::dense(text)?; text.layer_count];
    Ok(Layers::new(&LayerNames::COMMON, attention.rotary_width, kinds, mlps))
}
