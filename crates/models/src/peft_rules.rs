//! Cases in which PEFT interprets target modules differently from their names. An adapter trained
//! here must mean the same to PEFT; otherwise the targets are refused before anything is loaded.
//! The family selects the rules.

use crate::ModelError;
use crate::adapter::{LoraConfig, Targets};
use crate::config::{Config, LayerConfig, MlpKind};

/// What PEFT does with the names of a family's modules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeftRules {
    /// Names mean the modules of that name.
    Plain,
    /// transformers 5 fuses the experts, which were linear modules in transformers 4: PEFT turns
    /// adapters on the former names of routers and experts into adapters on the fused tensors, and
    /// modules of the same names elsewhere in the layer lose theirs.
    FusesExperts {
        /// Modules that keep their meaning.
        modules: &'static [&'static str],
        /// Whether adapters on the modules of every expert may be trained: PEFT converts them if no
        /// other module has their names.
        converts_per_expert: bool,
    },
}

impl PeftRules {
    /// Refuses targets that PEFT would interpret differently.
    pub(crate) fn check(self, config: &Config, lora: &LoraConfig) -> Result<(), ModelError> {
        if !lora.parameters.is_empty() && lora.dropout > 0.0 {
            return Err(ModelError::Adapter("target_parameters do not support dropout: set it to 0".to_string()));
        }
        let Self::FusesExperts { modules, .. } = self else { return Ok(()) };
        let names = match &lora.targets {
            Targets::AllLinear => {
                return Err(ModelError::Adapter(format!(
                    "\"all-linear\" means the router and the fused experts too to PEFT in this family: name modules, \
                     {modules:?} say"
                )));
            }
            Targets::Pattern(_) => return check_expression(config, lora, modules),
            Targets::Names(names) => names,
        };
        if self.per_expert(config, lora) {
            return check_per_expert(lora, names);
        }
        match names.iter().find(|name| of_experts(name)) {
            None => Ok(()),
            Some(name) => Err(ModelError::Adapter(format!(
                "the target module {name} means the fused experts to PEFT in this family: name tensors in \
                 target_parameters (`mlp.experts.gate_up_proj`, `mlp.experts.down_proj`, \
                 `shared_expert.up_proj.weight`, ...)"
            ))),
        }
    }

    /// Whether target modules mean the linear modules of every expert, as in files of transformers
    /// 4.
    pub(crate) fn per_expert(self, config: &Config, lora: &LoraConfig) -> bool {
        let alone = |layer: &LayerConfig| matches!(&layer.mlp, MlpKind::Experts(experts) if experts.shared.is_none());
        let named = matches!(&lora.targets, Targets::Names(names) if names.iter().any(|name| of_experts(name)));
        let converts = matches!(self, Self::FusesExperts { converts_per_expert: true, .. });
        named && converts && config.layers.iter().all(alone)
    }
}

/// PEFT reduces an expression to the last components of what it matches. Former names of routers
/// and experts in transformers 4 become fused tensors, and dense or shared layers of the same names
/// would lose their adapters.
fn check_expression(config: &Config, lora: &LoraConfig, modules: &[&str]) -> Result<(), ModelError> {
    const PARENTS: [&str; 5] = ["mlp.", "mlp.experts.", "mlp.experts.0.", "mlp.shared_expert.", "mlp.shared_experts."];
    const NAMES: [&str; 7] = ["gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"];
    for (layer, parent, name) in (0..config.layers.len()).flat_map(|layer| {
        PARENTS.into_iter().flat_map(move |parent| NAMES.into_iter().map(move |name| (layer, parent, name)))
    }) {
        let path = format!("model.layers.{layer}.{parent}{name}");
        let path = config.module_path(&path);
        if lora.of(&path)?.is_some() {
            return Err(ModelError::Adapter(format!(
                "the expression matches {path}, and {name} means the router or the fused experts to PEFT in this \
                 family: name modules, {modules:?} say, or tensors in target_parameters"
            )));
        }
    }
    Ok(())
}

fn of_experts(name: &str) -> bool {
    ["gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"].contains(&name.rsplit('.').next().unwrap_or(""))
}

/// Checks what PEFT can convert: both gate and up, with one rank for all.
fn check_per_expert(lora: &LoraConfig, names: &[String]) -> Result<(), ModelError> {
    let has = |module: &str| names.iter().any(|name| name == module);
    let wrong = |what: &str| Err(ModelError::Adapter(format!("adapters on the modules of experts {what}")));
    if has("gate_proj") != has("up_proj") {
        return wrong("need both gate_proj and up_proj, or neither: PEFT cannot load one without the other");
    }
    if names.iter().any(|name| of_experts(name) && name.contains('.')) {
        return wrong("are named gate_proj, up_proj and down_proj, without a path");
    }
    if lora.dropout > 0.0 || lora.rslora || lora.layers.is_some() || lora.exclude.is_some() {
        return wrong("do not support dropout, rsLoRA, a choice of layers or exclusions: PEFT would ignore them");
    }
    if lora.rank_pattern.keys().chain(lora.alpha_pattern.keys()).any(|pattern| of_experts(pattern)) {
        return wrong("have one rank and one alpha: PEFT would ignore a pattern");
    }
    Ok(())
}
