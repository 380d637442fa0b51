//! The feed-forward part of every layer, as the families spell it.

use super::fields::{AXIS_MAX, Fields};
use super::layer::{ExpertsConfig, Feed, Scoring, Shared};
use super::{Classes, Family};
use crate::ModelError;

/// BOUND: what the router takes.
const EXPERTS_MAX: u64 = 1024;
const CHOSEN_MAX: u64 = 64;
const GROUPS_MAX: u64 = 32;
/// BOUND: shared experts, which are one of their joint width.
const SHARED_MAX: u64 = 1024;

/// One feed per layer.
pub(super) fn feeds(fields: Fields, family: Family, layers: usize) -> Result<Vec<Feed>, ModelError> {
    let sparse = sparse_layers(fields, family, layers)?;
    let dense = if sparse.iter().all(|sparse| *sparse) { None } else { Some(dense(fields, family)?) };
    let experts = if sparse.iter().any(|sparse| *sparse) { Some(experts(fields, family)?) } else { None };
    let feed = |sparse: bool| match (&experts, &dense) {
        (Some(experts), _) if sparse => Feed::Experts(experts.clone()),
        (_, Some(dense)) => dense.clone(),
        _ => unreachable!("made for the layers that need them"),
    };
    Ok(sparse.into_iter().map(feed).collect())
}

fn dense(fields: Fields, family: Family) -> Result<Feed, ModelError> {
    Ok(Feed::Dense {
        width: fields.size("intermediate_size", AXIS_MAX, Classes::of(family).intermediate)?,
        bias: family == Family::Llama && fields.flag("mlp_bias", false)?,
    })
}

/// Which layers have experts.
fn sparse_layers(fields: Fields, family: Family, layers: usize) -> Result<Vec<bool>, ModelError> {
    match family {
        Family::Qwen2 | Family::Qwen3 | Family::Llama | Family::Qwen35 => Ok(vec![false; layers]),
        Family::Qwen35Moe => Ok(vec![true; layers]),
        Family::DeepseekV3 => {
            let frequency = fields.size("moe_layer_freq", AXIS_MAX, Some(1))?;
            if frequency != 1 {
                return Err(fields.wrong(format!("`moe_layer_freq` is {frequency}, not 1")));
            }
            let first = fields.whole("first_k_dense_replace", 0, AXIS_MAX)?.unwrap_or(3);
            Ok((0..layers).map(|layer| layer >= first).collect())
        }
        Family::Qwen3Moe | Family::Qwen3Next => {
            let step = fields.size("decoder_sparse_step", AXIS_MAX, Some(1))?;
            let plain = fields.numbers("mlp_only_layers", AXIS_MAX)?.unwrap_or_default();
            if let Some(layer) = plain.iter().find(|layer| **layer >= layers) {
                return Err(fields.wrong(format!("`mlp_only_layers` names layer {layer} of {layers}")));
            }
            let any = expert_count(fields, family)? > 0;
            let mut sparse: Vec<bool> = (1..=layers).map(|number| any && number.is_multiple_of(step)).collect();
            for layer in plain {
                sparse[layer] = false;
            }
            Ok(sparse)
        }
    }
}

fn expert_count(fields: Fields, family: Family) -> Result<usize, ModelError> {
    let (name, default) = match family {
        Family::DeepseekV3 => ("n_routed_experts", 256),
        Family::Qwen3Next => ("num_experts", 512),
        Family::Qwen35Moe => ("num_experts", 256),
        _ => ("num_experts", 128),
    };
    fields.alias([name, "num_local_experts"], EXPERTS_MAX, default)
}

