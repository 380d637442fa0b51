//! DeepSeek-V3: latent attention (keys and values of all heads come from one narrow projection),
//! dense first layers, then experts scored by sigmoid, chosen within groups with a correction bias.

use super::{Family, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::scale;
use crate::config::fields::{AXIS_MAX, Fields};
use crate::config::mlp::{self, ExpertsDefaults, check_experts, mixed};
use crate::config::text::{Layers, SizeDefaults, TextConfig};
use crate::config::{
    AttentionKind, ExpertsConfig, LatentConfig, LatentNames, LayerNames, NormStyle, Scoring, SharedExpertConfig,
};
use isobit_kernels::op::attention::HEAD_WIDTH_MAX;

pub(super) static FAMILY: Family = Family {
    name: "DeepSeek-V3",
    model_types: &["deepseek_v3"],
    multimodal_types: &[],
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
    gguf: None,
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

const EXPERTS: ExpertsDefaults = ExpertsDefaults { count_key: "n_routed_experts", count: 256, chosen: 8, width: 2048 };
/// BOUND: the router's limit.
const GROUPS_MAX: u64 = 32;
/// BOUND: shared experts, which form one MLP of their combined width.
const SHARED_MAX: u64 = 1024;

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let latent = latent(text)?;
    let rotary_width = latent.rotary_width;
    let attention = vec![AttentionKind::Latent(latent); text.layer_count];
    let mlps = mixed(text, sparse(text)?, experts)?;
    Ok(Layers::new(&LayerNames::COMMON, rotary_width, attention, mlps))
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

/// Which layers have experts.
fn sparse(text: &TextConfig) -> Result<Vec<bool>, ModelError> {
    let frequency = text.fields.size("moe_layer_freq", AXIS_MAX, Some(1))?;
    if frequency != 1 {
        return Err(text.fields.wrong(format!("`moe_layer_freq` is {frequency}, not 1")));
    }
    let first = text.fields.whole("first_k_dense_replace", 0, AXIS_MAX)?.unwrap_or(3);
    Ok((0..text.layer_count).map(|layer| layer >= first).collect())
}

fn experts(text: &TextConfig) -> Result<ExpertsConfig, ModelError> {
    let fields = text.fields;
    let mut experts = EXPERTS.experts(fields, fields.flag("norm_topk_prob", true)?)?;
    for (key, known) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if fields.optional_text(key)?.is_some_and(|value| value != known) {
            return Err(fields.wrong(format!("`{key}` is not {known}")));
        }
    }
    experts.scoring = Scoring::Sigmoid;
    experts.correction_bias = Some("e_score_correction_bias");
    experts.scale = fields.positive("routed_scaling_factor")?.unwrap_or(2.5) as f32;
    if !experts.scale.is_normal() {
        return Err(fields.wrong("`routed_scaling_factor` is too large or too small for float32"));
    }
    experts.groups = fields.size("n_group", GROUPS_MAX, Some(8))?;
    experts.kept_groups = fields.size("topk_group", GROUPS_MAX, Some(4))?;
    experts.shared = shared(fields, experts.width)?;
    check_experts(fields, &experts)?;
    Ok(experts)
}

/// All shared experts as one MLP, without a gate.
fn shared(fields: Fields, expert_width: usize) -> Result<Option<SharedExpertConfig>, ModelError> {
    // Null means that there are none.
    let default = usize::from(!fields.is_null("n_shared_experts"));
    let count = fields.whole("n_shared_experts", 0, SHARED_MAX)?.unwrap_or(default);
    let width = count * expert_width;
    if width > AXIS_MAX as usize {
        return Err(fields.wrong(format!("`n_shared_experts` {count} are {width} wide, over {AXIS_MAX}")));
    }
    Ok((count > 0).then_some(SharedExpertConfig { module: "shared_experts", names: &mlp::NAMES, width, gate: None }))
}
