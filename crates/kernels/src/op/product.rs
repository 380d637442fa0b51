//! Slice product (`docs/numerics.md`, "Slice product"): matrix multiplication exact on integer units.
//!
//! Three forms, all over the same sliced weight `W[n, k]` (one unit per row `n`):
//! - forward `y[m, n] = Σ_k x[m, k]·W[n, k]`: `x` sliced per (row, 512 of k). Per chunk `acc = fma(v, unit_x, acc)`, at the
//!   end `y = acc · unit_w[n]`. It always overwrites.
//! - input gradient `dx[m, k] = Σ_n dy[m, n]·W[n, k]`: `dy[m, n]·unit_w[n]` (rounded once) is sliced per (row, 512 of n);
//!   per chunk `acc = fma(v, unit_dy, acc)`, starting from zero or from `dx` when accumulating.
//! - weight gradient `dW[n, k] += Σ_t dy[t, n]·x[t, k]`: both sliced along tokens, chunks of 512 that restart at row starts;
//!   per chunk `acc = fma(v, unit_dy·unit_x, acc)`, starting from `dW`.
//!
//! Inside a chunk `v` comes from exact integer sums: profile x2 `v = f32(256·Σhh + Σ(hl + lh))`, one rounding; profile x3
//! `v = fma(f32(Σhh), 65536, fma(f32(Σ(hm + mh)), 256, f32(Σ(hl + mm + lh))))`.

use isobit_numerics::slices::Profile;

/// Rows to be sliced along their width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceShape {
    pub rows: usize,
    pub width: usize,
    pub profile: Profile,
}

/// A product or a group of products with one shape of weight: rows `segments[e]..segments[e+1]` of the left operand meet
/// weight `e`. A plain product has the single segment `[0, m]`; experts and batches have one each, empty ones allowed.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    pub segments: &'a [usize],
    /// Rows of one weight (outputs of the layer).
    pub n: usize,
    /// Columns of one weight (inputs of the layer).
    pub k: usize,
    pub profile: Profile,
    /// Input gradient: add to what the output holds. The forward product always overwrites, the weight gradient always adds.
    pub accumulate: bool,
}

impl Product<'_> {
    pub fn weights(&self) -> usize {
        self.segments.len() - 1
    }

    /// Rows of the left operand.
    pub fn rows(&self) -> usize {
        self.segments[self.weights()]
    }
}
