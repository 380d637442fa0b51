//! The tape: fused ops recorded forward, played backward, and recomputed under a contract.
//!
//! A model writes its forward pass with the methods of [`Tape`]; each is one fused op of `kernels`
//! with its backward. A [`Policy`] sets which activations are kept until the backward pass; it
//! changes memory and time, never a bit.

mod arena;
mod gradients;
mod offload;
mod op;
mod parameters;
mod part;
mod recompute;
mod stream;
mod tape;

pub use gradients::{Gradients, Host, HostPlace};
pub use offload::Offload;
pub use op::attention::AttentionShape;
pub use op::balance::{Balance, BalanceSums};
pub use op::columns::{Blocks, Move};
pub use op::conv1d::Convolution;
pub use op::decay::DecayRates;
pub use op::delta_rule::DeltaShape;
pub use op::experts::{ExpertActivation, ExpertAdapter, ExpertMatrix, Experts};
pub use op::head_loss::{HeadOutput, HeadShape, LossTargets};
pub use op::linear::{Adapter, Linear};
pub use op::rms_norm::Norm;
pub use op::rope::{RotatedHead, Rotation};
pub use op::router::{ROUTER_PROFILE, Router, Routes};
pub use op::shared::SharedBranch;
pub use parameters::{Frozen, Matrix, Parameter, ParameterId, Parameters, Quantized, Table, Value, Vector};
pub use recompute::Policy;
pub use stream::{HostNumbers, Streamed, StreamedMatrix, StreamedQuantized};
pub use tape::{BatchLayout, Memory, Tape, Variable};

use isobit_kernels::DeviceFailure;

/// What a third computation of a block shows about the first two, which differ.
#[derive(Clone, Debug, PartialEq)]
pub enum Finding {
    /// It also differs from the second, first in what this op saved.
    Op { op: &'static str, tensor: usize },
    /// It differs from the second only at the ends of the block.
    Ends,
    /// It equals the second.
    Agrees,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Op { op, tensor } => {
                write!(f, "a third computation differs again, first in tensor {tensor} that {op} saved")
            }
            Self::Ends => write!(f, "a third computation differs again, only in the outputs of the block"),
            Self::Agrees => write!(
                f,
                "a third computation equals the second: the forward pass was wrong, or the recomputation drifts consistently"
            ),
        }
    }
}

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
    #[error(
        "the recomputation of layer {layer} gave different bits: digest {recomputed}, but {forward} in the forward pass; {finding}"
    )]
    Digest { layer: usize, forward: String, recomputed: String, finding: Finding },
    #[error("the trained tensor {name} got no gradient")]
    NoGradient { name: String },
}
