//! The mixer of every layer, as the families spell it.

use super::fields::{AXIS_MAX, Fields, POSITIONS_MAX, shown};
use super::layer::{AttentionConfig, DeltaConfig, DeltaProjections, LatentConfig, Mixer};
use super::rope::Rope;
use super::{Classes, Family};
use crate::ModelError;
use isobit_kernels::op::attention::HEAD_WIDTH_MAX;
use serde_json::Value;

/// BOUND: taps of a convolution; published models have four.
const KERNEL_MAX: u64 = 8;
/// Of the norms inside latent attention, fixed by the family.
const LATENT_NORM_EPS: f32 = 1e-6;

/// One mixer per layer, and the channels that are turned.
pub(super) fn mixers(
    fields: Fields,
    family: Family,
    hidden: usize,
    layers: usize,
    rope: &Rope,
) -> Result<(Vec<Mixer>, usize), ModelError> {
    if family == Family::DeepseekV3 {
        let latent = latent(fields, rope)?;
        let width = latent.rotary_width;
        return Ok((vec![Mixer::Latent(latent); layers], width));
    }
    let attention = attention(fields, family, hidden, rope)?;
    let width = attention.rotary_width;
    if family.is_hybrid() {
        let delta = delta(fields, family)?;
        let mixer = |full: bool| {
            if full { Mixer::Attention(attention.clone()) } else { Mixer::Delta(delta.clone()) }
        };
        return Ok((full_layers(fields, layers)?.into_iter().map(mixer).collect(), width));
    }
    let windows = windows(fields, family, layers)?;
    let mixer = |window: Option<usize>| Mixer::Attention(AttentionConfig { window, ..attention.clone() });
    Ok((windows.into_iter().map(mixer).collect(), width))
}

fn attention(fields: Fields, family: Family, hidden: usize, rope: &Rope) -> Result<AttentionConfig, ModelError> {
    let class = Classes::of(family);
    let heads = fields.size("num_attention_heads", AXIS_MAX, class.heads)?;
    let head_width = match fields.optional_size("head_dim", AXIS_MAX)?.or(class.head_width) {
        Some(width) => width,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(fields.wrong(format!("hidden_size {hidden} is no multiple of {heads} heads"))),
    };
    let kv_heads = fields.optional_size("num_key_value_heads", AXIS_MAX)?.or(class.kv_heads).unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        return Err(fields.wrong(format!("{heads} heads do not share {kv_heads} key heads evenly")));
    }
    if head_width > HEAD_WIDTH_MAX || !head_width.is_multiple_of(2) {
        return Err(fields.wrong(format!("head_dim {head_width} is odd or above {HEAD_WIDTH_MAX}")));
    }
    let gated = family.is_hybrid();
    if gated && !fields.flag("attn_output_gate", true)? {
        return Err(fields.wrong("`attn_output_gate` is false: this family's attention is gated"));
    }
    let rotary_width = rope.width(fields, head_width, if gated { 0.25 } else { 1.0 })?;
    if !gated && rotary_width != head_width {
        return Err(fields.wrong("`partial_rotary_factor` is below one: this family turns whole heads"));
    }
    rope.check_sections(fields, rotary_width)?;
    let bias = fields.flag("attention_bias", false)?;
    Ok(AttentionConfig {
        heads,
        kv_heads,
        head_width,
        rotary_width,
        window: None,
        qkv_bias: family == Family::Qwen2 || bias,
        output_bias: family != Family::Qwen2 && bias,
        head_norms: !matches!(family, Family::Qwen2 | Family::Llama),
        gated,
        scale: scale(head_width, 1.0),
    })
}

/// `growth² / √width` in float64, rounded once.
#[expect(clippy::float_arithmetic, reason = "a parameter of the op, host arithmetic")]
fn scale(width: usize, growth: f64) -> f32 {
    (1.0 / (width as f64).sqrt() * growth * growth) as f32
}

