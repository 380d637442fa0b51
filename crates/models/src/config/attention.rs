//! Softmax attention with grouped heads, as most families spell it: head counts and widths, biases,
//! sliding windows. A family's file uses these readers and adds its differences.

use super::fields::{AXIS_MAX, Fields, POSITIONS_MAX, shown};
use super::layer::{AttentionConfig, AttentionKind, AttentionNames, Rotary};
use super::text::TextConfig;
use crate::ModelError;
use isobit_kernels::op::attention::HEAD_WIDTH_MAX;
use serde_json::Value;

pub(crate) const NAMES: AttentionNames = AttentionNames {
    module: "self_attn",
    q: "q_proj",
    k: "k_proj",
    v: "v_proj",
    qkv: None,
    o: "o_proj",
    q_norm: "q_norm",
    k_norm: "k_norm",
    sinks: "sinks",
};

/// Attention that rotates whole heads: no head norms, no gate, `attention_bias` for all four
/// projections, every key visible.
pub(crate) fn read(text: &TextConfig) -> Result<AttentionConfig, ModelError> {
    let heads = heads(text)?;
    let rotary_width = text.rope.width(text.fields, heads.head_width, 1.0)?;
    if rotary_width != heads.head_width {
        return Err(text.fields.wrong("`partial_rotary_factor` is below one: this family rotates whole heads"));
    }
    rotated(text, &heads, rotary_width)
}

/// How many heads queries and keys have, and their width.
pub(crate) struct GroupedHeads {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_width: usize,
}

pub(crate) fn heads(text: &TextConfig) -> Result<GroupedHeads, ModelError> {
    let (fields, hidden) = (text.fields, text.hidden);
    let heads = fields.size("num_attention_heads", AXIS_MAX, text.defaults.heads)?;
    let head_width = match fields.optional_size("head_dim", AXIS_MAX)?.or(text.defaults.head_width) {
        Some(width) => width,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(fields.wrong(format!("hidden_size {hidden} is not a multiple of {heads} heads"))),
    };
    let kv_heads = fields.optional_size("num_key_value_heads", AXIS_MAX)?.or(text.defaults.kv_heads).unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        return Err(fields.wrong(format!("{heads} heads do not share {kv_heads} key heads evenly")));
    }
    if head_width > HEAD_WIDTH_MAX || !head_width.is_multiple_of(2) {
        return Err(fields.wrong(format!("head_dim {head_width} is odd or above {HEAD_WIDTH_MAX}")));
    }
    Ok(GroupedHeads { heads, kv_heads, head_width })
}

/// Attention with these heads, whose first channels are rotated.
pub(crate) fn rotated(
    text: &TextConfig,
    heads: &GroupedHeads,
    rotary_width: usize,
) -> Result<AttentionConfig, ModelError> {
    text.rope.check_sections(text.fields, rotary_width)?;
    let bias = text.fields.flag("attention_bias", false)?;
    let &GroupedHeads { heads, kv_heads, head_width } = heads;
    Ok(AttentionConfig {
        names: &NAMES,
        heads,
        kv_heads,
        head_width,
        rotary_width,
        window: None,
        qkv_bias: bias,
        output_bias: bias,
        rotary: Rotary::Global,
        interleaved: false,
        head_norms: false,
        norms_span_heads: false,
        gated: false,
        cap: None,
        sinks: false,
        scale: scale(head_width, 1.0),
    })
}

/// `growth² / √width` in float64, rounded once.
#[expect(clippy::float_arithmetic, reason = "a parameter of the op, host arithmetic")]
pub(crate) fn scale(width: usize, growth: f64) -> f32 {
    (1.0 / (width as f64).sqrt() * growth * growth) as f32
}

/// `1/√width` for a number that a file has in place of the head width, in float64, rounded once.
#[expect(clippy::float_arithmetic, reason = "a parameter of the op, host arithmetic")]
pub(crate) fn scale_of(fields: Fields, key: &str, width: f64) -> Result<f32, ModelError> {
    let scale = (1.0 / width.sqrt()) as f32;
    if scale.is_normal() {
        return Ok(scale);
    }
    Err(fields.wrong(format!("`{key}` {width} is too large or too small for float32")))
}

