//! Mixtral: attention as in Mistral, experts chosen by softmax in every layer. Its files call the
//! MLP `block_sparse_moe` and the matrices of an expert `w1`, `w3` and `w2`.

use super::{Family, GgufRules, PeftRules, Prediction, mistral};
use crate::ModelError;
use crate::config::attention::{one_window, with_windows};
use crate::config::fields::AXIS_MAX;
use crate::config::mlp::{ExpertsDefaults, check_experts};
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{LayerNames, MlpKind, NormStyle};

pub(super) static FAMILY: Family = Family {
    name: "Mixtral",
    model_types: &["mixtral"],
    multimodal_types: &[],
    file_names: &[(".mlp.", ".block_sparse_moe."), (".gate_proj", ".w1"), (".up_proj", ".w3"), (".down_proj", ".w2")],
    defaults: SizeDefaults {
        vocabulary: Some(32000),
        hidden: Some(4096),
        intermediate: Some(14336),
        layers: Some(32),
        heads: Some(32),
        kv_heads: Some(8),
        head_width: None,
        positions: 131_072,
    },
    implied: Implied { eps: 1e-5, theta: 1e6, ..Implied::COMMON },
    norm: NormStyle::Plain,
    layers,
    balance_loss: true,
    prediction: Prediction::NONE,
    // The experts' modules are `w1`, `w2` and `w3` to PEFT, which are not read as targets.
    peft: PeftRules::FusesExperts { modules: &["q_proj", "k_proj", "v_proj", "o_proj"], converts_per_expert: false },
    gguf: Some(GgufRules { interleaved: true, common_width: true, ..GgufRules::plain("llama") }),
};

const EXPERTS: ExpertsDefaults = ExpertsDefaults { count_key: "num_experts", count: 8, chosen: 2, width: 14336 };

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let attention = mistral::attention(text)?;
    let kinds = with_windows(&attention, vec![one_window(text, None)?; text.layer_count]);
    let mut experts = EXPERTS.experts(text.fields, true)?;
    experts.width = text.fields.size("intermediate_size", AXIS_MAX, text.defaults.intermediate)?;
    check_experts(text.fields, &experts)?;
    if text.fields.number("router_jitter_noise")?.is_some_and(|noise| noise != 0.0) {
        return Err(text.fields.wrong("`router_jitter_noise` is not zero: routers have no noise here"));
    }
    let mlps = vec![MlpKind::Experts(experts); text.layer_count];
    Ok(Layers::new(&LayerNames::COMMON, attention.rotary_width, kinds, mlps))
}
