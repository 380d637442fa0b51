//! Load balancing of a router (`docs/numerics.md`, "Load balance"): how much probability each expert gets in each row of data.
//!
//! Forward: `sums[row, e]` is the sum over the row's tokens of `P[t, e]`, the softmax of the token's logits over all experts. Backward, given
//! the gradient `share` of `sums`: `dz[t, e] = fma(P[t, e], share[row, e] − A, dz[t, e])` with `A` the lane sum of `fma(P, share, ·)`. A row of
//! data has sums of its own, so that it does not matter which rows are computed together.

use super::router::EXPERTS_MAX;

/// Ends the program unless the lengths of logits and sums fit the rows.
pub(crate) fn check(lengths: [usize; 2], row_starts: &[usize], experts: usize) {
    assert!((1..=EXPERTS_MAX).contains(&experts), "{experts} experts are outside 1..={EXPERTS_MAX}");
    let rows = row_starts.len() - 1;
    assert_eq!(lengths, [row_starts[rows] * experts, rows * experts], "load balance");
}
