//! Tensor names in published files: which prefix they have, and which of them belong to multi-token
//! prediction.
//!
//! Here every tensor of the text model is `model.…` or `lm_head.…`; files of multimodal models use
//! `model.language_model.…` or `language_model.model.…`, and a family may spell parts of names
//! differently. Multi-token prediction is skipped only where the config or the family names it,
//! never because it comes last.

use crate::ModelError;
use crate::config::Config;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

const PLAIN: &str = "model.";
const HEAD: &str = "lm_head.";
/// What multimodal files write for `model.` and for `lm_head.`.
const WRAPPED: [[&str; 2]; 2] = [["model.language_model.", HEAD], ["language_model.model.", "language_model.lm_head."]];
/// Prefixes of the vision part.
const VISION: [&str; 6] = [
    "model.visual.",
    "visual.",
    "model.vision_tower.",
    "vision_tower.",
    "model.multi_modal_projector.",
    "multi_modal_projector.",
];
/// Modules found only in a prediction layer: they combine the hidden state with the embedding of
/// the next token.
const PREDICTING: [&str; 3] = ["eh_proj", "enorm", "hnorm"];

/// How a file names its tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    /// What is before the names of a multimodal file.
    prefix: Option<[&'static str; 2]>,
    /// Parts of names, ours and the file's.
    parts: &'static [(&'static str, &'static str)],
    /// Layers after the last that only predict further tokens.
    predicting: BTreeSet<usize>,
    /// Whether `mtp.…` predicts further tokens.
    module: bool,
}

impl Names {
    /// Detects the naming from the names of a file.
    pub fn of<'a>(names: impl Iterator<Item = &'a str>, config: &Config) -> Result<Self, ModelError> {
        let behind = config.layers.len()..config.layers.len().saturating_add(config.prediction_layers);
        let (mut predicting, mut found, mut renamed) = (BTreeSet::new(), BTreeMap::new(), false);
        for name in names {
            let Some((prefix, rest)) = prefix_of(name) else { continue };
            found.entry(prefix.map(|[model, _]| model)).or_insert(name);
            renamed |= config.family.file_names.iter().any(|(_, theirs)| rest.contains(theirs));
            if let Some(layer) = layer_of(rest).filter(|layer| behind.contains(layer))
                && rest.split('.').nth(2).is_some_and(|module| PREDICTING.contains(&module))
            {
                predicting.insert(layer);
            }
        }
        let mut prefixes = found.into_iter();
        let (first, second) = (prefixes.next(), prefixes.next());
        if let (Some((_, name)), Some((other, _))) = (first, second) {
            let other = other.unwrap_or(PLAIN);
            let what = format!("other tensors are called `{other}…`: which of them are the model's?");
            return Err(ModelError::Tensor { name: isobit_proof::name::quoted(name), what });
        }
        let prefix = first.and_then(|(found, _)| WRAPPED.into_iter().find(|[model, _]| Some(*model) == found));
        // Files that transformers 5 wrote in its own layout have our names.
        let parts = if renamed { config.family.file_names } else { &[] };
        let module = config.family.prediction.module || config.prediction_layers > 0;
        Ok(Self { prefix, parts, predicting, module })
    }

    /// Whether the file has the names of a multimodal model.
    pub fn prefixed(&self) -> bool {
        self.prefix.is_some()
    }

    /// Whether a tensor of the file only predicts further tokens.
    pub fn predicts(&self, name: &str) -> bool {
        if self.module && name.starts_with("mtp.") {
            return true;
        }
        let rest = prefix_of(name).map(|(_, rest)| rest);
        rest.and_then(layer_of).is_some_and(|layer| self.predicting.contains(&layer))
    }

    /// The file's name for our `name`.
    pub fn in_file<'a>(&self, name: &'a str) -> Cow<'a, str> {
        let parts = self.parts.iter();
        let name = parts.fold(Cow::Borrowed(name), |name, (ours, theirs)| replaced(name, ours, theirs));
        let Some([model, head]) = self.prefix else { return name };
        match (name.strip_prefix(PLAIN), name.strip_prefix(HEAD)) {
            (Some(rest), _) => Cow::Owned(format!("{model}{rest}")),
            (None, Some(rest)) => Cow::Owned(format!("{head}{rest}")),
            (None, None) => name,
        }
    }

    /// Our name for a tensor of the file; none for the vision part.
    pub(crate) fn here<'a>(&self, name: &'a str) -> Option<Cow<'a, str>> {
        if is_vision(name) {
            return None;
        }
        let [model, head] = self.prefix.unwrap_or([PLAIN, HEAD]);
        let here = match (name.strip_prefix(model), name.strip_prefix(head)) {
            (Some(rest), _) if model != PLAIN => Cow::Owned(format!("{PLAIN}{rest}")),
            (None, Some(rest)) if head != HEAD => Cow::Owned(format!("{HEAD}{rest}")),
            _ => Cow::Borrowed(name),
        };
        Some(self.parts.iter().fold(here, |name, (ours, theirs)| replaced(name, theirs, ours)))
    }
}

