//! How a model's matrices are quantised: `quantization_config` of `config.json`, and GPTQ's
//! `quantize_config.json`. AWQ stores the same integers as GPTQ, packed differently.
//!
//! This defines how to read the file's contents; its tensors decide which modules are quantised.

use super::fields::{AXIS_MAX, Fields, shown};
use super::layer::{GateUpRows, LayerConfig, MlpKind};
use crate::ModelError;
use isobit_proof::name::quoted;
use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
pub enum Quantization {
    None,
    /// 4-bit checkpoints of bitsandbytes: every matrix describes itself.
    Bitsandbytes,
    Fp8(Fp8Config),
    Gptq(GptqConfig),
    /// 4-bit floats with a scale per 32: the experts of gpt-oss.
    Mxfp4,
}

/// Float8 matrices (e4m3) with a scale per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Config {
    /// Rows and columns of a block; blocks at the edges are smaller.
    pub block: [usize; 2],
}

/// 4-bit integer matrices with a scale and a zero per group of inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct GptqConfig {
    /// Inputs per group; none if all inputs form one group.
    pub group_size: Option<usize>,
    /// Whether groups do not follow the order of the inputs: `g_idx` must then be present.
    pub desc_act: bool,
    /// Whether every zero is 8; none if the file does not specify it.
    pub symmetric: Option<bool>,
    pub format: GptqFormat,
    /// Expressions for modules that are not quantised, matched from the start of the module's path.
    pub excluded: Vec<String>,
    pub lm_head: bool,
}

/// How integers and zeros are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GptqFormat {
    /// `gptq`: every 32-bit word of zeros minus 0x11111111.
    V1,
    /// `gptq_v2`: zeros unchanged.
    V2,
    /// AWQ's `gemm`: packed along outputs in an order of its own, zeros unchanged.
    Awq,
}

impl GptqFormat {
    /// The method's name in `quant_method`.
    pub fn method(self) -> &'static str {
        match self {
            Self::V1 | Self::V2 => "gptq",
            Self::Awq => "awq",
        }
    }
}

const QUANTIZE_CONFIG: &str = "quantize_config.json";
/// BOUND: rows or columns of a block of float8.
const BLOCK_MAX: usize = 1 << 16;

/// `places` are the objects that may hold `quantization_config`; the first one that does is used.
pub(crate) fn parse(places: &[Fields], quantize_config: Option<&str>) -> Result<Quantization, ModelError> {
    let mut inside = None;
    for fields in places {
        inside = inside.or(fields.object("quantization_config")?);
    }
    let beside: Option<Value> = match quantize_config {
        None => None,
        Some(text) => Some(serde_json::from_str(text).map_err(|error| {
            let what = isobit_proof::name::harmless(&error.to_string(), 200);
            ModelError::Config { file: QUANTIZE_CONFIG.to_string(), what }
        })?),
    };
    let beside = beside.as_ref().map(|value| Fields::new(value, QUANTIZE_CONFIG));
    match (inside, beside) {
        (None, None) => Ok(Quantization::None),
        (Some(fields), beside) => match fields.text("quant_method")? {
            "fp8" => Ok(Quantization::Fp8(fp8(fields)?)),
            "gptq" => Ok(Quantization::Gptq(gptq(&Pair(fields, beside))?)),
            "awq" => Ok(Quantization::Gptq(awq(&Pair(fields, None))?)),
            "mxfp4" => Ok(Quantization::Mxfp4),
            "bitsandbytes" => bitsandbytes(&Pair(fields, None)),
            other => Err(fields
                .wrong(format!("`quant_method` {} is not one of awq, bitsandbytes, fp8, gptq, mxfp4", quoted(other)))),
        },
        // Older files have no `quantization_config`, and `quantize_config.json` supports only this
        // method.
        (None, Some(fields)) => match fields.optional_text("quant_method")? {
            None | Some("gptq") => Ok(Quantization::Gptq(gptq(&Pair(fields, None))?)),
            Some(other) => Err(fields.wrong(format!("`quant_method` {} is not gptq", quoted(other)))),
        },
    }
}

