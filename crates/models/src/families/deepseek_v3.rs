//! DeepSeek-V3: latent attention (keys and values of all heads come from one narrow projection),
//! dense first layers, then experts scored by sigmoid, chosen within groups with a correction bias.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::scale;
use crate::config::fields::AXIS_MAX;
use crate::config::grouped::GroupedDefaults;
use crate::config::mlp::ExpertsDefaults;
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionKind, LatentConfig, LatentNames, LayerNames, NormStyle};
use crate::gguf::Routing;
use isobit_kernels::op::attention::HEAD_WIDTH_MAX;

pub(super) static FAMILY: Family = Family {
    name: "DeepSeek-V3",
    model_types: &["deepseek_v3"],
    multimodal_types: &[],
    file_names: &[],
    defaults: SizeDefaults {
        vocabulary: Some(129_280),
        hidden: Some(7168),
        intermediate: Some(18432),
        layers: Some(61),
        heads: Some(128),
        kv_heads: Some(128),
        head_width: None,
        positions: 4096,
    },
    implied: Implied::COMMON,
    norm: NormStyle::Plain,
    layers,
    // The transformers class has no such loss: the correction bias balances instead.
    balance_loss: false,
    // Its files have one extra layer whether or not their config states it.
    prediction: Prediction { layers: 1, module: false },
    // `gate_proj` and its siblings could mean a dense layer, the shared experts or the experts:
    // PEFT takes them for the experts, and the others would lose their adapters.
    peft: PeftRules::FusesExperts {
        modules: &["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        converts_per_expert: false,
    },
    gguf: Some(GgufRules { interleaved: true, routing: Routing::Grouped, ..GgufRules::plain("deepseek2") }),
};

const LATENT: LatentNames = LatentNames {
    module: "self_attn",
    q: "q_proj",
    q_a: "q_a_proj",
    q_a_norm: "q_a_layernorm",
    q_b: "q_b_proj",
    kv_a: "kv_a_proj_with_mqa",
    kv_a_norm: "kv_a_layernorm",
    kv_b: "kv_b_proj",
    o: "o_proj",
};
/// For the norms inside attention, regardless of `rms_norm_eps`.
const LATENT_NORM_EPS: f32 = 1e-6;

const EXPERTS: GroupedDefaults = GroupedDefaults {
    experts: ExpertsDefaults { count_key: "n_routed_experts", count: 256, chosen: 8, width: 2048 },
    scale: 2.5,
    groups: 8,
    kept_groups: 4,
    dense_layers: 3,
};

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let latent = latent(text)?;
    let rotary_width = latent.rotary_width;
    let attention = vec![AttentionKind::Latent(latent); text.layer_count];
    Ok(Layers::new(&LayerNames::COMMON, rotary_width, attention, EXPERTS.mlps(text)?))
}

fn latent(text: &TextConfig) -> Result<LatentConfig, ModelError> {
    let (fields, rope) = (text.fields, text.rope);
    let heads = fields.size("num_attention_heads", AXIS_MAX, text.defaults.heads)?;
    let kv_heads = fields.size("num_key_value_heads", AXIS_MAX, text.defaults.kv_heads)?;
    if kv_heads != heads {
        return Err(fields.wrong(format!(
            "`num_key_value_heads` is {kv_heads}, but `num_attention_heads` is {heads}: they must be equal"
        )));
    }
    let width = |key: &str, default: usize| fields.size(key, HEAD_WIDTH_MAX as u64, Some(default));
    let (plain_width, rotary_width) = (width("qk_nope_head_dim", 128)?, width("qk_rope_head_dim", 64)?);
    let key_width = plain_width + rotary_width;
    if key_width > HEAD_WIDTH_MAX {
        return Err(fields
            .wrong(format!("`qk_nope_head_dim` and `qk_rope_head_dim` add up to {key_width}, over {HEAD_WIDTH_MAX}")));
    }
    if !rotary_width.is_multiple_of(2) {
        return Err(fields.wrong(format!("`qk_rope_head_dim` {rotary_width} is odd")));
    }
    if rope.partial.is_some_and(|share| share != 1.0) {
        return Err(fields.wrong("`partial_rotary_factor` is not one: `qk_rope_head_dim` sets what is rotated"));
    }
    rope.check_sections(fields, rotary_width)?;
    // Null means that queries have a single projection.
    let query_rank =
        if fields.is_null("q_lora_rank") { None } else { Some(fields.size("q_lora_rank", AXIS_MAX, Some(1536))?) };
    Ok(LatentConfig {
        names: &LATENT,
        heads,
        query_rank,
        kv_rank: fields.size("kv_lora_rank", AXIS_MAX, Some(512))?,
        plain_width,
        rotary_width,
        value_width: width("v_head_dim", 128)?,
        interleaved: fields.flag("rope_interleave", true)?,
        bias: fields.flag("attention_bias", false)?,
        norm_eps: LATENT_NORM_EPS,
        scale: scale(key_width, rope.latent_growth()),
    })
}
