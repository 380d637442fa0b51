//! What is trained, and which modules get an adapter: PEFT's rules on module paths.

use crate::ModelError;
use crate::build::{ExpertTensor, expert_target};
use crate::config::Config;
use crate::inventory::Inventory;
use regex::{Regex, RegexBuilder};
use std::collections::{BTreeMap, BTreeSet};

/// What a run trains.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "there is one of them in a run")]
pub enum Trained {
    /// Evaluation and generation.
    Nothing,
    Lora(LoraConfig),
    Full,
    /// The last N blocks, the final norm and an untied head.
    LastBlocks(usize),
}

/// Selects modules.
#[derive(Clone, Debug, PartialEq)]
pub enum Targets {
    /// Every linear layer but the head.
    AllLinear,
    /// Paths that equal an entry, or end with a dot and the entry.
    Names(Vec<String>),
    /// Paths that the regular expression matches in full.
    Pattern(String),
}

#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    pub rank: usize,
    pub alpha: f64,
    pub dropout: f64,
    /// Scale by `alpha / √rank` instead of `alpha / rank`.
    pub rslora: bool,
    pub targets: Targets,
    /// Tensors outside linear modules that get an adapter, above all fused experts: full names, or
    /// suffixes starting at a dot.
    pub parameters: Vec<String>,
    pub exclude: Option<Targets>,
    pub layers: Option<Vec<usize>>,
    pub rank_pattern: BTreeMap<String, usize>,
    pub alpha_pattern: BTreeMap<String, f64>,
    /// PEFT's `modules_to_save`: the head or the embedding table, held whole by the adapter.
    pub saved: Vec<String>,
}

impl LoraConfig {
    pub fn new(rank: usize, alpha: f64, targets: &[&str]) -> Self {
        Self {
            rank,
            alpha,
            dropout: 0.0,
            rslora: false,
            targets: Targets::Names(targets.iter().map(ToString::to_string).collect()),
            parameters: Vec::new(),
            exclude: None,
            layers: None,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            saved: Vec::new(),
        }
    }

    /// Whether the adapter holds a module whole.
    pub fn saves(&self, path: &str) -> bool {
        self.saved.iter().any(|name| ends_with(path, name))
    }

    /// Rank and scale of a module's adapter, or none.
    pub fn of(&self, path: &str) -> Result<Option<(usize, f32)>, ModelError> {
        let excluded = self.exclude.as_ref().map_or(Ok(false), |exclude| exclude.matches(path))?;
        if excluded || !self.targets.matches(path)? || !self.layers.as_ref().is_none_or(|of| in_layers(of, path)) {
            return Ok(None);
        }
        Ok(Some(self.rank_and_scale(path)?))
    }

    /// The same for a tensor. Neither `exclude` nor `layers` applies to tensors.
    pub fn of_parameter(&self, name: &str) -> Result<Option<(usize, f32)>, ModelError> {
        if !self.parameters.iter().any(|target| ends_with(name, target)) {
            return Ok(None);
        }
        Ok(Some(self.rank_and_scale(name)?))
    }

    /// In the form its config is written: PEFT accepts a choice of layers only with a list of
    /// names.
    #[must_use]
    pub fn written(&self, config: &Config) -> Self {
        let mut lora = self.clone();
        if lora.targets == Targets::AllLinear && lora.layers.is_some() {
            let inventory = Inventory::of(config);
            let names = inventory.adaptable().iter().filter_map(|path| path.rsplit('.').next());
            let names: BTreeSet<String> = names.map(str::to_string).collect();
            lora.targets = Targets::Names(names.into_iter().collect());
        }
        lora
    }

    /// The first module or tensor of the model to which another config gives a different adapter,
    /// with rank and scale of both: configs may spell the same adapter differently.
    pub fn difference(&self, other: &Self, config: &Config) -> Result<Option<AdapterDifference>, ModelError> {
        let inventory = Inventory::of(config);
        for path in inventory.adaptable() {
            let path = config.module_path(path);
            let of = |lora: &Self| match lora.of(&path)? {
                None => lora.of_parameter(&format!("{path}.weight")),
                target => Ok(target),
            };
            let (ours, theirs) = (of(self)?.map(Held::from), of(other)?.map(Held::from));
            if ours != theirs {
                return Ok(Some(AdapterDifference { name: path.into_owned(), ours, theirs }));
            }
        }
        for path in ["model.embed_tokens", "lm_head"] {
            let path = config.module_path(path);
            let [ours, theirs] = [self, other].map(|lora| lora.saves(&path).then_some(Held::Whole));
            if ours != theirs {
                return Ok(Some(AdapterDifference { name: path.into_owned(), ours, theirs }));
            }
        }
        for start in inventory.experts() {
            let path = start.strip_suffix(".experts.").unwrap_or(start);
            for part in ExpertTensor::ALL {
                let of = |lora: &Self| expert_target(config, lora, path, part);
                let (ours, theirs) = (of(self)?, of(other)?);
                if ours != theirs {
                    let [ours, theirs] = [ours, theirs].map(|target| target.map(|of| Held::from((of.rank, of.scale))));
                    return Ok(Some(AdapterDifference { name: format!("{start}{}", part.name()), ours, theirs }));
                }
            }
        }
        Ok(None)
    }

