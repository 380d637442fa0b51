//! Experts scored by sigmoid and chosen within groups, with a correction bias and shared experts:
//! DeepSeek-V3 and the families after it. The first layers are dense.

use super::fields::{AXIS_MAX, Fields};
use super::layer::{ExpertsConfig, MlpKind, Scoring, SharedExpertConfig};
use super::mlp::{self, ExpertsDefaults, check_experts};
use super::text::TextConfig;
use crate::ModelError;

/// BOUND: the router's limit.
const GROUPS_MAX: u64 = 32;
/// BOUND: shared experts, which form one MLP of their combined width.
const SHARED_MAX: u64 = 1024;

/// A family's defaults.
pub(crate) struct GroupedDefaults {
    pub(crate) experts: ExpertsDefaults,
    /// `routed_scaling_factor`
    pub(crate) scale: f64,
    /// `n_group`
    pub(crate) groups: usize,
    /// `topk_group`
    pub(crate) kept_groups: usize,
    /// `first_k_dense_replace`
    pub(crate) dense_layers: usize,
}

impl GroupedDefaults {
    /// The MLPs of all layers.
    pub(crate) fn mlps(&self, text: &TextConfig) -> Result<Vec<MlpKind>, ModelError> {
        mlp::mixed(text, self.sparse(text)?, |text| self.router(text))
    }

    /// Which layers have experts.
    fn sparse(&self, text: &TextConfig) -> Result<Vec<bool>, ModelError> {
        let frequency = text.fields.size("moe_layer_freq", AXIS_MAX, Some(1))?;
        if frequency != 1 {
            return Err(text.fields.wrong(format!("`moe_layer_freq` is {frequency}, not 1")));
        }
        let first = text.fields.whole("first_k_dense_replace", 0, AXIS_MAX)?.unwrap_or(self.dense_layers);
        Ok((0..text.layer_count).map(|layer| layer >= first).collect())
    }

    fn router(&self, text: &TextConfig) -> Result<ExpertsConfig, ModelError> {
        let fields = text.fields;
        let mut experts = self.experts.experts(fields, fields.flag("norm_topk_prob", true)?)?;
        for (key, known) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
            if fields.optional_text(key)?.is_some_and(|value| value != known) {
                return Err(fields.wrong(format!("`{key}` is not {known}")));
            }
        }
        experts.scoring = Scoring::Sigmoid;
        experts.correction_bias = Some("e_score_correction_bias");
        experts.scale = fields.positive("routed_scaling_factor")?.unwrap_or(self.scale) as f32;
        if !experts.scale.is_normal() {
            return Err(fields.wrong("`routed_scaling_factor` is too large or too small for float32"));
        }
        experts.groups = fields.size("n_group", GROUPS_MAX, Some(self.groups))?;
        experts.kept_groups = fields.size("topk_group", GROUPS_MAX, Some(self.kept_groups))?;
        experts.shared = shared(fields, experts.width)?;
        check_experts(fields, &experts)?;
        Ok(experts)
    }
}

/// All shared experts as one MLP, without a gate.
fn shared(fields: Fields, expert_width: usize) -> Result<Option<SharedExpertConfig>, ModelError> {
    // Null means that there are none.
    let default = usize::from(!fields.is_null("n_shared_experts"));
    let count = fields.whole("n_shared_experts", 0, SHARED_MAX)?.unwrap_or(default);
    let width = count * expert_width;
    if width > AXIS_MAX as usize {
        return Err(fields.wrong(format!("`n_shared_experts` {count} are {width} wide, over {AXIS_MAX}")));
    }
    Ok((count > 0).then_some(SharedExpertConfig { module: "shared_experts", names: &mlp::NAMES, width, gate: None }))
}
