//! Adapters as PEFT writes and reads them: `adapter_config.json` and the names of the tensors.

use crate::ModelError;
use crate::adapter::{LoraConfig, Targets};
use crate::build::Built;
use isobit_kernels::Backend;
use isobit_proof::safetensors::SafeTensors;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// What `adapter_config.json` says of an adapter on the base named `base`.
pub fn config_json(lora: &LoraConfig, base: &str) -> Value {
    let targets = |targets: &Targets| match targets {
        Targets::AllLinear => json!("all-linear"),
        Targets::Names(names) => json!(names),
        Targets::Pattern(pattern) => json!(pattern),
    };
    json!({
        "alpha_pattern": lora.alpha_pattern,
        "auto_mapping": null,
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": lora.exclude.as_ref().map(targets),
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": null,
        "layers_to_transform": lora.layers,
        "lora_alpha": whole(lora.alpha),
        "lora_bias": false,
        "lora_dropout": lora.dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": lora.rank,
        "rank_pattern": lora.rank_pattern,
        "revision": null,
        "target_modules": targets(&lora.targets),
        "target_parameters": (!lora.parameters.is_empty()).then_some(&lora.parameters),
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": lora.rslora,
    })
}

/// PEFT writes whole numbers as integers.
fn whole(number: f64) -> Value {
    if libm::trunc(number) == number && number.abs() < 1e15 { json!(number as i64) } else { json!(number) }
}

/// Reads an `adapter_config.json` of any tool; what we do not support is an error, not a silence.
pub fn parse_config(text: &str) -> Result<LoraConfig, ModelError> {
    let wrong = |what: String| ModelError::Config { file: "adapter_config.json".to_string(), what };
    let value: Value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
    if value["peft_type"] != "LORA" {
        return Err(wrong(format!("`peft_type` is {}, not \"LORA\"", value["peft_type"])));
    }
    for key in ["use_dora", "lora_bias", "fan_in_fan_out"] {
        if value[key] == true {
            return Err(wrong(format!("`{key}` is not supported")));
        }
    }
    if value["modules_to_save"].as_array().is_some_and(|list| !list.is_empty()) {
        return Err(wrong("`modules_to_save` is not supported".to_string()));
    }
    let number =
        |key: &str| value[key].as_f64().ok_or_else(|| wrong(format!("`{key}` is {}, not a number", value[key])));
    let rank = value["r"].as_u64().filter(|rank| (1..=64).contains(rank));
    let strings = |value: &Value| -> Option<Vec<String>> {
        value.as_array()?.iter().map(|name| name.as_str().map(str::to_string)).collect()
    };
    let targets = |value: &Value| match value {
        Value::String(text) if text.eq_ignore_ascii_case("all-linear") => Some(Targets::AllLinear),
        Value::String(text) => Some(Targets::Pattern(text.clone())),
        other => strings(other).map(Targets::Names),
    };
    let pattern = |key: &str| -> Result<BTreeMap<String, f64>, ModelError> {
        let entries = value[key].as_object().into_iter().flatten();
        let number = |(name, value): (&String, &Value)| {
            let value = value.as_f64().ok_or_else(|| wrong(format!("`{key}` of {name} is not a number")))?;
            Ok((name.clone(), value))
        };
        entries.map(number).collect()
    };
    let layers = match &value["layers_to_transform"] {
        Value::Null => None,
        Value::Number(layer) => Some(vec![layer.as_u64().unwrap_or(0) as usize]),
        Value::Array(list) => Some(list.iter().filter_map(Value::as_u64).map(|layer| layer as usize).collect()),
        other => return Err(wrong(format!("`layers_to_transform` is {other}"))),
    };
    Ok(LoraConfig {
        rank: rank.ok_or_else(|| wrong(format!("`r` is {}, not 1 to 64", value["r"])))? as usize,
        alpha: number("lora_alpha")?,
        dropout: value["lora_dropout"].as_f64().unwrap_or(0.0),
        rslora: value["use_rslora"] == true,
        targets: targets(&value["target_modules"])
            .ok_or_else(|| wrong(format!("`target_modules` is {}", value["target_modules"])))?,
        parameters: match &value["target_parameters"] {
            Value::Null => Vec::new(),
            list => {
                strings(list).ok_or_else(|| wrong(format!("`target_parameters` is {list}, not a list of names")))?
            }
        },
        exclude: targets(&value["exclude_modules"]).filter(|_| !value["exclude_modules"].is_null()),
        layers,
        rank_pattern: pattern("rank_pattern")?.into_iter().map(|(name, rank)| (name, rank as usize)).collect(),
        alpha_pattern: pattern("alpha_pattern")?,
    })
}

/// Puts the tensors of an adapter's file in place. Every trained tensor must be there, with its shape, and nothing else.
pub fn load<B: Backend>(backend: &B, built: &mut Built<B>, file: &SafeTensors) -> Result<(), ModelError> {
    let Built { model, parameters } = built;
    let ids: Vec<_> = parameters.iter().map(|(id, _)| id).collect();
    for &id in &ids {
        let values = model.from_file(id, parameters.get(id), |name, shape| {
            let tensor = file.get(name)?;
            let wrong = |what: String| ModelError::Tensor { name: name.to_string(), what };
            if tensor.shape != shape {
                return Err(wrong(format!("its shape is {:?}, the adapter's config says {shape:?}", tensor.shape)));
            }
            let values = tensor.to_f32()?;
            match values.iter().position(|value| !value.is_finite()) {
                None => Ok(values),
                Some(at) => Err(wrong(format!("element {at} is {}", values[at]))),
            }
        })?;
        parameters.get_mut(id).value = backend.upload(&values);
    }
    let known: BTreeSet<_> = parameters.iter().flat_map(|(id, parameter)| model.names_in_file(id, parameter)).collect();
    match file.names().find(|name| !known.contains(*name)) {
        Some(extra) => Err(ModelError::Adapter(format!("{extra} belongs to no module that the config targets"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let mut lora = LoraConfig::new(4, 8.0, &["q_proj", "v_proj"]);
        lora.rslora = true;
        lora.dropout = 0.05;
        lora.layers = Some(vec![1]);
        lora.parameters = vec!["mlp.experts.down_proj".to_string()];
        lora.rank_pattern.insert("q_proj".to_string(), 2);
        lora.alpha_pattern.insert("q_proj".to_string(), 3.5);
        let text = config_json(&lora, "base").to_string();
        assert_eq!(parse_config(&text).expect("our own config"), lora);
    }

    #[test]
    fn what_is_not_supported_is_an_error() {
        let good = config_json(&LoraConfig::new(4, 8.0, &["q_proj"]), "base");
        for (key, value) in [
            ("peft_type", json!("IA3")),
            ("use_dora", json!(true)),
            ("modules_to_save", json!(["lm_head"])),
            ("r", json!(0)),
            ("r", json!("four")),
            ("lora_alpha", json!(null)),
            ("target_modules", json!(7)),
            ("target_parameters", json!("mlp.experts.down_proj")),
            ("rank_pattern", json!({"q_proj": "x"})),
        ] {
            let mut bad = good.clone();
            bad[key] = value;
            assert!(parse_config(&bad.to_string()).is_err(), "{key}");
        }
    }
}
