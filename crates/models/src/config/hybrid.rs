//! Layers of the hybrid families: gated softmax attention with partial rotation in some layers, the
//! gated delta rule in the others.

use super::attention::{heads, layer_types, rotated};
use super::fields::{AXIS_MAX, shown};
use super::layer::{AttentionConfig, AttentionKind, DeltaConfig, DeltaNames, DeltaProjections};
use super::text::TextConfig;
use crate::ModelError;
use isobit_kernels::op::attention::HEAD_WIDTH_MAX;
use serde_json::Value;

/// BOUND: taps of a convolution; published models have four.
const KERNEL_MAX: u64 = 8;
/// Rotated share of a head, if the file does not specify it.
const ROTARY_SHARE: f64 = 0.25;

const DELTA: DeltaNames = DeltaNames {
    module: "linear_attn",
    convolution: "conv1d",
    norm: "norm",
    a_log: "A_log",
    dt_bias: "dt_bias",
    output: "out_proj",
};

/// Attention of every layer, and the number of rotated channels per head.
pub(crate) fn attention(
    text: &TextConfig,
    projections: DeltaProjections,
) -> Result<(Vec<AttentionKind>, usize), ModelError> {
    let attention = gated_attention(text)?;
    let rotary_width = attention.rotary_width;
    let delta = delta(text, projections)?;
    let kind = |full: bool| {
        if full { AttentionKind::Softmax(attention.clone()) } else { AttentionKind::Delta(delta.clone()) }
    };
    Ok((full_layers(text)?.into_iter().map(kind).collect(), rotary_width))
}

fn gated_attention(text: &TextConfig) -> Result<AttentionConfig, ModelError> {
    let heads = heads(text)?;
    if !text.fields.flag("attn_output_gate", true)? {
        return Err(text.fields.wrong("`attn_output_gate` is false: this family's attention is gated"));
    }
    let rotary_width = text.rope.width(text.fields, heads.head_width, ROTARY_SHARE)?;
    Ok(AttentionConfig { head_norms: true, gated: true, ..rotated(text, &heads, rotary_width)? })
}

fn delta(text: &TextConfig, projections: DeltaProjections) -> Result<DeltaConfig, ModelError> {
    let size = |key: &str, most: u64, default: usize| text.fields.size(key, most, Some(default));
    let (key_heads, value_heads) =
        (size("linear_num_key_heads", AXIS_MAX, 16)?, size("linear_num_value_heads", AXIS_MAX, 32)?);
    if !value_heads.is_multiple_of(key_heads) {
        let what =
            format!("`linear_num_value_heads` {value_heads} is not a multiple of `linear_num_key_heads` {key_heads}");
        return Err(text.fields.wrong(what));
    }
    Ok(DeltaConfig {
        names: &DELTA,
        key_heads,
        value_heads,
        key_width: size("linear_key_head_dim", HEAD_WIDTH_MAX as u64, 128)?,
        value_width: size("linear_value_head_dim", HEAD_WIDTH_MAX as u64, 128)?,
        kernel: size("linear_conv_kernel_dim", KERNEL_MAX, 4)?,
        projections,
    })
}

/// Which layers have softmax attention.
fn full_layers(text: &TextConfig) -> Result<Vec<bool>, ModelError> {
    let fields = text.fields;
    let Some(types) = layer_types(text)? else {
        let interval = fields.size("full_attention_interval", AXIS_MAX, Some(4))?;
        return Ok((1..=text.layer_count).map(|number| number.is_multiple_of(interval)).collect());
    };
    let is_full = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(true),
        Some("linear_attention") => Ok(false),
        _ => Err(fields.wrong(format!("layer type {} is not full_attention or linear_attention", shown(kind)))),
    };
    types.iter().map(is_full).collect()
}
