//! Granite 3 with experts in every layer: the multipliers of the dense family, that on the MLP's
//! output being a factor on the router's weights. Its files call the fused experts `input_linear`
//! and `output_linear`.

use super::{Family, GgufRules, PeftRules, Prediction, granite};
use crate::ModelError;
use crate::config::attention::factor;
use crate::config::fields::AXIS_MAX;
use crate::config::mlp::{ExpertsDefaults, check_experts};
use crate::config::text::{Implied, Layers, TextConfig};
use crate::config::{LayerNames, MlpKind, NormStyle};

pub(super) static FAMILY: Family = Family {
    name: "Granite 3 MoE",
    model_types: &["granitemoe"],
    multimodal_types: &[],
    file_names: &[
        (".experts.gate_up_proj", ".input_linear.weight"),
        (".experts.down_proj", ".output_linear.weight"),
        (".router", ".router.layer"),
    ],
    defaults: granite::DEFAULTS,
    implied: Implied::COMMON,
    norm: NormStyle::Plain,
    layers,
    balance_loss: true,
    prediction: Prediction::NONE,
    peft: PeftRules::Plain,
    gguf: Some(GgufRules {
        interleaved: true,
        qkv_bias: true,
        other_bias: true,
        multipliers: true,
        common_width: true,
        ..GgufRules::plain("granitemoe")
    }),
};

const EXPERTS: ExpertsDefaults = ExpertsDefaults { count_key: "num_experts", count: 8, chosen: 2, width: 11008 };
const NAMES: LayerNames = LayerNames { mlp: "block_sparse_moe", ..LayerNames::COMMON };

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    // The class takes the softmax of the chosen logits: the same as dividing by their sum.
    let mut experts = EXPERTS.experts(text.fields, true)?;
    experts.router = "router";
    experts.width = text.fields.size("intermediate_size", AXIS_MAX, text.defaults.intermediate)?;
    experts.scale = factor(text.fields, "residual_multiplier")?.unwrap_or(1.0);
    check_experts(text.fields, &experts)?;
    granite::scaled(text, &NAMES, &MlpKind::Experts(experts))
}
