//! The text models of Qwen3-VL: Qwen3 and Qwen3-MoE, inside files with a vision tower. In text the
//! three parts of a position are the same, so the rotation is that of Qwen3.

use super::{Family, PeftRules, qwen3, qwen3_moe};
use crate::ModelError;
use crate::config::mlp::{ExpertsDefaults, check_experts, mixed};
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionConfig, AttentionKind, ExpertsConfig, LayerNames, attention};

pub(super) static DENSE: Family = Family {
    name: "Qwen3-VL (text)",
    model_types: &["qwen3_vl", "qwen3_vl_text"],
    multimodal_types: &["qwen3_vl"],
    defaults: SizeDefaults {
        vocabulary: Some(151_936),
        hidden: Some(4096),
        intermediate: Some(22016),
        layers: Some(32),
        heads: Some(32),
        kv_heads: Some(32),
        head_width: Some(128),
        positions: 128_000,
    },
    implied: Implied { theta: THETA, ..Implied::COMMON },
    ..qwen3::FAMILY
};

pub(super) static MOE: Family = Family {
    name: "Qwen3-VL-MoE (text)",
    model_types: &["qwen3_vl_moe", "qwen3_vl_moe_text"],
    multimodal_types: &["qwen3_vl_moe"],
    defaults: SizeDefaults {
        vocabulary: Some(151_936),
        hidden: Some(2048),
        intermediate: Some(5632),
        layers: Some(24),
        heads: Some(16),
        kv_heads: Some(16),
        head_width: None,
        positions: 128_000,
    },
    implied: Implied { theta: THETA, ..Implied::COMMON },
    layers,
    // PEFT converts no names of a single expert in this family: its files hold fused experts.
    peft: PeftRules::FusesExperts { modules: &["q_proj", "k_proj", "v_proj", "o_proj"], converts_per_expert: false },
    ..qwen3_moe::FAMILY
};

const THETA: f64 = 5e5;
const EXPERTS: ExpertsDefaults = ExpertsDefaults { count_key: "num_experts", count: 60, chosen: 4, width: 1408 };

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let attention = AttentionConfig { head_norms: true, ..attention::read(text)? };
    let mlps = mixed(text, EXPERTS.sparse_by_step(text)?, experts)?;
    let rotary_width = attention.rotary_width;
    let softmax = AttentionKind::Softmax(attention);
    Ok(Layers::new(&LayerNames::COMMON, rotary_width, vec![softmax; text.layer_count], mlps))
}

/// The class has no `norm_topk_prob`: it always divides by the sum.
fn experts(text: &TextConfig) -> Result<ExpertsConfig, ModelError> {
    let experts = EXPERTS.experts(text.fields, true)?;
    check_experts(text.fields, &experts)?;
    Ok(experts)
}
