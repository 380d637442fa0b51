//! Where in an update an op stands. Whoever runs ops tells the device before it runs them
//! ([`crate::Device::enter`]); devices ignore it, and an observer that names ops needs it.
//!
//! It decides nothing: an op with the same arguments has the same bits everywhere.

use std::fmt;

/// Where the ops that follow stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A micro-batch begins: these rows of the update, counted from 0, without the last.
    MicroBatch {
        first: usize,
        end: usize,
    },
    /// The same in an evaluation.
    Evaluation {
        first: usize,
        end: usize,
    },
    Embedding(Pass),
    /// A layer of the model, counted from 0.
    Layer(usize, Pass),
    Head(Pass),
    /// After the micro-batches: sums of gradients, their norm, the optimizer.
    Update,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pass {
    Forward,
    /// The forward pass again, in the backward pass.
    Recomputation,
    Backward,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MicroBatch { first, end } => write!(f, "micro-batch of {}", rows(*first, *end)),
            Self::Evaluation { first, end } => write!(f, "evaluation of {}", rows(*first, *end)),
            Self::Embedding(pass) => write!(f, "embedding, {pass}"),
            Self::Layer(layer, pass) => write!(f, "layer {layer}, {pass}"),
            Self::Head(pass) => write!(f, "head, {pass}"),
            Self::Update => f.write_str("after the micro-batches"),
        }
    }
}

fn rows(first: usize, end: usize) -> String {
    if first + 1 == end { format!("row {end}") } else { format!("rows {} to {end}", first + 1) }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward pass",
            Self::Recomputation => "recomputation",
            Self::Backward => "backward pass",
        })
    }
}
