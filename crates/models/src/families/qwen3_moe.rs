//! Qwen3-MoE: attention as in Qwen3, experts chosen by softmax, no shared expert. Published files
//! hold experts one by one; transformers 5 fuses them in memory, which decides how PEFT interprets
//! names.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::{read, typed_windows, window_in_use};
use crate::config::mlp::{ExpertsDefaults, check_experts, mixed};
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionConfig, AttentionKind, ExpertsConfig, LayerNames, NormStyle};

pub(super) static FAMILY: Family = Family {
    name: "Qwen3-MoE",
    model_types: &["qwen3_moe"],
    multimodal_types: &[],
    file_names: &[],
    defaults: SizeDefaults {
        vocabulary: Some(151_936),
        hidden: Some(2048),
        intermediate: Some(6144),
        layers: Some(24),
        heads: Some(32),
        kv_heads: Some(4),
        head_width: None,
        positions: 32768,
    },
    implied: Implied::COMMON,
    norm: NormStyle::Plain,
    layers,
    balance_loss: true,
    prediction: Prediction::NONE,
    peft: PeftRules::FusesExperts {
        modules: &["q_proj", "k_proj", "v_proj", "o_proj"],
        // No shared expert: the names of an expert's modules mean nothing else in the layer.
        converts_per_expert: true,
    },
    gguf: Some(GgufRules::plain("qwen3moe")),
};

const EXPERTS: ExpertsDefaults = ExpertsDefaults {
    // `num_local_experts` is read too, as in every family.
    count_key: "num_experts",
    count: 128,
    chosen: 8,
    width: 768,
};

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let attention = AttentionConfig { head_norms: true, ..read(text)? };
    let window = window(text)?;
    let mlps = mixed(text, EXPERTS.sparse_by_step(text)?, experts)?;
    let rotary_width = attention.rotary_width;
    let softmax = AttentionKind::Softmax(AttentionConfig { window, ..attention });
    Ok(Layers::new(&LayerNames::COMMON, rotary_width, vec![softmax; text.layer_count], mlps))
}

fn experts(text: &TextConfig) -> Result<ExpertsConfig, ModelError> {
    let experts = EXPERTS.experts(text.fields, text.fields.flag("norm_topk_prob", false)?)?;
    check_experts(text.fields, &experts)?;
    Ok(experts)
}

/// One window for all layers or none. The class does not read `layer_types`: a file in which they
/// say something else has two readings.
fn window(text: &TextConfig) -> Result<Option<usize>, ModelError> {
    let typed = typed_windows(text)?;
    let window = window_in_use(text.fields, typed.window)?;
    if typed.layers.is_some_and(|layers| layers.iter().any(|typed| *typed != window)) {
        return Err(text.fields.wrong("`layer_types` and `use_sliding_window` disagree"));
    }
    Ok(window)
}
