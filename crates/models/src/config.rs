//! `config.json` of a dense model, old and new spellings, checked before anything is allocated.

use crate::ModelError;
use isobit_kernels::op::attention::HEAD_WIDTH_MAX;
use isobit_numerics::rope::{RopeScaling, Yarn};
use serde_json::Value;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Qwen2,
    Qwen3,
    Llama,
}

/// Everything the forward pass needs to know.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "the file has that many switches")]
pub struct Config {
    pub family: Family,
    pub vocabulary: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_width: usize,
    pub max_positions: usize,
    pub eps: f32,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// Whether the LM head is the embedding table.
    pub tied: bool,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    /// Keys that a query sees, per layer; all of them where there is none.
    pub windows: Vec<Option<usize>>,
}

// BOUND: what any published model stays far below; larger numbers are malformed files.
const AXIS_MAX: u64 = 1 << 24;
const LAYERS_MAX: u64 = 1 << 12;

impl Config {
    /// Reads the text of a `config.json`.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        let value: Value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let fields = Fields(&value);
        let family = match fields.text("model_type")? {
            "qwen2" => Family::Qwen2,
            "qwen3" => Family::Qwen3,
            "llama" => Family::Llama,
            other => return Err(wrong(format!("model_type `{other}` is not one of qwen2, qwen3, llama"))),
        };
        let act = value.get("hidden_act").and_then(Value::as_str).unwrap_or("silu");
        if act != "silu" {
            return Err(wrong(format!("hidden_act `{act}` is not silu")));
        }
        let heads = fields.size("num_attention_heads", AXIS_MAX)?;
        let hidden = fields.size("hidden_size", AXIS_MAX)?;
        let layers = fields.size("num_hidden_layers", LAYERS_MAX)?;
        let head_width = match fields.optional_size("head_dim", AXIS_MAX)? {
            Some(width) => width,
            None if family == Family::Qwen3 => 128,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(wrong(format!("hidden_size {hidden} is no multiple of {heads} heads"))),
        };
        let max_positions = fields.optional_size("max_position_embeddings", 1 << 30)?.unwrap_or(32768);
        let attention_bias = fields.flag("attention_bias", false)?;
        let (rope_theta, rope_scaling) = rope(&value, max_positions)?;
        let config = Self {
            family,
            vocabulary: fields.size("vocab_size", AXIS_MAX)?,
            hidden,
            intermediate: fields.size("intermediate_size", AXIS_MAX)?,
            layers,
            heads,
            kv_heads: fields.optional_size("num_key_value_heads", AXIS_MAX)?.unwrap_or(heads),
            head_width,
            max_positions,
            eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope_theta,
            rope_scaling,
            tied: fields.flag("tie_word_embeddings", false)?,
            qkv_bias: family == Family::Qwen2 || attention_bias,
            output_bias: family != Family::Qwen2 && attention_bias,
            mlp_bias: family == Family::Llama && fields.flag("mlp_bias", false)?,
            windows: windows(&fields, family, layers)?,
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ModelError> {
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(wrong(format!("{} heads do not share {} key heads evenly", self.heads, self.kv_heads)));
        }
        if self.head_width > HEAD_WIDTH_MAX || !self.head_width.is_multiple_of(2) {
            return Err(wrong(format!("head_dim {} is odd or above {HEAD_WIDTH_MAX}", self.head_width)));
        }
        if !(self.eps > 0.0 && self.eps < 1.0) {
            return Err(wrong(format!("rms_norm_eps {} is not between 0 and 1", self.eps)));
        }
        Ok(())
    }

    /// Whether queries and keys are normalised per head.
    pub fn has_head_norms(&self) -> bool {
        self.family == Family::Qwen3
    }
}

fn wrong(what: impl Into<String>) -> ModelError {
    ModelError::Config { file: "config.json".to_string(), what: what.into() }
}

/// The keys of a JSON object, with errors that name them.
struct Fields<'a>(&'a Value);