/// The name with one part of it replaced, if it has that part.
fn replaced<'a>(name: Cow<'a, str>, from: &str, to: &str) -> Cow<'a, str> {
    if name.contains(from) { Cow::Owned(name.replacen(from, to, 1)) } else { name }
}

/// What is before a name of the text model below `model.`, and the rest.
fn prefix_of(name: &str) -> Option<(Option<[&'static str; 2]>, &str)> {
    let wrapped = WRAPPED.into_iter().find_map(|prefix| Some((Some(prefix), name.strip_prefix(prefix[0])?)));
    wrapped.or_else(|| if is_vision(name) { None } else { Some((None, name.strip_prefix(PLAIN)?)) })
}

fn is_vision(name: &str) -> bool {
    VISION.iter().any(|start| name.starts_with(start))
}

/// The number in `layers.N.…`.
pub(crate) fn layer_of(rest: &str) -> Option<usize> {
    rest.strip_prefix("layers.")?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two layers of a family, with further keys in `more`.
    fn of(names: &[&str], family: &str, more: &str) -> Result<Names, ModelError> {
        let text = format!(
            r#"{{"model_type":"{family}","vocab_size":8,"hidden_size":8,"intermediate_size":8,"num_hidden_layers":2,
            "num_attention_heads":2,"num_key_value_heads":2{more}}}"#
        );
        Names::of(names.iter().copied(), &Config::parse(&text).expect("a config"))
    }

    const PREDICTION: &str = r#","num_nextn_predict_layers":1"#;

    #[test]
    fn the_prefix_of_the_file_is_found() {
        let plain = of(&["lm_head.weight", "model.layers.0.x", "model.norm.weight"], "llama", "").expect("plain");
        assert!(!plain.prefixed());
        assert_eq!(plain.in_file("model.norm.weight"), "model.norm.weight");
        assert_eq!(plain.here("model.norm.weight").as_deref(), Some("model.norm.weight"));
        let names = ["lm_head.weight", "model.language_model.layers.0.x", "model.visual.blocks.0.x", "mtp.fc.weight"];
        let wrapped = of(&names, "llama", "").expect("wrapped");
        assert_eq!(wrapped.in_file("model.norm.weight"), "model.language_model.norm.weight");
        assert_eq!(wrapped.in_file("lm_head.weight"), "lm_head.weight");
        assert_eq!(wrapped.here(names[1]).as_deref(), Some("model.layers.0.x"));
        assert_eq!(wrapped.here(names[2]), None);
        let error =
            of(&["model.language_model.norm.weight", "model.norm.weight"], "llama", "").expect_err("both").to_string();
        assert!(error.contains("`model.norm.weight`") && error.contains("model.language_model"), "{error}");
    }

    /// Accepted if the config states their number and they contain modules that only such layers
    /// have.
    #[test]
    fn layers_that_predict_are_named_by_the_config() {
        let names =
            ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight", "model.layers.3.enorm.weight"];
        let found = of(&names, "llama", PREDICTION).expect("plain");
        assert_eq!(names.map(|name| found.predicts(name)), [true, true, false]);
        assert!(!of(&names, "llama", "").expect("plain").predicts(names[0]), "no config says so");
        let last = ["model.layers.2.mlp.up_proj.weight", "model.layers.2.embed_tokens.weight"];
        assert!(!of(&last, "llama", PREDICTION).expect("plain").predicts(last[0]), "a layer like the others");
        let odd = ["model.layers.x", "model.layers.99999999999999999999.x", "model."];
        assert_eq!(odd.map(|name| of(&odd, "llama", PREDICTION).expect("plain").predicts(name)), [false; 3]);
    }

    #[test]
    fn a_module_that_predicts_is_named_by_the_family_or_the_config() {
        let names = ["mtp.fc.weight"];
        assert!(!of(&names, "llama", "").expect("plain").predicts(names[0]));
        assert!(of(&names, "llama", PREDICTION).expect("plain").predicts(names[0]));
        assert!(of(&names, "qwen3_5", "").expect("plain").predicts(names[0]));
    }
}
