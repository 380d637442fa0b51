//! gpt-oss: attention with a learned sink per head, in every other layer with a window; experts
//! with biases and clamped SwiGLU, stored as bfloat16 or MXFP4; YaRN.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::{read, typed_windows, with_windows};
use crate::config::fields::{AXIS_MAX, POSITIONS_MAX};
use crate::config::mlp::{ExpertsDefaults, check_experts};
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionConfig, ExpertsConfig, GateUpRows, LayerNames, MlpKind, NormStyle};
use crate::gguf::{HeadRule, Routing, WindowRotation, Windows};
use isobit_numerics::elementary::ClampedSwiglu;
use isobit_numerics::rope::Yarn;

pub(super) static FAMILY: Family = Family {
    name: "gpt-oss",
    model_types: &["gpt_oss"],
    multimodal_types: &[],
    file_names: &[],
    defaults: SizeDefaults {
        vocabulary: Some(201_088),
        hidden: Some(2880),
        intermediate: Some(2880),
        layers: Some(36),
        heads: Some(64),
        kv_heads: Some(8),
        head_width: Some(64),
        positions: 131_072,
    },
    implied: Implied {
        eps: 1e-5,
        theta: 150_000.0,
        yarn: Some(Yarn {
            factor: 32.0,
            original_max_position: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: false,
            attention_factor: None,
            mscale: 0.0,
            mscale_all_dim: 0.0,
        }),
        ..Implied::COMMON
    },
    norm: NormStyle::Plain,
    layers,
    balance_loss: true,
    prediction: Prediction::NONE,
    // The router is no linear module to PEFT, and the experts are tensors.
    peft: PeftRules::Plain,
    gguf: Some(GgufRules {
        qkv_bias: true,
        other_bias: true,
        head: HeadRule::Needed,
        windows: Windows::Periodic { period: 2, needed: true, rotation: WindowRotation::Same },
        routing: Routing::Clamped,
        mlp_norm: "post_attention_norm",
        ..GgufRules::plain("gpt-oss")
    }),
};

const EXPERTS: ExpertsDefaults = ExpertsDefaults { count_key: "num_experts", count: 128, chosen: 4, width: 2880 };
/// Without `layer_types`, every second layer sees all keys.
const FULL_INTERVAL: usize = 2;
const WINDOW: usize = 128;

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let bias = text.fields.flag("attention_bias", true)?;
    let attention = AttentionConfig { qkv_bias: bias, output_bias: bias, sinks: true, ..read(text)? };
    let kinds = with_windows(&attention, windows(text)?);
    let mlps = vec![MlpKind::Experts(experts(text)?); text.layer_count];
    Ok(Layers::new(&LayerNames::COMMON, attention.rotary_width, kinds, mlps))
}

fn windows(text: &TextConfig) -> Result<Vec<Option<usize>>, ModelError> {
    if let Some(windows) = typed_windows(text)?.layers {
        return Ok(windows);
    }
    let window = text.fields.size("sliding_window", POSITIONS_MAX, Some(WINDOW))?;
    let window = (!text.fields.is_null("sliding_window")).then_some(window);
    Ok((1..=text.layer_count).map(|number| window.filter(|_| !number.is_multiple_of(FULL_INTERVAL))).collect())
}

fn experts(text: &TextConfig) -> Result<ExpertsConfig, ModelError> {
    let fields = text.fields;
    let constant = |key: &str, default: f32| match fields.positive(key)? {
        None => Ok(default),
        Some(value) if (value as f32).is_normal() => Ok(value as f32),
        Some(value) => Err(fields.wrong(format!("`{key}` {value} is too large or too small for float32"))),
    };
    let experts = ExpertsConfig {
        router: "router",
        width: fields.size("intermediate_size", AXIS_MAX, text.defaults.intermediate)?,
        router_bias: true,
        biases: true,
        gate_up_rows: GateUpRows::Alternating,
        clamp: Some(ClampedSwiglu { alpha: constant("swiglu_alpha", 1.702)?, limit: constant("swiglu_limit", 7.0)? }),
        ..EXPERTS.experts(fields, true)?
    };
    check_experts(fields, &experts)?;
    Ok(experts)
}