/// Only experts whose gate and up rows alternate are stored as MXFP4, and in no other way.
pub(crate) fn check(fields: Fields, quantization: &Quantization, layers: &[LayerConfig]) -> Result<(), ModelError> {
    let alternates = |layer: &LayerConfig| match &layer.mlp {
        MlpKind::Experts(experts) => experts.gate_up_rows == GateUpRows::Alternating,
        MlpKind::Dense { .. } => false,
    };
    match (layers.iter().any(alternates), quantization) {
        (_, Quantization::None)
        | (true, Quantization::Mxfp4)
        | (false, Quantization::Fp8(_) | Quantization::Gptq(_) | Quantization::Bitsandbytes) => Ok(()),
        (true, _) => Err(fields.wrong("`quant_method` is not mxfp4, the only one that is read in this family")),
        (false, Quantization::Mxfp4) => Err(fields.wrong("`quant_method` mxfp4 is not read in this family")),
    }
}

fn fp8(fields: Fields) -> Result<Fp8Config, ModelError> {
    if fields.optional_text("fmt")?.is_some_and(|format| format != "e4m3") {
        return Err(fields.wrong("`fmt` is not e4m3"));
    }
    if fields.is_null("weight_block_size") {
        return Err(fields.wrong("`weight_block_size` is null: only scales per block are supported"));
    }
    let block = fields.numbers("weight_block_size", BLOCK_MAX as u64)?.unwrap_or_else(|| vec![128, 128]);
    match block[..] {
        [rows, columns] if rows > 0 && columns > 0 => Ok(Fp8Config { block: [rows, columns] }),
        _ => Err(fields.wrong("`weight_block_size` is not two numbers above zero")),
    }
}

/// The two locations of GPTQ's settings. A setting may be in either; if in both, they must agree.
struct Pair<'a>(Fields<'a>, Option<Fields<'a>>);

impl<'a> Pair<'a> {
    /// The value of a key under any of its names, and the file it comes from.
    fn get(&self, keys: &[&str]) -> Result<Option<(&'a str, &'a Value, Fields<'a>)>, ModelError> {
        let mut found: Option<(&str, &Value, Fields)> = None;
        for fields in [Some(self.0), self.1].into_iter().flatten() {
            for key in keys {
                let Some((name, value)) = fields.entries().find(|(name, value)| name == key && !value.is_null()) else {
                    continue;
                };
                match found {
                    Some((_, first, _)) if first != value => {
                        let what = format!("`{name}` is {} here and {} elsewhere", shown(value), shown(first));
                        return Err(fields.wrong(what));
                    }
                    Some(_) => {}
                    None => found = Some((name, value, fields)),
                }
            }
        }
        Ok(found)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.get(&[key])? {
            None => Ok(None),
            Some((name, _, fields)) => fields.optional_flag(name),
        }
    }

    fn wrong(&self, what: String) -> ModelError {
        self.0.wrong(what)
    }
}

fn bitsandbytes(pair: &Pair) -> Result<Quantization, ModelError> {
    if pair.flag("load_in_4bit")? != Some(true) {
        return Err(pair.wrong("only bitsandbytes with `load_in_4bit` is supported, not with 8 bits".to_string()));
    }
    for (key, known) in [("bnb_4bit_quant_type", &["nf4", "fp4"][..]), ("bnb_4bit_quant_storage", &["uint8"])] {
        if let Some((key, value, fields)) = pair.get(&[key])?
            && !value.as_str().is_some_and(|value| known.contains(&value))
        {
            return Err(fields.wrong(format!("`{key}` is {}, not one of {}", shown(value), known.join(", "))));
        }
    }
    Ok(Quantization::Bitsandbytes)
}

fn four_bits(pair: &Pair, method: &str) -> Result<(), ModelError> {
    let bits = pair.get(&["bits", "w_bit"])?.ok_or_else(|| pair.wrong("`bits` is missing".to_string()))?;
    if bits.1.as_u64() != Some(4) {
        return Err(bits.2.wrong(format!("`bits` is {}: only {method} with 4 bits is supported", shown(bits.1))));
    }
    Ok(())
}

fn awq(pair: &Pair) -> Result<GptqConfig, ModelError> {
    four_bits(pair, "AWQ")?;
    for key in ["version", "format"] {
        if let Some((key, value, fields)) = pair.get(&[key])?
            && !value.as_str().is_some_and(|name| name.eq_ignore_ascii_case("gemm"))
        {
            return Err(fields.wrong(format!("`{key}` is {}: only AWQ's packing \"gemm\" is supported", shown(value))));
        }
    }
    if let Some((key, value, fields)) = pair.get(&["backend"])?
        && value == "llm-awq"
    {
        return Err(fields.wrong(format!("`{key}` is {}: only files of AutoAWQ are supported", shown(value))));
    }
    if pair.flag("zero_point")? == Some(false) {
        return Err(pair.wrong("`zero_point` is false: only AWQ with zero points is supported".to_string()));
    }
    Ok(GptqConfig {
        group_size: group_size(pair)?,
        desc_act: false,
        symmetric: None,
        format: GptqFormat::Awq,
        excluded: not_converted(pair)?,
        lm_head: false,
    })
}

