//! One file per op: its arguments, their shapes, and what the bits are. `docs/numerics.md` is
//! normative; each file cites it.
//!
//! Conventions: matrices are row-major and dense; a *token* is one row of an activation matrix;
//! *rows* in the sense of the data (sequences of a step) are given by `row_starts`, ascending
//! offsets into the tokens, ending with the total. Parameter gradients accumulate; everything else
//! overwrites unless `accumulate` is set.

pub mod adamw;
pub mod add;
pub mod attention;
pub mod balance;
pub mod bias;
pub mod cast;
pub mod clamped_swiglu;
pub mod columns;
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
pub mod geglu;
pub mod grouping;
pub mod head_loss;
pub mod l2_norm;
pub mod linear;
pub mod low_rank;
pub mod product;
pub mod product4;
pub mod rms_norm;
pub mod rope;
pub mod router;
pub mod scale;
pub mod sink;
pub mod slices;
pub mod sum_squares;
pub mod swiglu;

pub use adamw::{AdamWTensor, AdamWUpdate};
pub use add::Add;
pub use attention::{Attention, AttentionBackward, AttentionForward, Span};
pub use balance::{BalanceBackward, BalanceForward};
pub use bias::{BiasBackward, BiasForward};
pub use cast::{ToBf16, ToF16, ToF32};
pub use clamped_swiglu::{ClampedSwigluBackward, ClampedSwigluForward};
pub use columns::{ColumnMode, Columns, CopyColumns, Place};
pub use combine::{Combine, CombineBackward, CombineForward};
pub use conv1d::{Conv1d, Conv1dBackward, Conv1dForward};
pub use decay::{Decay, DecayBackward, DecayForward};
pub use delta_rule::{DeltaRule, DeltaRuleBackward, DeltaRuleForward};
pub use digest::{AnyBuffer, DigestSums};
pub use dropout::{ApplyDropout, Dropout};
pub use elementary::Elementary;
pub use embedding::{EmbeddingBackward, EmbeddingForward};
pub use gate::{Gate, GateBackward, GateForward};
pub use gated_norm::{GatedNorm, GatedNormBackward, GatedNormForward};
pub use geglu::{GegluBackward, GegluForward};
pub use grouping::{GroupRows, GroupSizes};
pub use head_loss::{HeadLoss, HeadLossBackward, HeadLossForward, HeadLossStep, IGNORED};
pub use l2_norm::{L2Norm, L2NormBackward, L2NormForward};
pub use linear::{LinearForward, LinearGradInput, LinearInput, LowRankGradient, LowRankTerm};
pub use low_rank::{Contraction, FactorLayout, LowRank, LowRankContract, LowRankExpand, LowRankOuter, OuterProduct};
pub use product::{Product, ProductForward, ProductGradInput, ProductGradWeight};
pub use product4::{AsQuantized, Product4Forward, Product4GradInput, Product4Rows, Quantized, QuantizedShape, Scales};
pub use rms_norm::{RmsNorm, RmsNormBackward, RmsNormForward};
pub use rope::{Rope, RopeBackward, RopeForward};
pub use router::{Grouped, Router, RouterBackward, RouterChoose, RouterWeights, Scoring};
pub use scale::Scale;
pub use sink::{SinkBackward, SinkForward};
pub use slices::{SliceRows, SliceShape, SliceWeight};
pub use sum_squares::SumSquares;
pub use swiglu::{SwigluBackward, SwigluForward, SwigluPairsBackward, SwigluPairsForward};

use crate::backend::{F32, Memory, U32, Workspaces};
use half::{bf16, f16};

/// An op as a value: its arguments by name. Outputs come first, then inputs and parameters.
///
/// Everything that holds for an op on every backend is here, so code that counts, observes or
/// disturbs ops need not name any of them.
pub trait Op<M: Memory> {
    const NAME: &'static str;

