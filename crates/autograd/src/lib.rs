//! The tape: fused ops recorded forward, played backward, recomputed under a contract.
//!
//! A model writes its forward pass with the methods of [`Tape`]; each is one fused op of `kernels` and knows its backward. Which
//! activations live until the backward pass is a [`Policy`]; it changes memory and time, never a bit.

mod arena;
mod checkpoint;
mod deferred;
mod op;
mod parameters;
mod tape;

pub use checkpoint::Policy;
pub use deferred::Deferral;
pub use op::attention::AttentionShape;
pub use op::columns::{Blocks, Move};
pub use op::conv1d::Convolution;
pub use op::decay::DecayRates;
pub use op::delta_rule::DeltaShape;
pub use op::elementwise::{RotatedHead, Rotation};
pub use op::head::{HeadOutput, Targets};
pub use op::linear::{Adapter, Linear};
pub use op::norm::Norm;
pub use parameters::{Frozen, Gradients, Matrix, Parameter, ParameterId, Parameters, Table, Vector};
pub use tape::{Layout, Memory, Tape, Variable};

use isobit_kernels::DeviceFailure;

/// Why a step stops.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TapeError {
    #[error("{0}")]
    Device(#[from] DeviceFailure),
    #[error(
        "the recomputation of layer {layer} is not its forward pass: {op} saved {forward} in the forward pass and {recomputed} when \
         recomputed"
    )]
    Recompute { layer: usize, op: &'static str, forward: String, recomputed: String },
    #[error("the recomputation of layer {layer} gave other bits: digest {recomputed}, {forward} in the forward pass")]
    Digest { layer: usize, forward: String, recomputed: String },
    #[error("the trained tensor {name} got no gradient")]
    NoGradient { name: String },
}
