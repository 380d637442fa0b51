//! Llama 2 and 3 and the many models that declare themselves as one: plain attention without
//! windows, biases of attention and MLP by two switches. Its files must state their sizes.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::read;
use crate::config::fields::{AXIS_MAX, POSITIONS_MAX};
use crate::config::text::{Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionKind, LayerNames, MlpKind, NormStyle, mlp};

pub(super) static FAMILY: Family = Family {
    name: "Llama",
    model_types: &["llama"],
    multimodal_types: &[],
    defaults: SizeDefaults::REQUIRED,
    norm: NormStyle::Plain,
    layers,
    balance_loss: false,
    prediction: Prediction::NONE,
    peft: PeftRules::Plain,
    gguf: Some(GgufRules { architecture: "llama", interleaved: true, qkv_bias: true, other_bias: true }),
};

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let attention = read(text)?;
    // The transformers class has no window; a value that is not a number is still a malformed file.
    text.fields.optional_size("sliding_window", POSITIONS_MAX)?;
    let mlp = MlpKind::Dense {
        names: &mlp::NAMES,
        width: text.fields.size("intermediate_size", AXIS_MAX, text.defaults.intermediate)?,
        bias: text.fields.flag("mlp_bias", false)?,
    };
    let (rotary_width, count) = (attention.rotary_width, text.layer_count);
    let kinds = vec![AttentionKind::Softmax(attention); count];
    Ok(Layers::new(&LayerNames::COMMON, rotary_width, kinds, vec![mlp; count]))
}
