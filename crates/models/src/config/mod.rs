//! `config.json` of a model, old and new spellings, checked before anything is allocated.
//!
//! `layer.rs` describes each layer of a parsed config. How a family spells its layers is in its
//! file in `families/`; shared parts are read by `attention.rs`, `hybrid.rs` and `mlp.rs`, the
//! rotation by `rope.rs`, and matrix storage by `quantization.rs`. Keys that no family reads are
//! informational.

pub(crate) mod attention;
pub(crate) mod fields;
pub(crate) mod grouped;
pub(crate) mod hybrid;
mod layer;
pub(crate) mod mlp;
pub(crate) mod quantization;
pub(crate) mod rope;
pub(crate) mod text;

pub use layer::{
    Activation, AttentionConfig, AttentionKind, AttentionNames, DeltaConfig, DeltaNames, DeltaProjections,
    ExpertsConfig, GateUpRows, LatentConfig, LatentNames, LayerConfig, LayerNames, MlpKind, MlpNames, NormStyle,
    Rotary, Scoring, SharedExpertConfig,
};
pub use quantization::{Fp8Config, GptqConfig, GptqFormat, Quantization};
pub use rope::LocalRotation;

use crate::ModelError;
use crate::families::{Family, of_file};
use fields::{AXIS_MAX, Fields, POSITIONS_MAX, wrong};
use isobit_numerics::rope::RopeScaling;
use isobit_proof::name::quoted;
use serde_json::Value;
use std::borrow::Cow;
use text::TextConfig;

/// Everything the forward pass needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub family: &'static Family,
    pub vocabulary: usize,
    pub hidden: usize,
    pub max_positions: usize,
    /// For all norms except those inside latent attention.
    pub eps: f32,
    pub norm: NormStyle,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// The rotation of layers that say so, in some families.
    pub local_rotation: Option<LocalRotation>,
    /// Rotated channels per head, the same in all layers that rotate any.
    pub rotary_width: usize,
    /// Factor on the embedding of tokens.
    pub embedding_scale: Option<f32>,
    /// Factor on the normalised hidden states that the head reads, and so on the logits.
    pub head_scale: Option<f32>,
    /// Logits stay between plus and minus this.
    pub logit_cap: Option<f32>,
    /// Whether the LM head is the embedding table.
    pub tied: bool,
    pub layers: Vec<LayerConfig>,
    /// Coefficient of the load-balancing loss, one for the whole model; none if the file does not
    /// enable that loss.
    pub balance: Option<f64>,
    /// Whether this is the text part of a larger model: other tools call its modules
    /// `model.language_model.…`.
    pub wrapped: bool,
    /// Layers after the last that may only predict further tokens: their tensors are not read.
    pub prediction_layers: usize,
    pub quantization: Quantization,
}

/// BOUND: layers.
const LAYERS_MAX: u64 = 1 << 12;

