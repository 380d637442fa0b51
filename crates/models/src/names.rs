//! Names of tensors in the files of others: which prefix they carry, and which of them are no part of the text model.
//!
//! Here every tensor of the text model is `model.…` or `lm_head.…`. Files of multimodal models say `model.language_model.…`; what belongs
//! to pictures or to predicting further tokens is left alone, and listed.

use crate::ModelError;
use std::borrow::Cow;

const PLAIN: &str = "model.";
const WRAPPED: &str = "model.language_model.";

/// How a file names its tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    prefixed: bool,
    skipped: Vec<String>,
}

impl Names {
    /// Looks through the names of a file. Layers from `layers` on, `prediction_layers` of them, only predict further tokens.
    pub fn of<'a>(
        names: impl Iterator<Item = &'a str>,
        layers: usize,
        prediction_layers: usize,
    ) -> Result<Self, ModelError> {
        let (mut skipped, mut plain, mut prefixed) = (Vec::new(), None, false);
        for name in names {
            let known = name.strip_prefix(WRAPPED).or(name.strip_prefix(PLAIN));
            let extra = known
                .and_then(layer_of)
                .is_some_and(|layer| (layers..layers.saturating_add(prediction_layers)).contains(&layer));
            if extra || ["model.visual.", "visual.", "mtp."].iter().any(|part| name.starts_with(part)) {
                skipped.push(name.to_string());
            } else if name.starts_with(WRAPPED) {
                prefixed = true;
            } else if name.starts_with(PLAIN) {
                plain = plain.or(Some(name));
            }
        }
        match plain {
            Some(name) if prefixed => {
                let what = format!("other tensors are called `{WRAPPED}…`: which of them are the model's?");
                Err(ModelError::Tensor { name: isobit_proof::name::quoted(name), what })
            }
            _ => Ok(Self { prefixed, skipped }),
        }
    }

    /// Whether the file says `model.language_model.…`.
    pub fn prefixed(&self) -> bool {
        self.prefixed
    }

    /// Tensors that are no part of the text model, in the order of their names.
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// The name in the file of what is called `name` here.
    pub fn in_file<'a>(&self, name: &'a str) -> Cow<'a, str> {
        match name.strip_prefix(PLAIN) {
            Some(rest) if self.prefixed => Cow::Owned(format!("{WRAPPED}{rest}")),
            _ => Cow::Borrowed(name),
        }
    }
}

/// The number in `layers.N.…`.
fn layer_of(rest: &str) -> Option<usize> {
    rest.strip_prefix("layers.")?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(names: &[&str]) -> Result<Names, ModelError> {
        Names::of(names.iter().copied(), 2, 1)
    }

    #[test]
    fn the_prefix_of_the_file_is_found() {
        let plain = of(&["lm_head.weight", "model.layers.0.x", "model.norm.weight"]).expect("plain");
        assert_eq!((plain.prefixed(), plain.skipped().len()), (false, 0));
        assert_eq!(plain.in_file("model.norm.weight"), "model.norm.weight");
        let names = [
            "lm_head.weight",
            "model.language_model.layers.0.x",
            "model.language_model.layers.2.x",
            "model.visual.blocks.0.x",
            "mtp.fc.weight",
        ];
        let wrapped = of(&names).expect("wrapped");
        assert_eq!(wrapped.in_file("model.norm.weight"), "model.language_model.norm.weight");
        assert_eq!(wrapped.in_file("lm_head.weight"), "lm_head.weight");
        assert_eq!(wrapped.skipped(), [names[2], names[3], names[4]]);
    }

    #[test]
    fn only_the_layers_behind_the_last_are_skipped() {
        let names = of(&["model.layers.1.x", "model.layers.2.embed_tokens.weight", "model.layers.3.x"]).expect("plain");
        assert_eq!(names.skipped(), ["model.layers.2.embed_tokens.weight"]);
        assert!(
            of(&["model.layers.x", "model.layers.99999999999999999999.x", "model."])
                .expect("plain")
                .skipped()
                .is_empty()
        );
        let error = of(&["model.language_model.norm.weight", "model.norm.weight"]).expect_err("both").to_string();
        assert!(error.contains("`model.norm.weight`") && error.contains("model.language_model"), "{error}");
    }
}
