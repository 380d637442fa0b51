//! GLM-4.5 and its successors: grouped attention with half of each head rotated, dense first
//! layers, then experts as in DeepSeek-V3.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::{heads, rotated};
use crate::config::grouped::GroupedDefaults;
use crate::config::mlp::ExpertsDefaults;
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionConfig, AttentionKind, LayerNames, NormStyle};
use crate::gguf::Routing;

pub(super) static FAMILY: Family = Family {
    name: "GLM-4.5-MoE",
    model_types: &["glm4_moe"],
    multimodal_types: &[],
    file_names: &[],
    defaults: SizeDefaults {
        vocabulary: Some(151_552),
        hidden: Some(4096),
        intermediate: Some(10944),
        layers: Some(46),
        heads: Some(96),
        kv_heads: Some(8),
        head_width: None,
        positions: 131_072,
    },
    implied: Implied { eps: 1e-5, ..Implied::COMMON },
    norm: NormStyle::Plain,
    layers,
    balance_loss: false,
    prediction: Prediction { layers: 1, module: false },
    // As in DeepSeek-V3: `gate_proj` and its siblings mean the experts to PEFT.
    peft: PeftRules::FusesExperts { modules: &["q_proj", "k_proj", "v_proj", "o_proj"], converts_per_expert: false },
    gguf: Some(GgufRules {
        qkv_bias: true,
        routing: Routing::Grouped,
        mlp_norm: "post_attention_norm",
        ..GgufRules::plain("glm4moe")
    }),
};

/// Rotated share of a head, if the file does not specify it.
const ROTARY_SHARE: f64 = 0.5;
const EXPERTS: GroupedDefaults = GroupedDefaults {
    experts: ExpertsDefaults { count_key: "n_routed_experts", count: 128, chosen: 8, width: 1408 },
    scale: 1.0,
    groups: 1,
    kept_groups: 1,
    dense_layers: 1,
};

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let heads = heads(text)?;
    let rotary_width = text.rope.width(text.fields, heads.head_width, ROTARY_SHARE)?;
    let attention = AttentionConfig {
        output_bias: false,
        head_norms: text.fields.flag("use_qk_norm", false)?,
        ..rotated(text, &heads, rotary_width)?
    };
    let kinds = vec![AttentionKind::Softmax(attention); text.layer_count];
    Ok(Layers::new(&LayerNames::COMMON, rotary_width, kinds, EXPERTS.mlps(text)?))
}