impl Config {
    /// Reads the text of a `config.json`.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        Self::parse_with(text, None)
    }

    /// The same with the text of a `quantize_config.json`, if there is one.
    pub fn parse_with(text: &str, quantize_config: Option<&str>) -> Result<Self, ModelError> {
        // Parsing a decimal number uses floating-point arithmetic.
        isobit_kernels::float_state::restore();
        let value: Value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        if !value.is_object() {
            return Err(wrong("it is not a JSON object"));
        }
        let outer = Fields::new(&value, "config.json");
        let (family, text_part) = of_file(outer)?;
        let fields = text_part.unwrap_or(outer);
        let activation = family.implied.activation;
        let [key, name] = activation.key_and_name();
        if let Some(other) = fields.optional_text(key)?.filter(|act| *act != name) {
            return Err(wrong(format!("{key} {} is not {name}", quoted(other))));
        }
        let defaults = &family.defaults;
        let hidden = fields.size("hidden_size", AXIS_MAX, defaults.hidden)?;
        let layer_count = fields.size("num_hidden_layers", LAYERS_MAX, defaults.layers)?;
        let max_positions = fields.size("max_position_embeddings", POSITIONS_MAX, Some(defaults.positions))?;
        let rope = rope::parse(fields, max_positions, &family.implied)?;
        let text::Layers { layers, rotary_width, embedding_scale, head_scale, logit_cap } =
            (family.layers)(&TextConfig { fields, defaults, hidden, layer_count, rope: &rope, activation })?;
        let quantization = quantization::parse(&[outer, fields], quantize_config)?;
        quantization::check(fields, &quantization, &layers)?;
        let balance = mlp::balance(fields, &layers)?.filter(|_| family.balance_loss);
        let eps = fields.number("rms_norm_eps")?.unwrap_or(family.implied.eps) as f32;
        if !(eps > 0.0 && eps < 1.0) {
            return Err(wrong(format!("rms_norm_eps {eps} is not between 0 and 1")));
        }
        Ok(Self {
            family,
            vocabulary: fields.size("vocab_size", AXIS_MAX, defaults.vocabulary)?,
            hidden,
            max_positions,
            eps,
            norm: family.norm,
            rope_theta: rope.theta,
            rope_scaling: rope.scaling,
            local_rotation: rope.local,
            rotary_width,
            embedding_scale,
            head_scale,
            logit_cap,
            tied: tied(outer, text_part, family.implied.tied)?,
            layers,
            balance,
            wrapped: text_part.is_some(),
            prediction_layers: fields.alias(
                ["num_nextn_predict_layers", "num_mtp_layers"],
                LAYERS_MAX,
                family.prediction.layers,
            )?,
            quantization,
        })
    }

    /// Other tools' name for our module or tensor `model.…`: adapters use these names.
    pub fn module_path<'a>(&self, path: &'a str) -> Cow<'a, str> {
        match path.strip_prefix("model.") {
            Some(rest) if self.wrapped => Cow::Owned(format!("model.language_model.{rest}")),
            _ => Cow::Borrowed(path),
        }
    }
}

/// May be set inside or outside the text part; both must agree.
fn tied(outer: Fields, text_part: Option<Fields>, implied: bool) -> Result<bool, ModelError> {
    let key = "tie_word_embeddings";
    let inside = text_part.map_or(Ok(None), |part| part.optional_flag(key))?;
    match (inside, outer.optional_flag(key)?) {
        (Some(a), Some(b)) if a != b => Err(wrong(format!("`{key}` is {a} in `text_config` and {b} outside"))),
        (inside, outside) => Ok(inside.or(outside).unwrap_or(implied)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN2: &str = r#"{"model_type":"qwen2","vocab_size":97,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":3,
        "num_attention_heads":4,"num_key_value_heads":2,"rope_theta":1000000.0,"use_sliding_window":true,"sliding_window":5,
        "max_window_layers":1,"tie_word_embeddings":true}"#;

    #[test]
    fn old_spelling() {
        let config = Config::parse(QWEN2).expect("a config");
        let attention = |layer: usize| match &config.layers[layer].attention {
            AttentionKind::Softmax(attention) => attention,
            other => panic!("{other:?}"),
        };
        assert_eq!((attention(0).head_width, config.rope_theta, config.tied), (8, 1e6, true));
        assert_eq!([0, 1, 2].map(|layer| attention(layer).window), [None, Some(5), Some(5)]);
        assert!(attention(0).qkv_bias && !attention(0).output_bias);
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (from, to, wanted) in [
            ("\"vocab_size\":97,", "", "`vocab_size` is missing"),
            ("\"vocab_size\":97", "\"vocab_size\":1e99", "vocab_size"),
            ("\"hidden_size\":32", "\"hidden_size\":-1", "hidden_size"),
            ("\"hidden_size\":32", "\"hidden_size\":34", "not a multiple of 4 heads"),
            ("\"num_key_value_heads\":2", "\"num_key_value_heads\":3", "do not share"),
            ("\"qwen2\"", "\"gpt2\"", "gpt2"),
            ("\"num_hidden_layers\":3", "\"num_hidden_layers\":4000000000", "num_hidden_layers"),
            ("\"sliding_window\":5,", "", "without a `sliding_window`"),
            ("true}", "\"yes\"}", "not true or false"),
            ("{\"model", "{\"rope_scaling\":{\"rope_type\":\"odd\"},\"model", "rope type `odd`"),
            ("{", "", "trailing characters"),
        ] {
            let text = QWEN2.replacen(from, to, 1);
            let error = Config::parse(&text).expect_err(&text).to_string();
            assert!(error.contains(wanted), "{error} for {text}");
        }
    }
}
