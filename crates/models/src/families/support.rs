//! What each family supports, as plain data for `isobit models` and the docs. Nothing is stated
//! twice: a small config of each family goes through the loader's own parsing and checks, and what
//! they accept is listed.

use super::{FAMILIES, Family};
use crate::adapter::LoraConfig;
use crate::build::ExpertTensor;
use crate::config::{AttentionKind, Config, LayerConfig, MlpKind};
use crate::experts::Projection;
use crate::inventory::Inventory;
use serde::Serialize;
use serde_json::{Value, json};

/// One family, as listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "what is supported, one answer each")]
pub struct FamilySupport {
    pub name: &'static str,
    pub model_types: Vec<&'static str>,
    /// Those whose text model may be part of a multimodal one.
    pub multimodal_types: Vec<&'static str>,
    pub attention: Vec<&'static str>,
    pub mlp: Vec<&'static str>,
    /// Names that `lora_target_modules` may hold.
    pub lora_modules: Vec<String>,
    /// Whether it may be "all-linear".
    pub lora_all_linear: bool,
    /// Names of fused experts that `lora_target_parameters` may hold.
    pub lora_expert_parameters: Vec<String>,
    /// Names that `lora_target_modules` may hold for adapters on the modules of every expert.
    pub lora_per_expert_modules: Vec<&'static str>,
    /// Whether a 4-bit GPTQ base is read.
    pub gptq_4bit: bool,
    /// Whether a float8 base is read.
    pub fp8: bool,
    /// Whether experts in MXFP4 are read.
    pub mxfp4: bool,
    /// Whether the head may be tied to the embedding table.
    pub tied_head: bool,
    /// Whether there is a load-balancing loss for its routers.
    pub balance_loss: bool,
    /// Always: every kind of layer has a cache for generation.
    pub generation: bool,
}

/// Every family and what it supports.
pub fn families() -> Vec<FamilySupport> {
    FAMILIES.iter().copied().map(support).collect()
}

/// A config with sizes that every family accepts and enough layers to show each of its kinds.
fn config(family: &Family, more: Option<(&str, Value)>) -> Option<Config> {
    let mut text = json!({"model_type": family.model_types[0], "vocab_size": 8, "hidden_size": 8,
        "intermediate_size": 8, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 2});
    if let Some((key, value)) = more {
        text[key] = value;
    }
    Config::parse(&text.to_string()).ok()
}

