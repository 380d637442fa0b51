//! The MLP of every layer, dense or with experts: the keys that families share, and the router's
//! limits. A family's file decides which layers have experts and how they are chosen.

use super::fields::{AXIS_MAX, Fields};
use super::layer::{ExpertsConfig, GateUpRows, LayerConfig, MlpKind, MlpNames, Scoring, SharedExpertConfig};
use super::text::TextConfig;
use crate::ModelError;

/// BOUND: the router's limit.
const EXPERTS_MAX: u64 = 1024;
const CHOSEN_MAX: u64 = 64;

pub(crate) const NAMES: MlpNames = MlpNames { gate: "gate_proj", up: "up_proj", gate_up: None, down: "down_proj" };
/// Gate and up as one module.
const JOINED: MlpNames = MlpNames { gate_up: Some("gate_up_proj"), ..NAMES };
/// The router's module, next to the experts.
const ROUTER: &str = "gate";

/// A dense MLP without biases.
pub(crate) fn dense(text: &TextConfig) -> Result<MlpKind, ModelError> {
    let width = text.fields.size("intermediate_size", AXIS_MAX, text.defaults.intermediate)?;
    Ok(MlpKind::Dense { names: &NAMES, width, bias: false, activation: text.activation })
}

/// The same with `mlp_bias`, a switch for the biases of all its modules.
pub(crate) fn dense_with_switch(text: &TextConfig) -> Result<MlpKind, ModelError> {
    let width = text.fields.size("intermediate_size", AXIS_MAX, text.defaults.intermediate)?;
    Ok(MlpKind::Dense { names: &NAMES, width, bias: text.fields.flag("mlp_bias", false)?, activation: text.activation })
}

/// A dense MLP without biases, gate and up being one module.
pub(crate) fn joined(text: &TextConfig) -> Result<MlpKind, ModelError> {
    let width = text.fields.size("intermediate_size", AXIS_MAX, text.defaults.intermediate)?;
    Ok(MlpKind::Dense { names: &JOINED, width, bias: false, activation: text.activation })
}

/// The MLPs of all layers, some of which have experts. Reads only keys that some layer needs.
pub(crate) fn mixed(
    text: &TextConfig,
    sparse: Vec<bool>,
    experts: impl Fn(&TextConfig) -> Result<ExpertsConfig, ModelError>,
) -> Result<Vec<MlpKind>, ModelError> {
    let dense = if sparse.iter().all(|sparse| *sparse) { None } else { Some(dense(text)?) };
    let experts = if sparse.iter().any(|sparse| *sparse) { Some(experts(text)?) } else { None };
    let mlp = |sparse: bool| match (&experts, &dense) {
        (Some(experts), _) if sparse => MlpKind::Experts(experts.clone()),
        (_, Some(dense)) => dense.clone(),
        _ => unreachable!("made for the layers that need them"),
    };
    Ok(sparse.into_iter().map(mlp).collect())
}

/// A family's defaults for its experts.
pub(crate) struct ExpertsDefaults {
    /// The key with the expert count; `num_local_experts` is an alias in every family.
    pub(crate) count_key: &'static str,
    pub(crate) count: usize,
    pub(crate) chosen: usize,
    pub(crate) width: usize,
}

impl ExpertsDefaults {
    pub(crate) fn count(&self, fields: Fields) -> Result<usize, ModelError> {
        fields.alias([self.count_key, "num_local_experts"], EXPERTS_MAX, self.count)
    }

    /// Experts chosen by softmax, without groups, correction bias or a shared expert.
    pub(crate) fn experts(&self, fields: Fields, renormalise: bool) -> Result<ExpertsConfig, ModelError> {
        Ok(ExpertsConfig {
            router: ROUTER,
            experts: self.count(fields)?,
            chosen: fields.size("num_experts_per_tok", CHOSEN_MAX, Some(self.chosen))?,
            width: fields.size("moe_intermediate_size", AXIS_MAX, Some(self.width))?,
            scoring: Scoring::Softmax,
            renormalise,
            scale: 1.0,
            correction_bias: None,
            groups: 1,
            kept_groups: 1,
            shared: None,
            router_bias: false,
            biases: false,
            gate_up_rows: GateUpRows::Separate,
            clamp: None,
        })
    }

    /// Which layers have experts: every `decoder_sparse_step`-th, except `mlp_only_layers`.
    pub(crate) fn sparse_by_step(&self, text: &TextConfig) -> Result<Vec<bool>, ModelError> {
        let (fields, layers) = (text.fields, text.layer_count);
        let step = fields.size("decoder_sparse_step", AXIS_MAX, Some(1))?;
        let plain = fields.numbers("mlp_only_layers", AXIS_MAX)?.unwrap_or_default();
        if let Some(layer) = plain.iter().find(|layer| **layer >= layers) {
            return Err(fields.wrong(format!("`mlp_only_layers` names layer {layer}, but there are {layers} layers")));
        }
        let any = self.count(fields)? > 0;
        let mut sparse: Vec<bool> = (1..=layers).map(|number| any && number.is_multiple_of(step)).collect();
        for layer in plain {
            sparse[layer] = false;
        }
        Ok(sparse)
    }
}

/// One shared expert whose output a sigmoid gate scales.
pub(crate) fn gated_shared_expert(fields: Fields) -> Result<SharedExpertConfig, ModelError> {
    let width = fields.size("shared_expert_intermediate_size", AXIS_MAX, Some(512))?;
    Ok(SharedExpertConfig { module: "shared_expert", names: &NAMES, width, gate: Some("shared_expert_gate") })
}

/// Checks that the router supports these numbers.
pub(crate) fn check_experts(fields: Fields, config: &ExpertsConfig) -> Result<(), ModelError> {
    let ExpertsConfig { experts, chosen, groups, kept_groups, .. } = *config;
    if experts == 0 {
        return Err(fields.wrong("a layer has experts, but the number of experts is 0"));
    }
    if chosen > experts {
        return Err(fields.wrong(format!("`num_experts_per_tok` is {chosen}, but there are {experts} experts")));
    }
    if !experts.is_multiple_of(groups) {
        return Err(fields.wrong(format!("`n_group` {groups} does not divide {experts} experts")));
    }
    let size = experts / groups;
    if groups > 1 && size < 2 {
        return Err(
            fields.wrong(format!("`n_group` {groups} leaves one expert per group, but a group's score needs two"))
        );
    }
    if kept_groups > groups {
        return Err(fields.wrong(format!("`topk_group` is {kept_groups}, but `n_group` is {groups}")));
    }
    if chosen > kept_groups * size {
        let what =
            format!("`num_experts_per_tok` is {chosen}, but `topk_group` {kept_groups} leaves {}", kept_groups * size);
        return Err(fields.wrong(what));
    }
    Ok(())
}

/// The coefficient of the load-balancing loss, if the file enables that loss.
pub(crate) fn balance(fields: Fields, layers: &[LayerConfig]) -> Result<Option<f64>, ModelError> {
    let asked = fields.flag("output_router_logits", false)?;
    let coefficient = fields.number("router_aux_loss_coef")?.unwrap_or(0.001);
    if coefficient < 0.0 {
        return Err(fields.wrong(format!("`router_aux_loss_coef` is {coefficient}, below zero")));
    }
    let any = layers.iter().any(|layer| matches!(layer.mlp, MlpKind::Experts(_)));
    Ok((asked && any && coefficient > 0.0).then_some(coefficient))
}
