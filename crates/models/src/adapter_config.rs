//! Reads an `adapter_config.json` of any PEFT version. Every key is one of three kinds: supported;
//! irrelevant to what a saved adapter computes; or unsupported, which is an error that names it.
//!
//! The reference is what PEFT does when it loads the same folder: some initialisations modify the
//! base model again at load time, so the same factors mean a different model there.

use crate::ModelError;
use crate::adapter::{LoraConfig, Targets};
use isobit_kernels::op::low_rank::RANK_MAX;
use isobit_proof::name::{harmless, quoted};
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

const FILE: &str = "adapter_config.json";
/// BOUND: characters of an untrusted value that a message repeats.
const SHOWN_MAX: usize = 80;
/// BOUND: alpha, so that scales stay far within float32.
const ALPHA_MAX: f64 = 1e9;

/// Keys that are read below by name.
const READ: [&str; 16] = [
    "alpha_pattern",
    "bias",
    "exclude_modules",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "target_parameters",
    "task_type",
    "use_rslora",
];

/// Keys that do not affect what a saved adapter computes: who made it, from what, and settings of
/// features that a separate key turns on. PEFT itself drops `runtime_config`.
const NEUTRAL: [(&str, JsonType); 14] = [
    ("auto_mapping", JsonType::Object),
    ("base_model_name_or_path", JsonType::Text),
    ("corda_config", JsonType::Object),
    ("ensure_weight_tying", JsonType::Flag),
    ("eva_config", JsonType::Object),
    ("inference_mode", JsonType::Flag),
    ("loftq_config", JsonType::Object),
    ("lora_ga_config", JsonType::Object),
    ("megatron_core", JsonType::Text),
    ("merge_weights", JsonType::Flag),
    ("peft_version", JsonType::Text),
    ("qalora_group_size", JsonType::Whole),
    ("revision", JsonType::Text),
    ("runtime_config", JsonType::Object),
];

/// Keys that turn the same factors into a different adapter, or add tensors to them.
const UNSUPPORTED: [(&str, JsonType); 13] = [
    ("alora_invocation_tokens", JsonType::List),
    ("arrow_config", JsonType::Object),
    ("fan_in_fan_out", JsonType::Flag),
    ("kasa_config", JsonType::Object),
    ("layer_replication", JsonType::List),
    ("lora_bias", JsonType::Flag),
    ("megatron_config", JsonType::Object),
    ("monteclora_config", JsonType::Object),
    ("trainable_token_indices", JsonType::ListOrObject),
    ("use_bdlora", JsonType::Object),
    ("use_dora", JsonType::Flag),
    ("use_qalora", JsonType::Flag),
    ("velora_config", JsonType::Object),
];

/// Values of `init_lora_weights`, besides true and false, with which PEFT adds the factors of the
/// file to the unmodified base.
const INITS: [&str; 5] = ["gaussian", "eva", "orthogonal", "lora_ga", "mica"];
/// Prefixes of the other values that PEFT accepts: on loading such an adapter, it again subtracts
/// the initial factors from the base, or quantises it.
const INITS_OF_BASE: [&str; 4] = ["pissa", "olora", "corda", "loftq"];

#[derive(Clone, Copy)]
enum JsonType {
    Flag,
    Whole,
    Text,
    List,
    Object,
    ListOrObject,
}

impl JsonType {
    fn is(self, value: &Value) -> bool {
        match self {
            Self::Flag => value.is_boolean(),
            Self::Whole => value.is_u64(),
            Self::Text => value.is_string(),
            Self::List => value.is_array(),
            Self::Object => value.is_object(),
            Self::ListOrObject => value.is_array() || value.is_object(),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Flag => "true or false",
            Self::Whole => "a whole number",
            Self::Text => "a string",
            Self::List => "a list",
            Self::Object => "an object",
            Self::ListOrObject => "a list or an object",
        }
    }
}