fn experts(fields: Fields, family: Family) -> Result<ExpertsConfig, ModelError> {
    let (chosen, width, renormalise) = match family {
        Family::DeepseekV3 => (8, 2048, fields.flag("norm_topk_prob", true)?),
        Family::Qwen3Next => (10, 512, fields.flag("norm_topk_prob", true)?),
        // The class has no such switch.
        Family::Qwen35Moe => (8, 512, true),
        _ => (8, 768, fields.flag("norm_topk_prob", false)?),
    };
    let mut config = ExpertsConfig {
        experts: expert_count(fields, family)?,
        chosen: fields.size("num_experts_per_tok", CHOSEN_MAX, Some(chosen))?,
        width: fields.size("moe_intermediate_size", AXIS_MAX, Some(width))?,
        scoring: Scoring::Softmax,
        renormalise,
        scale: 1.0,
        correction_bias: false,
        groups: 1,
        kept_groups: 1,
        shared: None,
    };
    match family {
        Family::Qwen3Next | Family::Qwen35Moe => {
            let width = fields.size("shared_expert_intermediate_size", AXIS_MAX, Some(512))?;
            config.shared = Some(Shared { width, gated: true });
        }
        Family::DeepseekV3 => deepseek(fields, &mut config)?,
        _ => {}
    }
    check(fields, &config)?;
    Ok(config)
}

/// Scores by sigmoid, a bias for choosing, groups of experts.
fn deepseek(fields: Fields, config: &mut ExpertsConfig) -> Result<(), ModelError> {
    for (key, known) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if fields.optional_text(key)?.is_some_and(|value| value != known) {
            return Err(fields.wrong(format!("`{key}` is not {known}")));
        }
    }
    config.scoring = Scoring::Sigmoid;
    config.correction_bias = true;
    config.scale = fields.positive("routed_scaling_factor")?.unwrap_or(2.5) as f32;
    if !config.scale.is_normal() {
        return Err(fields.wrong("`routed_scaling_factor` is too large or too small for float32"));
    }
    config.groups = fields.size("n_group", GROUPS_MAX, Some(8))?;
    config.kept_groups = fields.size("topk_group", GROUPS_MAX, Some(4))?;
    // Null is how files say that there are none.
    let default = usize::from(!fields.is_null("n_shared_experts"));
    let shared = fields.whole("n_shared_experts", 0, SHARED_MAX)?.unwrap_or(default);
    let width = shared * config.width;
    if width > AXIS_MAX as usize {
        return Err(fields.wrong(format!("`n_shared_experts` {shared} are {width} wide, over {AXIS_MAX}")));
    }
    config.shared = (shared > 0).then_some(Shared { width, gated: false });
    Ok(())
}

fn check(fields: Fields, config: &ExpertsConfig) -> Result<(), ModelError> {
    let ExpertsConfig { experts, chosen, groups, kept_groups, .. } = *config;
    if experts == 0 {
        return Err(fields.wrong("a layer of experts has none: the number of experts is 0"));
    }
    if chosen > experts {
        return Err(fields.wrong(format!("`num_experts_per_tok` is {chosen}, there are {experts} experts")));
    }
    if !experts.is_multiple_of(groups) {
        return Err(fields.wrong(format!("`n_group` {groups} does not divide {experts} experts")));
    }
    let size = experts / groups;
    if groups > 1 && size < 2 {
        return Err(fields.wrong(format!("`n_group` {groups} leaves one expert a group: a group's score takes two")));
    }
    if kept_groups > groups {
        return Err(fields.wrong(format!("`topk_group` is {kept_groups}, `n_group` is {groups}")));
    }
    if chosen > kept_groups * size {
        let what =
            format!("`num_experts_per_tok` is {chosen}, `topk_group` {kept_groups} leaves {}", kept_groups * size);
        return Err(fields.wrong(what));
    }
    Ok(())
}

/// The coefficient of the load-balancing loss, where the file asks for that loss.
pub(super) fn balance(fields: Fields, family: Family, feeds: &[Feed]) -> Result<Option<f64>, ModelError> {
    let asked = fields.flag("output_router_logits", false)?;
    let coefficient = fields.number("router_aux_loss_coef")?.unwrap_or(0.001);
    if coefficient < 0.0 {
        return Err(fields.wrong(format!("`router_aux_loss_coef` is {coefficient}, below zero")));
    }
    let any = feeds.iter().any(|feed| matches!(feed, Feed::Experts(_)));
    Ok((asked && any && family != Family::DeepseekV3 && coefficient > 0.0).then_some(coefficient))
}
