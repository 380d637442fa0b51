//! A model as llama.cpp knows it: the keys of a GGUF file that describe it (`keys.rs`), and its
//! tensors under that program's names (`layer.rs`). A family's file says what it is to llama.cpp
//! (`rules.rs`); names follow from what a tensor does, so nothing else here knows a family.
//!
//! What llama.cpp would compute differently is refused, or said in a note: see `check.rs`.

mod check;
mod keys;
mod layer;
mod rules;
#[cfg(test)]
mod tests;

pub use rules::{GgufRules, HeadRule, Routing, WindowRotation, Windows};

use crate::ModelError;
use crate::config::{Config, NormStyle};
use crate::experts::{ExpertsShape, Projection};
use check::Attention;
use isobit_numerics::rope::{RopeScaling, inverse_frequencies};
use std::ops::Range;

/// A value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

/// Where the numbers of a tensor come from.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufSource {
    /// Our name of it.
    Tensor(String),
    /// The same, rows of each of these heads interleaved.
    Interleaved(String, usize),
    /// The same, plus one.
    PlusOne(String),
    /// Of every so many elements, the one at this place.
    Every { name: String, step: usize, at: usize },
    /// Some rows of each head of a matrix `[heads · head_rows, columns]`.
    HeadRows { name: String, head_rows: usize, rows: Range<usize>, columns: usize, transposed: bool },
    /// One matrix of every expert of the MLP at a path. In experts that are `alternating`, rows of
    /// gate and up take turns.
    Experts { path: String, shape: ExpertsShape, projection: Projection, alternating: bool },
    /// Not in the model's files.
    Made(Vec<f32>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct GgufTensor {
    pub name: String,
    /// Outermost first, as in PyTorch.
    pub shape: Vec<usize>,
    pub source: GgufSource,
    /// Whether it stays float32 in every file: norms, biases, routers.
    pub exact: bool,
    /// Whether llama.cpp adds an adapter on it.
    pub adapted: bool,
}

/// A model's description and tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufModel {
    pub architecture: &'static str,
    pub keys: Vec<(String, GgufValue)>,
    pub tensors: Vec<GgufTensor>,
    /// What llama.cpp does differently under circumstances that a user should know.
    pub notes: Vec<String>,
}

impl GgufModel {
    /// The model of a config; `tied` says whether its head is its table.
    pub fn of(config: &Config, tied: bool) -> Result<Self, ModelError> {
        let rules = config
            .family
            .gguf
            .ok_or_else(|| refused(format!("{} models are not written as GGUF yet", config.family.name)))?;
        let mut model =
            Self { architecture: rules.architecture, keys: Vec::new(), tensors: Vec::new(), notes: Vec::new() };
        check::ends(config, rules, tied)?;
        let attention = Attention::of(config, rules)?;
        model.describe(config, rules, &attention)?;
        model.add("token_embd.weight", vec![config.vocabulary, config.hidden], tensor("model.embed_tokens.weight"));
        for (name, factors) in rotation_factors(config) {
            model.exact(name, vec![factors.len()], GgufSource::Made(factors));
        }
        for layer in 0..config.layers.len() {
            model.layer(config, rules, layer)?;
        }
        let norm = model.norm(config, "model", "norm");
        model.exact("output_norm.weight", vec![config.hidden], norm);
        if !tied {
            model.add("output.weight", vec![config.vocabulary, config.hidden], tensor("lm_head.weight"));
            // Its graph has a plain product there.
            model.set_adapted(!matches!(attention, Attention::Latent(_)));
        }
        model.check_keys()?;
        Ok(model)
    }

    fn add(&mut self, name: &str, shape: Vec<usize>, source: GgufSource) {
        self.tensors.push(GgufTensor { name: name.to_string(), shape, source, exact: false, adapted: true });
    }

    fn exact(&mut self, name: &str, shape: Vec<usize>, source: GgufSource) {
        self.tensors.push(GgufTensor { name: name.to_string(), shape, source, exact: true, adapted: false });
    }

    /// Of the tensor that was added last.
    fn set_adapted(&mut self, adapted: bool) {
        if let Some(last) = self.tensors.last_mut() {
            last.adapted = adapted;
        }
    }

    /// The weight of a norm. llama.cpp knows the plain ones only.
    #[expect(clippy::unused_self, reason = "reads like its siblings")]
    fn norm(&self, config: &Config, path: &str, module: &str) -> GgufSource {
        let name = format!("{path}.{module}.weight");
        match config.norm {
            NormStyle::Plain => GgufSource::Tensor(name),
            NormStyle::ZeroCentred => GgufSource::PlusOne(name),
        }
    }
}

fn refused(what: impl Into<String>) -> ModelError {
    ModelError::Gguf(what.into())
}

fn tensor(name: &str) -> GgufSource {
    GgufSource::Tensor(name.to_string())
}

/// By how much the rules of Llama 3 and of longrope divide each frequency.
fn rotation_factors(config: &Config) -> Vec<(&'static str, Vec<f32>)> {
    let single = |factors: &[f64]| factors.iter().map(|factor| *factor as f32).collect();
    match &config.rope_scaling {
        RopeScaling::Llama3 { .. } => {
            let of = |scaling: &RopeScaling| inverse_frequencies(config.rotary_width, config.rope_theta, scaling, 1);
            let pairs = of(&RopeScaling::Default).into_iter().zip(of(&config.rope_scaling));
            #[expect(clippy::float_arithmetic, reason = "a table of another format")]
            let factors = pairs.map(|(plain, scaled)| (f64::from(plain) / f64::from(scaled)) as f32).collect();
            vec![("rope_freqs.weight", factors)]
        }
        RopeScaling::LongRope(long) => {
            vec![("rope_factors_long.weight", single(&long.long)), ("rope_factors_short.weight", single(&long.short))]
        }
        _ => Vec::new(),
    }
}

/// The order in which llama.cpp has the rows of a head: `(i, i + width/2)` become neighbours. Row
/// `at` of the result is this row of ours.
pub fn interleaved_row(at: usize, width: usize) -> usize {
    at % 2 * (width / 2) + at / 2
}