fn latent(fields: Fields, rope: &Rope) -> Result<LatentConfig, ModelError> {
    let class = Classes::of(Family::DeepseekV3);
    let heads = fields.size("num_attention_heads", AXIS_MAX, class.heads)?;
    let kv_heads = fields.size("num_key_value_heads", AXIS_MAX, class.kv_heads)?;
    if kv_heads != heads {
        return Err(fields
            .wrong(format!("`num_key_value_heads` is {kv_heads}, `num_attention_heads` {heads}: they must agree")));
    }
    let width = |key: &str, default: usize| fields.size(key, HEAD_WIDTH_MAX as u64, Some(default));
    let (plain_width, rotary_width) = (width("qk_nope_head_dim", 128)?, width("qk_rope_head_dim", 64)?);
    let key_width = plain_width + rotary_width;
    if key_width > HEAD_WIDTH_MAX {
        return Err(
            fields.wrong(format!("`qk_nope_head_dim` and `qk_rope_head_dim` make {key_width}, over {HEAD_WIDTH_MAX}"))
        );
    }
    if !rotary_width.is_multiple_of(2) {
        return Err(fields.wrong(format!("`qk_rope_head_dim` {rotary_width} is odd")));
    }
    if rope.partial.is_some_and(|share| share != 1.0) {
        return Err(fields.wrong("`partial_rotary_factor` is not one: `qk_rope_head_dim` says what is turned"));
    }
    rope.check_sections(fields, rotary_width)?;
    let query_rank =
        if fields.is_null("q_lora_rank") { None } else { Some(fields.size("q_lora_rank", AXIS_MAX, Some(1536))?) };
    Ok(LatentConfig {
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

fn delta(fields: Fields, family: Family) -> Result<DeltaConfig, ModelError> {
    let size = |key: &str, most: u64, default: usize| fields.size(key, most, Some(default));
    let (key_heads, value_heads) =
        (size("linear_num_key_heads", AXIS_MAX, 16)?, size("linear_num_value_heads", AXIS_MAX, 32)?);
    if !value_heads.is_multiple_of(key_heads) {
        let what =
            format!("`linear_num_value_heads` {value_heads} is no multiple of `linear_num_key_heads` {key_heads}");
        return Err(fields.wrong(what));
    }
    Ok(DeltaConfig {
        key_heads,
        value_heads,
        key_width: size("linear_key_head_dim", HEAD_WIDTH_MAX as u64, 128)?,
        value_width: size("linear_value_head_dim", HEAD_WIDTH_MAX as u64, 128)?,
        kernel: size("linear_conv_kernel_dim", KERNEL_MAX, 4)?,
        projections: match family {
            Family::Qwen3Next => DeltaProjections::Joined,
            _ => DeltaProjections::Separate,
        },
    })
}

/// `layer_types`, one entry per layer.
fn layer_types(fields: Fields<'_>, layers: usize) -> Result<Option<&Vec<Value>>, ModelError> {
    let Some(types) = fields.get("layer_types") else { return Ok(None) };
    let types = types.as_array().filter(|types| types.len() == layers);
    types.map(Some).ok_or_else(|| fields.wrong("`layer_types` does not have one entry per layer"))
}

/// Which layers of a hybrid model have softmax attention.
fn full_layers(fields: Fields, layers: usize) -> Result<Vec<bool>, ModelError> {
    let Some(types) = layer_types(fields, layers)? else {
        let interval = fields.size("full_attention_interval", AXIS_MAX, Some(4))?;
        return Ok((1..=layers).map(|number| number.is_multiple_of(interval)).collect());
    };
    let is_full = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(true),
        Some("linear_attention") => Ok(false),
        _ => Err(fields.wrong(format!("layer type {} is not full_attention or linear_attention", shown(kind)))),
    };
    types.iter().map(is_full).collect()
}

fn windows(fields: Fields, family: Family, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let window = fields.optional_size("sliding_window", POSITIONS_MAX)?;
    if family == Family::Llama {
        return Ok(vec![None; layers]);
    }
    let typed = match layer_types(fields, layers)? {
        None => None,
        Some(types) => {
            let of = |kind: &Value| match (kind.as_str(), window) {
                (Some("full_attention"), _) => Ok(None),
                (Some("sliding_attention"), Some(window)) => Ok(Some(window)),
                (Some("sliding_attention"), None) => {
                    Err(fields.wrong("`layer_types` slides without a `sliding_window`"))
                }
                _ => {
                    Err(fields.wrong(format!("layer type {} is not full_attention or sliding_attention", shown(kind))))
                }
            };
            Some(types.iter().map(of).collect::<Result<Vec<_>, _>>()?)
        }
    };
    if let Some(typed) = &typed
        && family != Family::Qwen3Moe
    {
        return Ok(typed.clone());
    }
    if !fields.flag("use_sliding_window", false)? {
        return agreed(fields, typed, vec![None; layers]);
    }
    let window = window.ok_or_else(|| fields.wrong("`use_sliding_window` without a `sliding_window`"))?;
    if family == Family::Qwen3Moe {
        return agreed(fields, typed, vec![Some(window); layers]);
    }
    let first = fields.get("max_window_layers").and_then(Value::as_u64).unwrap_or(28) as usize;
    Ok((0..layers).map(|layer| (layer >= first).then_some(window)).collect())
}

/// The mixture's class does not read `layer_types`: a file in which they say something else has two readings.
fn agreed(
    fields: Fields,
    typed: Option<Vec<Option<usize>>>,
    windows: Vec<Option<usize>>,
) -> Result<Vec<Option<usize>>, ModelError> {
    if typed.is_some_and(|typed| typed != windows) {
        return Err(fields.wrong("`layer_types` and `use_sliding_window` disagree"));
    }
    Ok(windows)
}