/// Parses an adapter's config; an error names the unsupported key.
pub fn parse(text: &str) -> Result<LoraConfig, ModelError> {
    let value: Value = serde_json::from_str(text).map_err(|error| wrong(harmless(&error.to_string(), 200)))?;
    let Value::Object(map) = &value else { return Err(wrong("it is not a JSON object")) };
    let keys = Keys { map };
    if keys.get("peft_type") != Some(&Value::from("LORA")) {
        return Err(wrong(format!("`peft_type` is {}, not \"LORA\"", keys.shown("peft_type"))));
    }
    keys.check_others()?;
    keys.check_init()?;
    keys.one_of("bias", "none")?;
    keys.one_of("task_type", "CAUSAL_LM")?;
    let parameters = keys.names("target_parameters")?.unwrap_or_default();
    let targets = match keys.get("target_modules") {
        None if !parameters.is_empty() => Targets::Names(Vec::new()),
        Some(Value::String(text)) if text.eq_ignore_ascii_case("all-linear") => Targets::AllLinear,
        Some(Value::String(text)) => Targets::Pattern(text.clone()),
        _ => {
            Targets::Names(keys.names("target_modules")?.ok_or_else(|| keys.not("target_modules", "a list of names"))?)
        }
    };
    let exclude = match keys.get("exclude_modules") {
        // Here "all-linear" is an ordinary expression.
        Some(Value::String(text)) => Some(Targets::Pattern(text.clone())),
        _ => keys.names("exclude_modules")?.filter(|names| !names.is_empty()).map(Targets::Names),
    };
    let rank = |value: &Value| value.as_u64().filter(|rank| (1..=RANK_MAX as u64).contains(rank));
    let alpha = |value: &Value| value.as_f64().filter(|alpha| alpha.abs() <= ALPHA_MAX);
    let ranks = format!("a whole number from 1 to {RANK_MAX}");
    check_ranks(&keys)?;
    let rank_pattern = keys.pattern("rank_pattern", &ranks, |value| rank(value).map(|rank| rank as usize))?;
    let alpha_pattern = keys.pattern("alpha_pattern", "a number", alpha)?;
    check_order(text)?;
    Ok(LoraConfig {
        rank: keys.get("r").and_then(rank).ok_or_else(|| keys.not("r", &ranks))? as usize,
        alpha: keys.get("lora_alpha").and_then(alpha).ok_or_else(|| keys.not("lora_alpha", "a number"))?,
        dropout: match keys.get("lora_dropout") {
            None => 0.0,
            Some(value) => value
                .as_f64()
                .filter(|share| (0.0..1.0).contains(share))
                .ok_or_else(|| keys.not("lora_dropout", "a number from 0, below 1"))?,
        },
        rslora: match keys.get("use_rslora") {
            None => false,
            Some(value) => value.as_bool().ok_or_else(|| keys.not("use_rslora", "true or false"))?,
        },
        layers: keys.layers(&targets)?,
        targets,
        parameters,
        exclude,
        rank_pattern,
        alpha_pattern,
        saved: keys.saved()?,
    })
}

/// A rank beyond those that are computed here is a whole number all the same: nothing is damaged.
fn check_ranks(keys: &Keys<'_>) -> Result<(), ModelError> {
    let of_modules = keys.get("rank_pattern").and_then(Value::as_object).into_iter().flat_map(|all| all.values());
    let ranks = keys.get("r").into_iter().chain(of_modules).filter_map(Value::as_u64);
    match ranks.max().filter(|rank| *rank > RANK_MAX as u64) {
        None => Ok(()),
        Some(rank) => Err(ModelError::Rank(format!("{FILE}: `r` is {rank}, and ranks are supported up to {RANK_MAX}"))),
    }
}

/// The base named in the file, for messages: errors elsewhere in the file do not matter here.
pub fn base_name(text: &str) -> Option<String> {
    let value: Value = serde_json::from_str(text).ok()?;
    let name = value.get("base_model_name_or_path")?.as_str()?;
    (!name.is_empty()).then(|| harmless(name, 200))
}

/// The first matching pattern counts, in file order. PEFT writes patterns sorted, and the map here
/// keeps them sorted.
fn check_order(text: &str) -> Result<(), ModelError> {
    let orders: Orders = serde_json::from_str(text).map_err(|error| wrong(harmless(&error.to_string(), 200)))?;
    for (key, order) in [("rank_pattern", orders.rank_pattern), ("alpha_pattern", orders.alpha_pattern)] {
        if order.is_some_and(|Order(names)| !names.is_sorted()) {
            return Err(wrong(format!(
                "the patterns of `{key}` are not sorted, and the first that matches counts: sort them"
            )));
        }
    }
    Ok(())
}

#[derive(Deserialize)]
struct Orders {
    rank_pattern: Option<Order>,
    alpha_pattern: Option<Order>,
}

/// The keys of an object in file order.
struct Order(Vec<String>);

impl<'de> Deserialize<'de> for Order {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Order;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Order, A::Error> {
                let mut names = Vec::new();
                while let Some((name, IgnoredAny)) = map.next_entry::<String, IgnoredAny>()? {
                    names.push(name);
                }
                Ok(Order(names))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

fn wrong(what: impl Into<String>) -> ModelError {
    ModelError::Config { file: FILE.to_string(), what: what.into() }
}

fn shown(value: &Value) -> String {
    harmless(&value.to_string(), SHOWN_MAX)
}

/// Null, false and empty values: the key is unused.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

struct Keys<'a> {
    map: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    /// None if the key holds null, too: PEFT writes both.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn shown(&self, key: &str) -> String {
        self.map.get(key).map_or("missing".to_string(), shown)
    }