fn support(family: &'static Family) -> FamilySupport {
    let parses = |key: &str, value: Value| config(family, Some((key, value)));
    let small = config(family, None).expect("every family takes these sizes: a test says so");
    let accepted = |lora: &LoraConfig| family.peft.check(&small, lora).is_ok();
    let inventory = Inventory::of(&small);
    let mut names: Vec<&str> = family.lora_modules().unwrap_or_default().to_vec();
    for path in inventory.adaptable() {
        let name = path.rsplit('.').next().unwrap_or(path);
        if !names.contains(&name) && accepted(&LoraConfig::new(1, 1.0, &[name])) {
            names.push(name);
        }
    }
    let per_expert = Projection::ALL.map(Projection::module);
    let per_expert_lora = LoraConfig::new(1, 1.0, &per_expert);
    let converts = family.peft.per_expert(&small, &per_expert_lora) && accepted(&per_expert_lora);
    FamilySupport {
        name: family.name,
        model_types: family.model_types.to_vec(),
        multimodal_types: family.multimodal_types.to_vec(),
        attention: kinds(&small, |layer| attention(&layer.attention)),
        mlp: kinds(&small, |layer| mlp(&layer.mlp)),
        lora_modules: names.into_iter().map(str::to_string).collect(),
        lora_all_linear: family.lora_modules().is_none(),
        lora_expert_parameters: expert_parameters(family, &small),
        lora_per_expert_modules: if converts { per_expert.to_vec() } else { Vec::new() },
        gptq_4bit: parses("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 128}))
            .is_some(),
        fp8: parses("quantization_config", json!({"quant_method": "fp8"})).is_some(),
        mxfp4: parses("quantization_config", json!({"quant_method": "mxfp4"})).is_some(),
        tied_head: parses("tie_word_embeddings", json!(true)).is_some_and(|config| config.tied),
        balance_loss: parses("output_router_logits", json!(true)).is_some_and(|config| config.balance.is_some()),
        generation: true,
    }
}

/// The fused expert tensors that may be targets, named from the layer down.
fn expert_parameters(family: &Family, small: &Config) -> Vec<String> {
    let sparse = |layer: &&LayerConfig| matches!(layer.mlp, MlpKind::Experts(_));
    let Some(layer) = small.layers.iter().find(sparse) else { return Vec::new() };
    let accepted = |name: &String| {
        let lora = LoraConfig { parameters: vec![name.clone()], ..LoraConfig::new(1, 1.0, &[]) };
        family.peft.check(small, &lora).is_ok()
    };
    let names = ExpertTensor::ALL.map(|tensor| format!("{}.experts.{}", layer.names.mlp, tensor.name()));
    names.into_iter().filter(accepted).collect()
}

/// What the layers contain, each kind once, in layer order.
fn kinds(config: &Config, of: impl Fn(&LayerConfig) -> &'static str) -> Vec<&'static str> {
    let mut kinds = Vec::new();
    for kind in config.layers.iter().map(of) {
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    kinds
}

fn attention(kind: &AttentionKind) -> &'static str {
    match kind {
        AttentionKind::Softmax(config) if config.gated => "gated softmax",
        AttentionKind::Softmax(_) => "softmax",
        AttentionKind::Latent(_) => "latent",
        AttentionKind::Delta(_) => "gated delta rule",
    }
}

fn mlp(kind: &MlpKind) -> &'static str {
    match kind {
        MlpKind::Dense { .. } => "dense",
        MlpKind::Experts(config) if config.shared.is_some() => "experts and a shared expert",
        MlpKind::Experts(_) => "experts",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(model_type: &str) -> FamilySupport {
        let found = families().into_iter().find(|family| family.model_types.contains(&model_type));
        found.expect("a family")
    }

    /// The loader reads a small config of each, and no `model_type` belongs to two families.
    #[test]
    fn every_family_is_listed_once() {
        let all = families();
        assert_eq!(all.len(), FAMILIES.len());
        let mut types: Vec<&str> = all.iter().flat_map(|family| family.model_types.clone()).collect();
        let count = types.len();
        types.sort_unstable();
        types.dedup();
        assert_eq!(types.len(), count);
        for family in &all {
            assert!(family.multimodal_types.iter().all(|of| family.model_types.contains(of)), "{}", family.name);
            assert!(family.gptq_4bit != family.mxfp4 && family.fp8 != family.mxfp4, "{}", family.name);
            assert!(family.tied_head, "{}", family.name);
        }
    }

    #[test]
    fn what_is_listed_is_what_the_loader_takes() {
        let dense = of("qwen2");
        let seven = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        assert_eq!(dense.lora_modules, seven);
        assert!(dense.lora_all_linear && dense.lora_expert_parameters.is_empty() && !dense.balance_loss);
        assert_eq!((dense.attention, dense.mlp), (vec!["softmax"], vec!["dense"]));
        let mixture = of("qwen3_moe");
        assert_eq!(mixture.lora_modules, seven[..4]);
        assert_eq!(mixture.lora_per_expert_modules, seven[4..]);
        assert_eq!(mixture.lora_expert_parameters, ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]);
        assert!(!mixture.lora_all_linear && mixture.balance_loss);
        let hybrid = of("qwen3_5_moe_text");
        assert_eq!(hybrid.attention, ["gated delta rule", "gated softmax"]);
        assert!(hybrid.lora_modules.contains(&"in_proj_qkv".to_string()) && hybrid.lora_all_linear);
        assert_eq!(hybrid.multimodal_types, ["qwen3_5_moe"]);
        let latent = of("deepseek_v3");
        let modules = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"];
        assert_eq!(latent.lora_modules, modules);
        assert_eq!(latent.mlp, ["dense", "experts and a shared expert"]);
        assert!(!latent.balance_loss && latent.lora_per_expert_modules.is_empty());
    }
}
