//! `config.json` of a model, old and new spellings, checked before anything is allocated.
//!
//! `layer.rs` is what a parsed config says of each layer; `parse_mixer.rs` and `parse_feed.rs` read it as the families spell it, `rope.rs`
//! the rotation, `quantization.rs` how matrices are stored. Keys that no class reads are informational. A file may leave out what its
//! class has a default for; the dense families must say their sizes.

mod fields;
mod layer;
mod parse_feed;
mod parse_mixer;
pub(crate) mod quantization;
mod rope;

pub use layer::{
    AttentionConfig, DeltaConfig, DeltaProjections, ExpertsConfig, Feed, LatentConfig, LayerConfig, Mixer, NormStyle,
    Scoring, Shared,
};
pub use quantization::{Fp8Config, GptqConfig, GptqFormat, Quantization};

use crate::ModelError;
use fields::{AXIS_MAX, Fields, POSITIONS_MAX, wrong};
use isobit_numerics::rope::RopeScaling;
use isobit_proof::name::quoted;
use serde_json::Value;
use std::borrow::Cow;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Qwen2,
    Qwen3,
    Llama,
    Qwen3Moe,
    Qwen3Next,
    /// Qwen3.5 and its successors, dense.
    Qwen35,
    /// The same with experts.
    Qwen35Moe,
    DeepseekV3,
}

impl Family {
    const TYPES: [(&'static str, Self); 10] = [
        ("qwen2", Self::Qwen2),
        ("qwen3", Self::Qwen3),
        ("llama", Self::Llama),
        ("qwen3_moe", Self::Qwen3Moe),
        ("qwen3_next", Self::Qwen3Next),
        ("qwen3_5", Self::Qwen35),
        ("qwen3_5_text", Self::Qwen35),
        ("qwen3_5_moe", Self::Qwen35Moe),
        ("qwen3_5_moe_text", Self::Qwen35Moe),
        ("deepseek_v3", Self::DeepseekV3),
    ];

    fn parse(model_type: &str) -> Result<Self, ModelError> {
        let found = Self::TYPES.iter().find(|(name, _)| *name == model_type).map(|(_, family)| *family);
        found.ok_or_else(|| {
            let known: Vec<&str> = Self::TYPES.iter().map(|(name, _)| *name).collect();
            wrong(format!("model_type {} is not one of {}", quoted(model_type), known.join(", ")))
        })
    }

    /// Whether layers mix by the delta rule or by gated attention.
    pub fn is_hybrid(self) -> bool {
        matches!(self, Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe)
    }
}

/// Everything the forward pass needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub family: Family,
    pub vocabulary: usize,
    pub hidden: usize,
    pub max_positions: usize,
    /// Of all norms but those inside latent attention.
    pub eps: f32,
    pub norm: NormStyle,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// Channels of a head that are turned, the same in all layers that turn any.
    pub rotary_width: usize,
    /// Whether the LM head is the embedding table.
    pub tied: bool,
    pub layers: Vec<LayerConfig>,
    /// Coefficient of the load-balancing loss, one for the whole model; none where the file does not ask for that loss.
    pub balance: Option<f64>,
    /// Whether this is the text part of a larger model: other tools call its modules `model.language_model.…`.
    pub wrapped: bool,
    /// Layers behind the last that may only predict further tokens: their tensors are not read.
    pub prediction_layers: usize,
    pub quantization: Quantization,
}

/// BOUND: layers.
const LAYERS_MAX: u64 = 1 << 12;

/// What the class of a family has as defaults; none where the file must say.
struct Classes {
    vocabulary: Option<usize>,
    hidden: Option<usize>,
    intermediate: Option<usize>,
    layers: Option<usize>,
    heads: Option<usize>,
    kv_heads: Option<usize>,
    head_width: Option<usize>,
    positions: usize,
}

impl Classes {
    fn of(family: Family) -> Self {
        let sizes = |[vocabulary, hidden, intermediate, layers, heads, kv_heads]: [usize; 6], head_width| Self {
            vocabulary: Some(vocabulary),
            hidden: Some(hidden),
            intermediate: Some(intermediate),
            layers: Some(layers),
            heads: Some(heads),
            kv_heads: Some(kv_heads),
            head_width,
            positions: 32768,
        };
        match family {
            Family::Qwen2 | Family::Qwen3 | Family::Llama => Self {
                vocabulary: None,
                hidden: None,
                intermediate: None,
                layers: None,
                heads: None,
                kv_heads: None,
                head_width: (family == Family::Qwen3).then_some(128),
                positions: 32768,
            },
            Family::Qwen3Moe => sizes([151_936, 2048, 6144, 24, 32, 4], None),
            Family::Qwen3Next => sizes([151_936, 2048, 5632, 48, 16, 2], Some(256)),
            Family::Qwen35 => sizes([248_320, 4096, 12288, 32, 16, 4], Some(256)),
            // Every layer has experts: no dense width.
            Family::Qwen35Moe => sizes([248_320, 2048, 0, 40, 16, 2], Some(256)),
            Family::DeepseekV3 => Self { positions: 4096, ..sizes([129_280, 7168, 18432, 61, 128, 128], None) },
        }
    }
}