    fn not(&self, key: &str, wanted: &str) -> ModelError {
        wrong(format!("`{key}` is {}, not {wanted}", self.shown(key)))
    }

    /// Every key that is not read by name.
    fn check_others(&self) -> Result<(), ModelError> {
        let type_in =
            |list: &[(&str, JsonType)], key: &str| list.iter().find(|(name, _)| *name == key).map(|(_, kind)| *kind);
        for (key, value) in self.map {
            if READ.contains(&key.as_str()) || value.is_null() {
                continue;
            }
            if let Some(kind) = type_in(&NEUTRAL, key) {
                if !kind.is(value) {
                    return Err(self.not(key, kind.name()));
                }
            } else if let Some(kind) = type_in(&UNSUPPORTED, key) {
                // A value that turns a feature off may have any empty type; a non-empty value of
                // the wrong type is invalid.
                if !is_empty(value) && !kind.is(value) {
                    return Err(self.not(key, kind.name()));
                }
                if !is_empty(value) {
                    return Err(wrong(format!("`{key}` is {}: only plain LoRA adapters are supported", shown(value))));
                }
            } else if !is_empty(value) {
                return Err(wrong(format!("{} is {}: unknown key", quoted(key), shown(value))));
            }
        }
        Ok(())
    }

    /// How the factors were initialised matters only if loading repeats it.
    fn check_init(&self) -> Result<(), ModelError> {
        let key = "init_lora_weights";
        match self.get(key) {
            None | Some(Value::Bool(_)) => Ok(()),
            Some(Value::String(name)) => {
                let name = name.to_lowercase();
                if INITS.contains(&name.as_str()) {
                    return Ok(());
                }
                let why = if INITS_OF_BASE.iter().any(|start| name.starts_with(start)) {
                    "PEFT changes the base model when it loads such an adapter, and that is not supported: save it as plain \
                     LoRA (`path_initial_model_for_weight_conversion` of PEFT's `save_pretrained`)"
                } else {
                    "unknown initialisation"
                };
                Err(wrong(format!("`{key}` is {}: {why}", self.shown(key))))
            }
            Some(_) => Err(self.not(key, "true, false or a name")),
        }
    }

    fn one_of(&self, key: &str, supported: &str) -> Result<(), ModelError> {
        match self.get(key) {
            None => Ok(()),
            Some(Value::String(text)) if text == supported => Ok(()),
            Some(_) => Err(wrong(format!("`{key}` is {}: only \"{supported}\" is supported", self.shown(key)))),
        }
    }

