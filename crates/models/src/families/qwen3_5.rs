//! Qwen3.5 and its successors, dense: a hybrid with four input projections for the delta rule and a
//! dense MLP in every layer. Published files wrap the text model in a multimodal one.

use super::{Family, PeftRules, Prediction};
use crate::ModelError;
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{DeltaProjections, LayerNames, NormStyle, hybrid, mlp};

pub(super) static FAMILY: Family = Family {
    name: "Qwen3.5",
    model_types: &["qwen3_5", "qwen3_5_text"],
    multimodal_types: &["qwen3_5"],
    file_names: &[],
    defaults: SizeDefaults {
        vocabulary: Some(248_320),
        hidden: Some(4096),
        intermediate: Some(12288),
        layers: Some(32),
        heads: Some(16),
        kv_heads: Some(4),
        head_width: Some(256),
        positions: 32768,
    },
    implied: Implied::COMMON,
    norm: NormStyle::ZeroCentred,
    layers,
    balance_loss: false,
    prediction: Prediction::MODULE,
    peft: PeftRules::Plain,
    gguf: None,
};

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let projections = DeltaProjections::Separate { qkv: "in_proj_qkv", z: "in_proj_z", b: "in_proj_b", a: "in_proj_a" };
    let (attention, rotary_width) = hybrid::attention(text, projections)?;
    let mlps = vec![mlp::dense(text)?; text.layer_count];
    Ok(Layers::new(&LayerNames::COMMON, rotary_width, attention, mlps))
}
