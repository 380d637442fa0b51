//! `chain.jsonl`: a line per update with the digests of what went in and what came out, each linked
//! to the line before (`docs/receipt-format.md`).
//!
//! A line is written in one form only, so reading one and writing it again must give its bytes.
//! `parts` only tell which tensor differs; links and combined digests decide.

mod file;
mod hex;

pub use file::{Chain, ChainFile, CutChain};

use crate::hash::Hash;
use isobit_numerics::digest::Digest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub const NAME: &str = "chain.jsonl";
const SCHEMA: &str = "isobit.chain/1";
/// The start of the file.
pub const FILE_START: &str = "{\"schema\":\"isobit.chain/";
/// Parts of a line at most.
pub const PARTS_MAX: usize = 1024;

/// The first line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    schema: String,
    step: u64,
    /// Digests of what decides the result.
    pub identity: BTreeMap<String, String>,
    /// Names of the trained tensors, in model order.
    pub tensors: Vec<String>,
    /// Of the weights before the first update.
    #[serde(with = "hex")]
    pub weights: Digest,
}

impl Origin {
    pub fn new(identity: BTreeMap<String, String>, tensors: Vec<String>, weights: &[Digest]) -> Self {
        Self { schema: SCHEMA.to_string(), step: 0, identity, tensors, weights: combined(weights) }
    }
}

/// The line of an update.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Update {
    pub step: u64,
    pub rows: Hash,
    pub tokens: u64,
    /// Bits of a float64, like the next.
    #[serde(with = "hex")]
    pub loss: u64,
    #[serde(with = "hex")]
    pub learning_rate: u64,
    /// Before clipping; bits of a float32.
    #[serde(with = "hex")]
    pub norm: u32,
    #[serde(with = "hex")]
    pub gradient: Digest,
    #[serde(with = "hex")]
    pub weights: Digest,
    #[serde(with = "hex")]
    pub state: Digest,
    pub parts: Parts,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<Evaluation>,
}

/// Of each tensor, or of neighbouring ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parts {
    #[serde(with = "hex")]
    pub gradient: Vec<u32>,
    #[serde(with = "hex")]
    pub weights: Vec<u32>,
    #[serde(with = "hex")]
    pub state: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluation {
    /// Bits of a float64.
    #[serde(with = "hex")]
    pub loss: u64,
    pub correct: u64,
    pub targets: u64,
    /// Whether it is the best so far.
    pub best: bool,
}

/// Digests of a trained tensor after an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorDigests {
    /// As the optimizer got it.
    pub gradient: Digest,
    pub value: Digest,
    pub moments: [Digest; 2],
}

impl Update {
    /// Puts the digests of all tensors into the line.
    pub fn set_digests(&mut self, tensors: &[TensorDigests]) {
        let gradients: Vec<Digest> = tensors.iter().map(|tensor| tensor.gradient).collect();
        let values: Vec<Digest> = tensors.iter().map(|tensor| tensor.value).collect();
        let states: Vec<Digest> = tensors.iter().map(|tensor| combined(&tensor.moments)).collect();
        (self.gradient, self.weights, self.state) = (combined(&gradients), combined(&values), combined(&states));
        self.parts = Parts { gradient: parts(&gradients), weights: parts(&values), state: parts(&states) };
    }

    /// A line without digests.
    pub fn new(step: u64, rows: Hash, tokens: u64) -> Self {
        let (none, parts) = (Digest([0; 2]), Parts { gradient: Vec::new(), weights: Vec::new(), state: Vec::new() });
        Self {
            step,
            rows,
            tokens,
            loss: 0,
            learning_rate: 0,
            norm: 0,
            gradient: none,
            weights: none,
            state: none,
            parts,
            evaluation: None,
        }
    }

    /// What differs first, in the order in which an update computes it.
    pub fn first_difference(&self, other: &Self) -> Option<Item> {
        let part = |ours: &[u32], theirs: &[u32]| ours.iter().zip(theirs).position(|(a, b)| a != b);
        let items = [
            (self.rows != other.rows || self.tokens != other.tokens).then_some(Item::Rows),
            (self.learning_rate != other.learning_rate).then_some(Item::LearningRate),
            (self.loss != other.loss).then_some(Item::Loss),
            (self.norm != other.norm || self.gradient != other.gradient)
                .then(|| Item::Gradient(part(&self.parts.gradient, &other.parts.gradient))),
            (self.weights != other.weights).then(|| Item::Weights(part(&self.parts.weights, &other.parts.weights))),
            (self.state != other.state).then(|| Item::State(part(&self.parts.state, &other.parts.state))),
            (self.evaluation != other.evaluation).then_some(Item::Evaluation),
            (self != other).then_some(Item::Parts),
        ];
        items.into_iter().flatten().next()
    }
}

/// An item of an update that two chains may differ in; the number is that of the part, if one
/// differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    Rows,
    LearningRate,
    Loss,
    Gradient(Option<usize>),
    Weights(Option<usize>),
    State(Option<usize>),
    Evaluation,
    /// Only the shortened digests.
    Parts,
    /// The names of the trained tensors, or their order.
    Tensors,
}

impl Item {
    pub fn name(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::LearningRate => "learning rate",
            Self::Loss => "loss",
            Self::Gradient(_) => "gradient",
            Self::Weights(_) => "weights",
            Self::State(_) => "optimizer state",
            Self::Evaluation => "evaluation",
            Self::Parts => "digests by tensor",
            Self::Tensors => "names of tensors",
        }
    }

    /// The start of a sentence on what has another item than some update.
    pub fn is_not_that_of(self) -> String {
        let name = self.name();
        if self.is_plural() { format!("its {name} are not those of") } else { format!("its {name} is not that of") }
    }

    /// Whether its name is: "its rows are".
    pub fn is_plural(self) -> bool {
        matches!(self, Self::Rows | Self::Weights(_) | Self::Parts | Self::Tensors)
    }

    pub fn part(self) -> Option<usize> {
        match self {
            Self::Gradient(part) | Self::Weights(part) | Self::State(part) => part,
            _ => None,
        }
    }
}

/// The digest of the digests of tensors.
pub fn combined(digests: &[Digest]) -> Digest {
    let bytes = digests.iter().flat_map(|digest| digest.0).flat_map(u64::to_le_bytes);
    Digest::of_bytes(&bytes.collect::<Vec<u8>>())
}

/// Tensors that share a part.
pub fn tensors_per_part(tensors: usize) -> usize {
    tensors.div_ceil(PARTS_MAX).max(1)
}

fn parts(digests: &[Digest]) -> Vec<u32> {
    digests.chunks(tensors_per_part(digests.len())).map(part).collect()
}

/// The first digits of the digest of a tensor, or of neighbours together.
pub(crate) fn part(together: &[Digest]) -> u32 {
    let digest = if let [one] = together { *one } else { combined(together) };
    (digest.0[0] >> 32) as u32
}
