//! Phi-3 and Phi-4: queries, keys and values from one module, gate and up from another, a part of
//! each head rotated, and longrope for long texts.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::{self, heads, one_window, rotated, with_windows};
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionConfig, AttentionNames, LayerNames, NormStyle, mlp};
use isobit_numerics::rope::RopeScaling;

pub(super) static FAMILY: Family = Family {
    name: "Phi-3 and Phi-4",
    model_types: &["phi3"],
    multimodal_types: &[],
    file_names: &[],
    defaults: SizeDefaults {
        vocabulary: Some(32064),
        hidden: Some(3072),
        intermediate: Some(8192),
        layers: Some(32),
        heads: Some(32),
        kv_heads: None,
        head_width: None,
        positions: 4096,
    },
    implied: Implied { eps: 1e-5, ..Implied::COMMON },
    norm: NormStyle::Plain,
    layers,
    balance_loss: false,
    prediction: Prediction::NONE,
    peft: PeftRules::Plain,
    gguf: Some(GgufRules { long_rotation: true, heads_fill_hidden: true, ..GgufRules::plain("phi3") }),
};

const NAMES: AttentionNames = AttentionNames { qkv: Some("qkv_proj"), ..attention::NAMES };

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let fields = text.fields;
    for key in ["resid_pdrop", "embd_pdrop"] {
        if fields.number(key)?.is_some_and(|share| share != 0.0) {
            return Err(fields.wrong(format!("`{key}` is not zero: only adapters have dropout here")));
        }
    }
    if !matches!(text.rope.scaling, RopeScaling::Default | RopeScaling::LongRope(_)) {
        return Err(fields.wrong("the rope type is neither default nor longrope, the two of this family"));
    }
    let heads = heads(text)?;
    let rotary_width = text.rope.width(fields, heads.head_width, 1.0)?;
    // The class has no biases: only the type of `attention_bias` is checked.
    let attention =
        AttentionConfig { names: &NAMES, qkv_bias: false, output_bias: false, ..rotated(text, &heads, rotary_width)? };
    let kinds = with_windows(&attention, vec![one_window(text, None)?; text.layer_count]);
    let mlps = vec![mlp::joined(text)?; text.layer_count];
    Ok(Layers::new(&LayerNames::COMMON, rotary_width, kinds, mlps))
}