    /// Panics unless lengths and parameters are consistent: a wrong size is the caller's bug.
    fn check(&self);

    /// Mathematical multiply-adds: a product of two sliced numbers counts as one in either profile.
    fn multiply_adds(&self) -> usize {
        0
    }

    /// Distinguishes calls of one op in a report: rows, outputs and inputs of a product; zero for
    /// other ops.
    fn size(&self) -> [usize; 3] {
        [0; 3]
    }

    /// Workspace bytes of the op on the device that `of` describes.
    fn workspace(&self, _of: &dyn Workspaces) -> usize {
        0
    }

    /// Everything the op writes.
    fn outputs(&mut self) -> Vec<Output<'_, M>>;
}

/// One tensor that an op writes.
pub enum Output<'a, M: Memory> {
    F32(&'a mut F32<M>),
    /// Used only by the op's backward pass.
    Kept(&'a mut F32<M>),
    Bf16(&'a mut M::Buffer<bf16>),
    F16(&'a mut M::Buffer<f16>),
    U32(&'a mut U32<M>),
    Rows(&'a mut M::Rows),
    Weight(&'a mut M::Weight),
}

/// Panics unless each named tensor has its expected length.
#[track_caller]
fn lengths(op: &'static str, tensors: &[(&'static str, usize, usize)]) {
    for (tensor, length, wanted) in tensors {
        assert!(length == wanted, "{op}: `{tensor}` has {length} elements where {wanted} are needed");
    }
}

/// Panics unless segments ascend from 0: backends give them to different threads.
#[track_caller]
fn check_segments(segments: &[usize]) {
    let ascend = segments.first() == Some(&0) && segments.is_sorted();
    assert!(ascend && segments.len() > 1, "segments ascend from 0, not as {segments:?}");
}

/// Panics unless every tensor of `whole` is `[tokens, width]`, and a norm's inverses and weight
/// have one element per token and per column.
#[track_caller]
fn norm_lengths(
    op: &'static str,
    (tokens, width): (usize, usize),
    whole: &[(&'static str, usize)],
    inverse: usize,
    weight: usize,
) {
    for &(tensor, length) in whole {
        lengths(op, &[(tensor, length, tokens * width)]);
    }
    lengths(op, &[("inverse", inverse, tokens), ("weight", weight, width)]);
}

/// Panics unless the gradient of a norm's weight, if requested, has one element per column, and the
/// rows of data end with the tokens.
#[track_caller]
fn norm_weight_gradient(
    op: &'static str,
    (tokens, width): (usize, usize),
    dweight: Option<usize>,
    row_starts: &[usize],
) {
    if let Some(dweight) = dweight {
        lengths(op, &[("dweight", dweight, width), ("row_starts", end(row_starts), tokens)]);
    }
}

/// Total tokens of all rows.
fn end(row_starts: &[usize]) -> usize {
    row_starts[row_starts.len() - 1]
}

/// Tokens summed before the block's sum is added to the running total ("Sums over tokens").
pub const TOKEN_BLOCK: usize = 128;

/// Splits the tokens of `row_starts` into blocks of at most `block` that never cross a row start.
pub fn token_blocks(row_starts: &[usize], block: usize) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
    row_starts.windows(2).flat_map(move |row| {
        assert!(row[0] <= row[1], "row starts ascend");
        (row[0]..row[1]).step_by(block).map(move |start| start..(start + block).min(row[1]))
    })
}

#[cfg(test)]
mod tests {
    use super::check_segments;

    #[test]
    fn segments_ascend_from_zero() {
        for segments in [&[0, 0][..], &[0, 5], &[0, 2, 2, 5]] {
            check_segments(segments);
        }
        for segments in [&[][..], &[0], &[3, 5], &[5, 0, 5], &[0, 5, 3, 5], &[0, 5, 0, 5]] {
            assert!(std::panic::catch_unwind(|| check_segments(segments)).is_err(), "{segments:?}");
        }
    }
}