impl<'a> Fields<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn text(&self, key: &str) -> Result<&'a str, ModelError> {
        let value = self.get(key).ok_or_else(|| wrong(format!("`{key}` is missing")))?;
        value.as_str().ok_or_else(|| wrong(format!("`{key}` is not a string")))
    }

    fn size(&self, key: &str, most: u64) -> Result<usize, ModelError> {
        self.optional_size(key, most)?.ok_or_else(|| wrong(format!("`{key}` is missing")))
    }

    fn optional_size(&self, key: &str, most: u64) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_u64().filter(|number| (1..=most).contains(number));
        number.map(|number| Some(number as usize)).ok_or_else(|| wrong(format!("`{key}` is {value}, not 1 to {most}")))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().filter(|number| number.is_finite());
        number.map(Some).ok_or_else(|| wrong(format!("`{key}` is {value}, not a number")))
    }

    fn positive(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.number(key)? {
            Some(number) if number <= 0.0 => Err(wrong(format!("`{key}` is {number}, not above zero"))),
            number => Ok(number),
        }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| wrong(format!("`{key}` is {value}, not true or false")))
    }
}

/// Base and scaling: `rope_parameters` of new files, `rope_theta` and `rope_scaling` of old ones.
fn rope(value: &Value, max_positions: usize) -> Result<(f64, RopeScaling), ModelError> {
    let inner =
        ["rope_parameters", "rope_scaling"].into_iter().find_map(|key| Some(value.get(key)?).filter(|v| v.is_object()));
    let empty = Value::Null;
    let (inner, outer) = (Fields(inner.unwrap_or(&empty)), Fields(value));
    let theta = inner.positive("rope_theta")?.or(outer.positive("rope_theta")?).unwrap_or(10000.0);
    let kind = ["rope_type", "type"].into_iter().find_map(|key| inner.get(key).and_then(Value::as_str));
    let factor = || inner.positive("factor")?.ok_or_else(|| wrong("rope scaling has no `factor`"));
    #[expect(clippy::float_arithmetic, reason = "yarn's rule for a missing factor")]
    let stretch = |original: f64| max_positions as f64 / original;
    let original = match inner.positive("original_max_position_embeddings")? {
        Some(original) => original,
        None => outer.positive("original_max_position_embeddings")?.unwrap_or(max_positions as f64),
    };
    let scaling = match kind.unwrap_or("default") {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: factor()? },
        "llama3" => RopeScaling::Llama3 {
            factor: factor()?,
            low_frequency_factor: inner.positive("low_freq_factor")?.unwrap_or(1.0),
            high_frequency_factor: inner.positive("high_freq_factor")?.unwrap_or(4.0),
            original_max_position: original,
        },
        "yarn" => RopeScaling::Yarn(Yarn {
            factor: inner.positive("factor")?.unwrap_or_else(|| stretch(original)),
            original_max_position: original,
            beta_fast: inner.positive("beta_fast")?.unwrap_or(32.0),
            beta_slow: inner.positive("beta_slow")?.unwrap_or(1.0),
            truncate: inner.flag("truncate", true)?,
            attention_factor: inner.positive("attention_factor")?,
            mscale: inner.number("mscale")?.unwrap_or(0.0),
            mscale_all_dim: inner.number("mscale_all_dim")?.unwrap_or(0.0),
        }),
        other => return Err(wrong(format!("rope type `{other}` is not one of default, linear, llama3, yarn"))),
    };
    Ok((theta, scaling))
}

fn windows(fields: &Fields, family: Family, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let window = fields.optional_size("sliding_window", 1 << 30)?;
    if family == Family::Llama {
        return Ok(vec![None; layers]);
    }
    if let Some(types) = fields.get("layer_types") {
        let types = types.as_array().filter(|types| types.len() == layers);
        let types = types.ok_or_else(|| wrong("`layer_types` does not have one entry per layer"))?;
        return types
            .iter()
            .map(|kind| match (kind.as_str(), window) {
                (Some("full_attention"), _) => Ok(None),
                (Some("sliding_attention"), Some(window)) => Ok(Some(window)),
                (Some("sliding_attention"), None) => Err(wrong("`layer_types` slides without a `sliding_window`")),
                _ => Err(wrong(format!("layer type {kind} is not full_attention or sliding_attention"))),
            })
            .collect();
    }
    if !fields.flag("use_sliding_window", false)? {
        return Ok(vec![None; layers]);
    }
    let window = window.ok_or_else(|| wrong("`use_sliding_window` without a `sliding_window`"))?;
    let first = fields.get("max_window_layers").and_then(Value::as_u64).unwrap_or(28) as usize;
    Ok((0..layers).map(|layer| (layer >= first).then_some(window)).collect())
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
        assert_eq!((config.head_width, config.rope_theta, config.tied), (8, 1e6, true));
        assert_eq!(config.windows, [None, Some(5), Some(5)]);
        assert!(config.qkv_bias && !config.output_bias);
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
