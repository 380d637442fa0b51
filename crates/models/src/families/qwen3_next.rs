//! Qwen3-Next, the first of the hybrids: the delta rule's inputs come from two joint projections,
//! most layers have experts with a gated shared expert, norms are zero-centred.

use super::{Family, PeftRules, Prediction};
use crate::ModelError;
use crate::config::mlp::{ExpertsDefaults, check_experts, gated_shared_expert, mixed};
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{DeltaProjections, ExpertsConfig, LayerNames, NormStyle, hybrid};

pub(super) static FAMILY: Family = Family {
    name: "Qwen3-Next",
    model_types: &["qwen3_next"],
    multimodal_types: &[],
    file_names: &[],
    defaults: SizeDefaults {
        vocabulary: Some(151_936),
        hidden: Some(2048),
        intermediate: Some(5632),
        layers: Some(48),
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
    // `gate_proj` and its siblings could mean the shared expert, a dense layer or the experts: PEFT
    // takes them for the experts, and the others would lose their adapters.
    peft: PeftRules::FusesExperts {
        modules: &["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"],
        converts_per_expert: false,
    },
    gguf: None,
};

const EXPERTS: ExpertsDefaults = ExpertsDefaults { count_key: "num_experts", count: 512, chosen: 10, width: 512 };

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let projections = DeltaProjections::Joined { qkvz: "in_proj_qkvz", ba: "in_proj_ba" };
    let (attention, rotary_width) = hybrid::attention(text, projections)?;
    let mlps = mixed(text, EXPERTS.sparse_by_step(text)?, experts)?;
    Ok(Layers::new(&LayerNames::COMMON, rotary_width, attention, mlps))
}

fn experts(text: &TextConfig) -> Result<ExpertsConfig, ModelError> {
    let mut experts = EXPERTS.experts(text.fields, text.fields.flag("norm_topk_prob", true)?)?;
    experts.shared = Some(gated_shared_expert(text.fields)?);
    check_experts(text.fields, &experts)?;
    Ok(experts)
}