impl Config {
    /// Reads the text of a `config.json`.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        Self::parse_with(text, None)
    }

    /// The same with the text of a `quantize_config.json`, where one lies beside it.
    pub fn parse_with(text: &str, quantize_config: Option<&str>) -> Result<Self, ModelError> {
        // Reading a decimal number computes.
        isobit_kernels::float_state::restore();
        let value: Value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        if !value.is_object() {
            return Err(wrong("it is not a JSON object"));
        }
        let outer = Fields::new(&value, "config.json");
        let (family, text_part) = family(outer)?;
        let fields = text_part.unwrap_or(outer);
        let act = fields.optional_text("hidden_act")?.unwrap_or("silu");
        if act != "silu" {
            return Err(wrong(format!("hidden_act {} is not silu", quoted(act))));
        }
        let class = Classes::of(family);
        let hidden = fields.size("hidden_size", AXIS_MAX, class.hidden)?;
        let layers = fields.size("num_hidden_layers", LAYERS_MAX, class.layers)?;
        let max_positions = fields.size("max_position_embeddings", POSITIONS_MAX, Some(class.positions))?;
        let rope = rope::parse(fields, max_positions)?;
        let (mixers, rotary_width) = parse_mixer::mixers(fields, family, hidden, layers, &rope)?;
        let feeds = parse_feed::feeds(fields, family, layers)?;
        let balance = parse_feed::balance(fields, family, &feeds)?;
        let eps = fields.number("rms_norm_eps")?.unwrap_or(1e-6) as f32;
        if !(eps > 0.0 && eps < 1.0) {
            return Err(wrong(format!("rms_norm_eps {eps} is not between 0 and 1")));
        }
        Ok(Self {
            family,
            vocabulary: fields.size("vocab_size", AXIS_MAX, class.vocabulary)?,
            hidden,
            max_positions,
            eps,
            norm: if family.is_hybrid() { NormStyle::ZeroCentred } else { NormStyle::Plain },
            rope_theta: rope.theta,
            rope_scaling: rope.scaling,
            rotary_width,
            tied: tied(outer, text_part)?,
            layers: mixers.into_iter().zip(feeds).map(|(mixer, feed)| LayerConfig { mixer, feed }).collect(),
            balance,
            wrapped: text_part.is_some(),
            // DeepSeek's files have one whether their config says so or not.
            prediction_layers: fields.alias(
                ["num_nextn_predict_layers", "num_mtp_layers"],
                LAYERS_MAX,
                usize::from(family == Family::DeepseekV3),
            )?,
            quantization: quantization::parse(&[outer, fields], quantize_config)?,
        })
    }

    /// What other tools call a module or tensor that is `model.…` here: adapters carry these names.
    pub fn module_path<'a>(&self, path: &'a str) -> Cow<'a, str> {
        match path.strip_prefix("model.") {
            Some(rest) if self.wrapped => Cow::Owned(format!("model.language_model.{rest}")),
            _ => Cow::Borrowed(path),
        }
    }
}

/// The family, and the part of the file that describes the text model where it is not the whole.
fn family(outer: Fields<'_>) -> Result<(Family, Option<Fields<'_>>), ModelError> {
    let model_type = outer.text("model_type")?;
    let Some(inner) = outer.object("text_config")? else { return Ok((Family::parse(model_type)?, None)) };
    if !matches!(model_type, "qwen3_5" | "qwen3_5_moe") {
        return Err(wrong(format!(
            "model_type {} has a `text_config`: it is no known multimodal model",
            quoted(model_type)
        )));
    }
    let family = Family::parse(model_type)?;
    match inner.optional_text("model_type")? {
        Some(text_type) if Family::parse(text_type)? != family => {
            Err(wrong(format!("model_type {} holds a text model of type {}", quoted(model_type), quoted(text_type))))
        }
        _ => Ok((family, Some(inner))),
    }
}

/// Inside or outside of the text part; both must agree.
fn tied(outer: Fields, text_part: Option<Fields>) -> Result<bool, ModelError> {
    let key = "tie_word_embeddings";
    let inside = text_part.map_or(Ok(None), |part| part.optional_flag(key))?;
    match (inside, outer.optional_flag(key)?) {
        (Some(a), Some(b)) if a != b => Err(wrong(format!("`{key}` is {a} in `text_config` and {b} outside"))),
        (inside, outside) => Ok(inside.or(outside).unwrap_or(false)),
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
        let attention = |layer: usize| match &config.layers[layer].mixer {
            Mixer::Attention(attention) => attention,
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
            ("\"hidden_size\":32", "\"hidden_size\":34", "no multiple of 4 heads"),
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
