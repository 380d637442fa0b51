//! Tensors of a model's files that nothing reads. A config with fewer layers than the file, or a
//! file with biases and norms missing from the config, would silently train a different model:
//! anything that looks like part of the text model is refused. Vision tensors and unknown ones are
//! listed.

use crate::ModelError;
use crate::config::Config;
use crate::inventory::Inventory;
use crate::names::{Names, layer_of};
use isobit_proof::name::quoted;
use isobit_proof::safetensors::TensorFiles;

/// Suffixes of tables that old files store and every reader computes.
const BUFFERS: [&str; 5] = [
    "rotary_emb.inv_freq",
    "rotary_emb.original_inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "self_attn.masked_bias",
];
/// Number of names that a note lists.
const SHOWN_MAX: usize = 10;

/// File names of the tensors that are not read, in order; an error if a reader of this model would
/// need one of them.
pub(crate) fn find(files: &TensorFiles, names: &Names, config: &Config) -> Result<Vec<String>, ModelError> {
    let inventory = Inventory::of(config);
    let (mut unused, mut refused) = (Vec::new(), Vec::new());
    for name in files.names() {
        let here = names.here(name);
        let is_there = |name: &str| files.contains(&names.in_file(name));
        if names.predicts(name)
            || BUFFERS.iter().any(|end| name.ends_with(end))
            || here.as_ref().is_some_and(|here| inventory.reads(here, is_there))
        {
            continue;
        }
        match here.and_then(|here| part_of_model(&here, config.layers.len())) {
            Some(what) => refused.push((name, what)),
            None => unused.push(name.to_string()),
        }
    }
    let Some((name, what)) = refused.first() else { return Ok(unused) };
    let more = match refused.len() {
        1 => String::new(),
        count => format!(" ({count} tensors in all)"),
    };
    Err(ModelError::tensor(name, format!("nothing would read it: {what}{more}")))
}

/// Why a tensor looks like part of the text model.
fn part_of_model(here: &str, layers: usize) -> Option<String> {
    let inner = here.strip_prefix("model.");
    if let Some(rest) = inner.filter(|rest| rest.starts_with("layers.")) {
        return Some(match layer_of(rest) {
            Some(layer) if layer >= layers => {
                format!(
                    "it belongs to layer {layer} (counted from 0), but `num_hidden_layers` in config.json is {layers}"
                )
            }
            _ => "config.json describes no such tensor of this layer".to_string(),
        });
    }
    if here.starts_with("mtp.") {
        return Some(
            "neither the family nor `num_nextn_predict_layers` of config.json says that it predicts tokens".into(),
        );
    }
    // Directly below the model: `model.norm.bias`, `model.embedding_norm.weight`.
    let extra = inner
        .and_then(|rest| rest.split_once('.'))
        .is_some_and(|(module, part)| part == "bias" || part == "weight" && module.ends_with("norm"));
    (here.starts_with("lm_head.") || extra).then(|| "config.json describes no such tensor of the model".to_string())
}

/// One line about tensors that are not read; none if all are.
pub(crate) fn note(unused: &[String]) -> Option<String> {
    let shown: Vec<String> = unused.iter().take(SHOWN_MAX).map(|name| quoted(name)).collect();
    let more = match unused.len().saturating_sub(SHOWN_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    match unused.len() {
        0 => None,
        1 => Some(format!("1 tensor of the model's files is not used: {}", shown[0])),
        count => Some(format!("{count} tensors of the model's files are not used: {}{more}", shown.join(", "))),
    }
}