    fn names(&self, key: &str) -> Result<Option<Vec<String>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let name = |name: &Value| name.as_str().filter(|name| !name.is_empty()).map(str::to_string);
        let names: Option<Vec<String>> = value.as_array().and_then(|list| list.iter().map(name).collect());
        names.map(Some).ok_or_else(|| self.not(key, "a list of names"))
    }

    /// Modules that the adapter holds whole: the head and the embedding table, as PEFT writes them.
    fn saved(&self) -> Result<Vec<String>, ModelError> {
        let key = "modules_to_save";
        let saved = self.names(key)?.unwrap_or_default();
        let known = |name: &String| ["lm_head", "embed_tokens"].contains(&name.rsplit('.').next().unwrap_or(""));
        if !saved.iter().all(known) {
            return Err(self.not(key, "a list of lm_head and embed_tokens"));
        }
        if !saved.is_empty() && self.get("ensure_weight_tying") == Some(&Value::Bool(true)) {
            return Err(wrong(format!("`ensure_weight_tying` with `{key}` is not supported")));
        }
        Ok(saved)
    }

    /// One layer or several; null and an empty list mean all of them.
    fn layers(&self, targets: &Targets) -> Result<Option<Vec<usize>>, ModelError> {
        let key = "layers_to_transform";
        let layer = |value: &Value| value.as_u64().and_then(|layer| usize::try_from(layer).ok());
        let layers: Option<Vec<usize>> = match self.get(key) {
            None => Some(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(layer).collect(),
            Some(value) => layer(value).map(|layer| vec![layer]),
        };
        let layers = layers.ok_or_else(|| self.not(key, "a list of layers"))?;
        // With a different list of modules than the layers, the indices would mean something else.
        let pattern = match self.get("layers_pattern") {
            None => true,
            Some(value) => is_empty(value) || *value == "layers" || *value == json!(["layers"]),
        };
        if !pattern {
            return Err(wrong(format!(
                "`layers_pattern` is {}: only \"layers\" is supported",
                self.shown("layers_pattern")
            )));
        }
        if !layers.is_empty() && matches!(targets, Targets::Pattern(_)) {
            return Err(wrong(format!("`{key}` needs a list of target_modules, not an expression")));
        }
        Ok((!layers.is_empty()).then_some(layers))
    }

    fn pattern<T>(
        &self,
        key: &str,
        wanted: &str,
        of: impl Fn(&Value) -> Option<T>,
    ) -> Result<BTreeMap<String, T>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(BTreeMap::new()) };
        let Value::Object(entries) = value else { return Err(self.not(key, "an object of names and numbers")) };
        let entry = |(name, value): (&String, &Value)| match of(value) {
            Some(found) => Ok((name.clone(), found)),
            None => Err(wrong(format!("`{key}` of {} is {}, not {wanted}", quoted(name), shown(value)))),
        };
        entries.iter().map(entry).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peft::config_json;

    /// What PEFT 0.21 writes for a plain adapter, without the defaults of what is tested below.
    fn of_peft() -> Value {
        json!({
            "alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null,
            "auto_mapping": {"base_model_class": "Qwen2ForCausalLM", "parent_library": "transformers"},
            "base_model_name_or_path": "org/base", "bias": "none", "corda_config": null, "ensure_weight_tying": false,
            "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true,
            "init_lora_weights": true, "kasa_config": null, "layer_replication": null, "layers_pattern": null,
            "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 8, "lora_bias": false, "lora_dropout": 0.0,
            "lora_ga_config": null, "megatron_config": null, "megatron_core": "megatron.core", "modules_to_save": null,
            "monteclora_config": null, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 4,
            "rank_pattern": {}, "revision": null, "target_modules": ["q_proj"], "target_parameters": null,
            "task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_bdlora": null, "use_dora": false,
            "use_qalora": false, "use_rslora": false, "velora_config": null,
        })
    }

    fn with(key: &str, value: Value) -> Result<LoraConfig, ModelError> {
        let mut config = of_peft();
        config[key] = value;
        parse(&config.to_string())
    }

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
        assert_eq!(parse(&text).expect("our own config"), lora);
        assert_eq!(base_name(&text).as_deref(), Some("base"));
    }

    #[test]
    fn a_plain_adapter_of_peft_is_read() {
        let plain = LoraConfig::new(4, 8.0, &["q_proj"]);
        assert_eq!(parse(&of_peft().to_string()).expect("plain"), plain);
        for (key, value) in [
            // Initialisations that loading does not repeat.
            ("init_lora_weights", json!(false)),
            ("init_lora_weights", json!("gaussian")),
            ("init_lora_weights", json!("eva")),
            ("init_lora_weights", json!("orthogonal")),
            ("init_lora_weights", json!("lora_ga")),
            ("init_lora_weights", json!("mica")),
            ("eva_config", json!({"rho": 2.0})),
            ("loftq_config", json!({"loftq_bits": 4})),
            ("ensure_weight_tying", json!(true)),
            ("modules_to_save", json!([])),
            ("alora_invocation_tokens", json!([])),
            ("layers_to_transform", json!([])),
            ("layers_pattern", json!("layers")),
            ("exclude_modules", json!([])),
            ("rank_pattern", json!(null)),
            ("use_rslora", json!(null)),
            // Unknown and unused.
            ("of_tomorrow", json!(null)),
            ("of_tomorrow", json!(false)),
            ("of_tomorrow", json!({})),
            ("of_tomorrow", json!([])),
            ("of_tomorrow", json!("")),
        ] {
            assert_eq!(with(key, value.clone()).unwrap_or_else(|error| panic!("{key} {value}: {error}")), plain);
        }
        assert_eq!(with("layers_to_transform", json!(3)).expect("one layer").layers, Some(vec![3]));
        let saved = with("modules_to_save", json!(["lm_head", "embed_tokens"])).expect("whole modules").saved;
        assert_eq!(saved, ["lm_head", "embed_tokens"]);
        let exclude = with("exclude_modules", json!("all-linear")).expect("an expression").exclude;
        assert_eq!(exclude, Some(Targets::Pattern("all-linear".to_string())));
        let mut config = of_peft();
        config["target_modules"] = json!(null);
        config["target_parameters"] = json!(["mlp.experts.down_proj"]);
        assert_eq!(parse(&config.to_string()).expect("tensors alone").targets, Targets::Names(vec![]));
    }

    #[test]
    fn what_cannot_be_followed_is_an_error_that_names_it() {
        for (key, value) in [
            ("peft_type", json!("IA3")),
            ("peft_type", json!(null)),
            ("init_lora_weights", json!("pissa")),
            ("init_lora_weights", json!("pissa_niter_16")),
            ("init_lora_weights", json!("olora")),
            ("init_lora_weights", json!("OLoRA")),
            ("init_lora_weights", json!("corda")),
            ("init_lora_weights", json!("loftq")),
            ("init_lora_weights", json!("of_tomorrow")),
            ("init_lora_weights", json!(1)),
            ("alora_invocation_tokens", json!([1, 2])),
            ("arrow_config", json!({"top_k": 3})),
            ("bias", json!("all")),
            ("bias", json!("lora_only")),
            ("bias", json!(false)),
            ("fan_in_fan_out", json!(true)),
            ("kasa_config", json!({"beta": 1e-4})),
            ("layer_replication", json!([[0, 1], [0, 2]])),
            ("lora_bias", json!(true)),
            ("megatron_config", json!({"a": 1})),
            ("modules_to_save", json!(["lm_head", "q_proj"])),
            ("modules_to_save", json!("lm_head")),
            ("monteclora_config", json!({"num_samples": 8})),
            ("task_type", json!("SEQ_CLS")),
            ("trainable_token_indices", json!([7])),
            ("trainable_token_indices", json!({"embed_tokens": [7]})),
            ("use_bdlora", json!({"nblocks": 2})),
            ("use_bdlora", json!(true)),
            ("use_dora", json!(true)),
            ("use_dora", json!(1)),
            ("use_dora", json!("true")),
            ("use_qalora", json!(true)),
            ("use_rslora", json!(1)),
            ("velora_config", json!({"num_groups": 2})),
            ("r", json!(0)),
            ("r", json!(65)),
            ("r", json!(4.0)),
            ("r", json!("four")),
            ("lora_alpha", json!(null)),
            ("lora_alpha", json!("8")),
            ("lora_alpha", json!(1e30)),
            ("lora_dropout", json!(1)),
            ("lora_dropout", json!("0.1")),
            ("target_modules", json!(7)),
            ("target_modules", json!(null)),
            ("target_modules", json!(["q_proj", 7])),
            ("target_modules", json!([""])),
            ("target_parameters", json!("mlp.experts.down_proj")),
            ("exclude_modules", json!(7)),
            ("exclude_modules", json!({"q_proj": 1})),
            ("layers_to_transform", json!("1")),
            ("layers_to_transform", json!(-1)),
            ("layers_to_transform", json!([0, "1"])),
            ("layers_to_transform", json!([0.5])),
            ("layers_pattern", json!("blocks")),
            ("layers_pattern", json!(["layers", "blocks"])),
            ("rank_pattern", json!("x")),
            ("rank_pattern", json!([["q_proj", 4]])),
            ("rank_pattern", json!({"q_proj": "x"})),
            ("rank_pattern", json!({"q_proj": 0})),
            ("rank_pattern", json!({"q_proj": 2.5})),
            ("alpha_pattern", json!("x")),
            ("alpha_pattern", json!({"q_proj": true})),
            ("inference_mode", json!("yes")),
            ("auto_mapping", json!("x")),
            ("of_tomorrow", json!(0)),
            ("of_tomorrow", json!(true)),
            ("of_tomorrow", json!([null])),
        ] {
            let error = with(key, value.clone()).expect_err(&format!("{key} {value}")).to_string();
            assert!(error.contains("adapter_config.json") && error.contains(key), "{key} {value}: {error}");
        }
        assert!(parse("[]").is_err() && parse("{").is_err() && parse("{}").is_err());
        let mut config = of_peft();
        config["target_modules"] = json!(".*q_proj");
        config["layers_to_transform"] = json!([1]);
        assert!(parse(&config.to_string()).is_err(), "PEFT refuses this too");
    }

    /// With an unsorted file PEFT would use a different rank.
    #[test]
    fn the_order_of_patterns_is_that_of_their_letters() {
        let text = of_peft().to_string();
        let with =
            |patterns: &str| parse(&text.replace(r#""rank_pattern":{}"#, &format!(r#""rank_pattern":{patterns}"#)));
        assert_eq!(
            with(r#"{".*": 1, "q_proj": 2}"#).expect("sorted").of("a.q_proj").expect("a target"),
            Some((1, 8.0))
        );
        let error = with(r#"{"q_proj": 2, ".*": 1}"#).expect_err("not sorted").to_string();
        assert!(error.contains("`rank_pattern` are not sorted"), "{error}");
    }
}