    fn rank_and_scale(&self, path: &str) -> Result<(usize, f32), ModelError> {
        let rank = pattern_value(&self.rank_pattern, path)?.unwrap_or(self.rank);
        let alpha = pattern_value(&self.alpha_pattern, path)?.unwrap_or(self.alpha);
        Ok((rank, scale(alpha, rank, self.rslora)))
    }
}

/// A module of which two adapters hold different things, or one nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterDifference {
    pub name: String,
    pub ours: Option<Held>,
    pub theirs: Option<Held>,
}

/// What an adapter holds of a module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Held {
    Factors { rank: usize, scale: f32 },
    Whole,
}

impl From<(usize, f32)> for Held {
    fn from((rank, scale): (usize, f32)) -> Self {
        Self::Factors { rank, scale }
    }
}

/// In float64, rounded once.
#[expect(clippy::float_arithmetic, reason = "a parameter of the op, host arithmetic")]
fn scale(alpha: f64, rank: usize, rslora: bool) -> f32 {
    let rank = rank as f64;
    (alpha / if rslora { rank.sqrt() } else { rank }) as f32
}

impl Targets {
    /// Whether a module is selected.
    pub fn matches(&self, path: &str) -> Result<bool, ModelError> {
        Ok(match self {
            Self::AllLinear => true,
            Self::Names(names) => names.iter().any(|name| ends_with(path, name)),
            Self::Pattern(pattern) => expression(&format!("^(?:{pattern})$"))?.is_match(path),
        })
    }
}

/// Whether a path is `end`, or ends with a dot and `end`.
pub fn ends_with(path: &str, end: &str) -> bool {
    path.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The value of the first key that matches a suffix of the path, starting at a dot.
fn pattern_value<T: Copy>(patterns: &BTreeMap<String, T>, path: &str) -> Result<Option<T>, ModelError> {
    for (pattern, value) in patterns {
        if pattern_matches(pattern, path)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

/// Whether a key of `rank_pattern` or `alpha_pattern` matches a suffix of a path, starting at a
/// dot.
pub fn pattern_matches(pattern: &str, path: &str) -> Result<bool, ModelError> {
    Ok(expression(&format!(r"^(?:.*\.)?(?:{pattern})$"))?.is_match(path))
}

fn expression(pattern: &str) -> Result<Regex, ModelError> {
    /// Bytes of a compiled expression: module names need little, and an untrusted file may demand a
    /// lot.
    const SIZE_MAX: usize = 1 << 20;
    RegexBuilder::new(pattern)
        .size_limit(SIZE_MAX)
        .build()
        .map_err(|error| ModelError::Adapter(format!("`{pattern}` is not a regular expression: {error}")))
}

/// Whether the first number in the path is one of the layers.
fn in_layers(layers: &[usize], path: &str) -> bool {
    let layer = path.split('.').skip(1).find_map(|part| part.parse::<usize>().ok());
    layer.is_some_and(|layer| layers.contains(&layer))
}

/// Whether weight decay applies to the trained tensor of this name.
pub fn decays(name: &str) -> bool {
    let lower = name.to_lowercase();
    let excluded = ["bias", "layernorm", "rmsnorm"].iter().any(|part| lower.contains(part));
    !(excluded || lower.split('.').any(|part| part == "norm" || part.ends_with("_norm")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "model.layers.1.self_attn.q_proj";

    #[test]
    fn targets_follow_peft() {
        let names = |names: &[&str]| Targets::Names(names.iter().map(ToString::to_string).collect());
        assert!(names(&["q_proj"]).matches(PATH).expect("names"));
        assert!(names(&["self_attn.q_proj"]).matches(PATH).expect("names"));
        assert!(!names(&["proj"]).matches(PATH).expect("names"));
        assert!(Targets::Pattern(r".*\.q_proj".to_string()).matches(PATH).expect("pattern"));
        assert!(!Targets::Pattern("q_proj".to_string()).matches(PATH).expect("pattern"));
        assert!(Targets::Pattern("(".to_string()).matches(PATH).is_err());
        assert!(Targets::Pattern("(.{100}){1000}".to_string()).matches(PATH).is_err());
    }

    #[test]
    fn ranks_scales_and_layers() {
        let mut config = LoraConfig::new(8, 16.0, &["q_proj", "v_proj"]);
        assert_eq!(config.of(PATH).expect("a target"), Some((8, 2.0)));
        assert_eq!(config.of("model.layers.1.self_attn.k_proj").expect("no target"), None);
        config.rslora = true;
        config.rank_pattern.insert("layers.1.self_attn.q_proj".to_string(), 4);
        config.alpha_pattern.insert("q_proj".to_string(), 6.0);
        assert_eq!(config.of(PATH).expect("a target"), Some((4, 3.0)));
        config.layers = Some(vec![0]);
        assert_eq!(config.of(PATH).expect("another layer"), None);
    }

    #[test]
    fn decay_spares_norms_and_biases() {
        for name in ["model.norm.weight", "a.input_layernorm.weight", "a.q_norm.weight", "a.q_proj.bias"] {
            assert!(!decays(name), "{name}");
        }
        for name in ["lm_head.weight", "model.embed_tokens.weight", "a.q_proj.lora_A.weight"] {
            assert!(decays(name), "{name}");
        }
    }
}