/// `modules_to_not_convert`: a name excludes the modules whose path begins or ends with it.
fn not_converted(pair: &Pair) -> Result<Vec<String>, ModelError> {
    let Some((key, value, fields)) = pair.get(&["modules_to_not_convert"])? else { return Ok(Vec::new()) };
    let names = value.as_array().and_then(|names| names.iter().map(Value::as_str).collect::<Option<Vec<&str>>>());
    let names = names.ok_or_else(|| fields.wrong(format!("`{key}` is {}, not a list of names", shown(value))))?;
    let pattern = |name: &str| {
        let name = regex::escape(name);
        format!("{name}|.*{name}$")
    };
    Ok(names.into_iter().filter(|name| !name.is_empty()).map(pattern).collect())
}

fn gptq(pair: &Pair) -> Result<GptqConfig, ModelError> {
    four_bits(pair, "GPTQ")?;
    if let Some((name, value, fields)) = pair.get(&["pack_dtype"])?
        && value != "int32"
    {
        return Err(fields.wrong(format!("`{name}` is {}, not \"int32\"", shown(value))));
    }
    if pair.flag("is_marlin_format")? == Some(true) {
        return Err(
            pair.wrong("`is_marlin_format` is true: only the formats gptq and gptq_v2 are supported".to_string())
        );
    }
    let format = match pair.get(&["checkpoint_format", "format"])? {
        None => GptqFormat::V1,
        Some((_, Value::String(name), _)) if name == "gptq" => GptqFormat::V1,
        Some((_, Value::String(name), _)) if name == "gptq_v2" => GptqFormat::V2,
        Some((key, value, fields)) => {
            return Err(fields.wrong(format!("`{key}` is {}, not \"gptq\" or \"gptq_v2\"", shown(value))));
        }
    };
    Ok(GptqConfig {
        group_size: group_size(pair)?,
        desc_act: pair.flag("desc_act")?.unwrap_or(false),
        symmetric: pair.flag("sym")?,
        format,
        excluded: excluded(pair)?,
        lm_head: pair.flag("lm_head")?.unwrap_or(false),
    })
}

fn group_size(pair: &Pair) -> Result<Option<usize>, ModelError> {
    let found = pair.get(&["group_size", "q_group_size"])?;
    let (key, value, fields) = found.ok_or_else(|| pair.wrong("`group_size` is missing".to_string()))?;
    match value.as_i64() {
        Some(-1) => Ok(None),
        Some(size) if size > 0 && size % 8 == 0 && size <= AXIS_MAX as i64 => Ok(Some(size as usize)),
        _ => Err(fields.wrong(format!("`{key}` is {}, not -1 or a multiple of 8", shown(value)))),
    }
}

/// Per-module rules: those that exclude modules are supported, those that change how one is
/// quantised are not.
fn excluded(pair: &Pair) -> Result<Vec<String>, ModelError> {
    let Some((key, value, fields)) = pair.get(&["dynamic"])? else { return Ok(Vec::new()) };
    let Value::Object(rules) = value else {
        // Writers use `false` or an empty list for no rule.
        let empty = value == &Value::Bool(false) || value.as_array().is_some_and(Vec::is_empty);
        return if empty { Ok(Vec::new()) } else { Err(fields.wrong(format!("`{key}` is {}", shown(value)))) };
    };
    let mut excluded = Vec::new();
    for (rule, overrides) in rules {
        match rule.strip_prefix("-:") {
            Some(pattern) => {
                expression(pattern).map_err(|what| fields.wrong(format!("`{key}` {}: {what}", quoted(rule))))?;
                excluded.push(pattern.to_string());
            }
            None if overrides.as_object().is_some_and(serde_json::Map::is_empty) => {}
            None => {
                let what = format!("`{key}` {} changes how a module is quantised: that is not supported", quoted(rule));
                return Err(fields.wrong(what));
            }
        }
    }
    Ok(excluded)
}

/// A regular expression anchored at the start of a path.
pub(crate) fn expression(pattern: &str) -> Result<regex::Regex, String> {
    regex::Regex::new(&format!("^(?:{pattern})"))
        .map_err(|error| isobit_proof::name::harmless(&error.to_string().replace('\n', " "), 200))
}