/// A factor of the file: positive, and a normal number in float32. None if it is one.
pub(crate) fn factor(fields: Fields, key: &str) -> Result<Option<f32>, ModelError> {
    let Some(value) = fields.positive(key)? else { return Ok(None) };
    let factor = value as f32;
    if !factor.is_normal() {
        return Err(fields.wrong(format!("`{key}` {value} is too large or too small for float32")));
    }
    Ok((factor != 1.0).then_some(factor))
}

/// The same attention in every layer, each with its window.
pub(crate) fn with_windows(attention: &AttentionConfig, windows: Vec<Option<usize>>) -> Vec<AttentionKind> {
    let layer = |window| AttentionKind::Softmax(AttentionConfig { window, ..attention.clone() });
    windows.into_iter().map(layer).collect()
}

/// One window for all layers or none: `sliding_window`. Classes that read it do not read
/// `layer_types`: a file in which they say something else has two readings.
pub(crate) fn one_window(text: &TextConfig, default: Option<usize>) -> Result<Option<usize>, ModelError> {
    let typed = typed_windows(text)?;
    let window = typed.window.or(default);
    if typed.layers.is_some_and(|layers| layers.iter().any(|typed| *typed != window)) {
        return Err(text.fields.wrong("`layer_types` and `sliding_window` disagree"));
    }
    Ok(window)
}

/// The window of every layer: from `layer_types`, or with `use_sliding_window` for all layers from
/// `max_window_layers` on.
pub(crate) fn windows(text: &TextConfig) -> Result<Vec<Option<usize>>, ModelError> {
    let typed = typed_windows(text)?;
    if let Some(layers) = typed.layers {
        return Ok(layers);
    }
    let Some(window) = window_in_use(text.fields, typed.window)? else { return Ok(vec![None; text.layer_count]) };
    let first = text.fields.get("max_window_layers").and_then(Value::as_u64).unwrap_or(28) as usize;
    Ok((0..text.layer_count).map(|layer| (layer >= first).then_some(window)).collect())
}

/// Window settings besides `use_sliding_window`.
pub(crate) struct TypedWindows {
    /// `sliding_window`
    pub(crate) window: Option<usize>,
    /// The window of every layer, if given by `layer_types`.
    pub(crate) layers: Option<Vec<Option<usize>>>,
}

pub(crate) fn typed_windows(text: &TextConfig) -> Result<TypedWindows, ModelError> {
    let fields = text.fields;
    let window = fields.optional_size("sliding_window", POSITIONS_MAX)?;
    let Some(types) = layer_types(text)? else { return Ok(TypedWindows { window, layers: None }) };
    let of = |kind: &Value| match (kind.as_str(), window) {
        (Some("full_attention"), _) => Ok(None),
        (Some("sliding_attention"), Some(window)) => Ok(Some(window)),
        (Some("sliding_attention"), None) => {
            Err(fields.wrong("`layer_types` has sliding_attention without a `sliding_window`"))
        }
        _ => Err(fields.wrong(format!("layer type {} is not full_attention or sliding_attention", shown(kind)))),
    };
    let layers = types.iter().map(of).collect::<Result<_, _>>()?;
    Ok(TypedWindows { window, layers: Some(layers) })
}

/// The window, if `use_sliding_window` turns it on.
pub(crate) fn window_in_use(fields: Fields, window: Option<usize>) -> Result<Option<usize>, ModelError> {
    if !fields.flag("use_sliding_window", false)? {
        return Ok(None);
    }
    window.map(Some).ok_or_else(|| fields.wrong("`use_sliding_window` without a `sliding_window`"))
}

/// `layer_types`, one entry per layer.
pub(crate) fn layer_types<'a>(text: &TextConfig<'a>) -> Result<Option<&'a Vec<Value>>, ModelError> {
    let Some(types) = text.fields.get("layer_types") else { return Ok(None) };
    let types = types.as_array().filter(|types| types.len() == text.layer_count);
    types.map(Some).ok_or_else(|| text.fields.wrong("`layer_types` does not have one entry per layer"))
}
