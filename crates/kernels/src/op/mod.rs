//! One file per op: shapes, parameters and what the bits are. `docs/numerics.md` is normative; each file cites it.
//!
//! Conventions: matrices are row-major and dense; a *token* is one row of an activation matrix; *rows* in the sense of
//! the data (sequences of a step) are given by `row_starts`, ascending offsets into the tokens with the end as last.
//! Gradients of parameters accumulate, everything else overwrites unless `accumulate` says otherwise.

pub mod adamw;
pub mod attention;
pub mod balance;
pub mod bias;
pub mod cast;
pub mod column_copy;
pub mod combine;
pub mod conv1d;
pub mod decay;
pub mod delta_rule;
pub mod digest;
pub mod dropout;
pub mod elementary;
pub mod embedding;
pub mod gate;
pub mod gated_norm;
pub mod head_loss;
pub mod l2_norm;
pub mod product;
pub mod product4;
pub mod residual;
pub mod rms_norm;
pub mod rope;
pub mod router;
pub mod sum_squares;
pub mod swiglu;
pub mod thin;

pub use attention::{Attention, Span};
pub use column_copy::{ColumnMode, Columns, Place};
pub use combine::Combine;
pub use conv1d::Conv1d;
pub use decay::Decay;
pub use delta_rule::DeltaRule;
pub use dropout::Dropout;
pub use gate::Gate;
pub use gated_norm::GatedNorm;
pub use head_loss::{HeadLoss, IGNORED};
pub use l2_norm::L2Norm;
pub use product::{Product, SliceShape};
pub use product4::{AsQuantized, Quantized, QuantizedShape, Scales};
pub use rms_norm::RmsNorm;
pub use rope::Rope;
pub use router::{Grouped, Router, Scoring};
pub use thin::{Layout, Thin};

/// Tokens that a sum over tokens adds up before it is folded into the running total ("Sums over tokens").
pub const TOKEN_BLOCK: usize = 128;

/// Splits the tokens of `row_starts` into blocks of at most `block` that never cross a row start.
pub fn token_blocks(row_starts: &[usize], block: usize) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
    row_starts.windows(2).flat_map(move |row| {
        assert!(row[0] <= row[1], "row starts ascend");
        (row[0]..row[1]).step_by(block).map(move |start| start..(start + block).min(row[1]))
    })
}
