//! Llama 2 and 3 and the many models that declare themselves as one: plain attention without
//! windows, biases of attention and MLP by two switches. Its files must state their sizes.

use super::{Family, GgufRules, PeftRules, Prediction};
use crate::ModelError;
use crate::config::attention::read;
use crate::config::fields::POSITIONS_MAX;
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::config::{AttentionKind, LayerNames, NormStyle, mlp};

pub(super) static FAMILY: Family = Family {
    name: "Llama",
    model_types: &["llama"],
    multimodal_types: &[],
    file_names: &[],
    defaults: SizeDefaults::REQUIRED,
    implied: Implied::COMMON,
    norm: NormStyle::Plain,
    layers,
    balance_loss: false,
    prediction: Prediction::NONE,
    peft: PeftRules::Plain,
    gguf: Some(GgufRules { interleaved: true, qkv_bias: true, other_bias: true, ..GgufRules::plain("llama") }),
};

fn layers(text: &TextConfig) -> Result<Layers, ModelError> {
    let attention = read(text)?;
    // The transformers class has no window; a value that is not a number is still a malformed file.
    text.fields.optional_size("sliding_window", POSITIONS_MAX)?;
    let mlp = mlp::dense_with_switch(text)?;
    let (rotary_width, count) = (attention.rotary_width, text.layer_count);
    let kinds = vec![AttentionKind::Softmax(attention); count];
    Ok(Layers::new(&LayerNames::COMMON, rotary_width, kinds, vec![mlp; count]))
}
