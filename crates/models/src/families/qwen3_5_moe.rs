//! Qwen3.5-MoE and its successors: attention as in Qwen3.5, experts with a gated shared expert in
//! every layer. Published files hold fused experts, and PEFT converts no module names.

use super::{Family, PeftRules, Prediction};
use crate::ModelError;
use crate::config::mlp::{ExpertsDefaults, check_experts, gated_shared_expert};
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{DeltaProjections, LayerNames, MlpKind, NormStyle, hybrid};

pub(super) static FAMILY: Family = Family {
    name: "Qwen3.5-MoE",
    model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
    multimodal_types: &["qwen3_5_moe"],
    file_names: &[],
    defaults: SizeDefaults {
        vocabulary: Some(248_320),
        hidden: Some(2048),
        // Every layer has experts.
        intermediate: None,
        layers: Some(40),
        heads: Some(16),
        kv_heads: Some(2),
        head_width: Some(256),
        positions: 32768,
    },
    implied: Implied::COMMON,
    norm: NormStyle::ZeroCentred,
    layers,
    balance_loss: true,
    prediction: Prediction::MODULE,
    peft: PeftRules::Plain,
    gguf: None,
};

const EXPERTS: ExpertsDefaults = ExpertsDefaults { count_key: "num_experts", count: 256, chosen: 8, width: 512 };

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let projections = DeltaProjections::Separate { qkv: "in_proj_qkv", z: "in_proj_z", b: "in_proj_b", a: "in_proj_a" };
    let (attention, rotary_width) = hybrid::attention(text, projections)?;
    // The transformers class has no `norm_topk_prob`: it always divides by the sum.
    let mut experts = EXPERTS.experts(text.fields, true)?;
    experts.shared = Some(gated_shared_expert(text.fields)?);
    check_experts(text.fields, &experts)?;
    let mlps = vec![MlpKind::Experts(experts); text.layer_count];
    Ok(Layers::new(&LayerNames::COMMON, rotary_width, attention, mlps))
}
