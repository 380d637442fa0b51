//! Slice product (`docs/numerics.md`, "Slice product"): matrix multiplication exact on integer
//! scales.
//!
//! Three forms, all over the same sliced weight `W[n, k]` (one scale per row `n`):
//! - forward `y[m, n] = Σ_k x[m, k]·W[n, k]`: `x` sliced per (row, 512 of k). Per chunk
//!   `acc = fma(v, scale_x, acc)`, at the end `y = acc · scale_w[n]`. It always overwrites.
//! - input gradient `dx[m, k] = Σ_n dy[m, n]·W[n, k]`: `dy[m, n]·scale_w[n]` (rounded once) is
//!   sliced per (row, 512 of n); per chunk `acc = fma(v, scale_dy, acc)`, starting from zero or
//!   from `dx` when accumulating.
//! - weight gradient `dW[n, k] += Σ_t dy[t, n]·x[t, k]`: both sliced along tokens, chunks of 512
//!   that restart at row starts; per chunk `acc = fma(v, scale_dy·scale_x, acc)`, starting from
//!   `dW`.
//!
//! Inside a chunk `v` comes from exact integer sums: profile x2 `v = f32(256·Σhh + Σ(hl + lh))`,
//! one rounding; profile x3
//! `v = fma(f32(Σhh), 65536, fma(f32(Σ(hm + mh)), 256, f32(Σ(hl + mm + lh))))`.

use crate::backend::{F32, Length, Matrix, Memory, Shaped, Workspaces};
use crate::op::slices::SliceShape;
use crate::op::{Op, Output, lengths};
use isobit_numerics::slices::Profile;

/// A product or a group of products with one shape of weight: rows `segments[e]..segments[e+1]` of
/// the left operand use weight `e`. A plain product has the single segment `[0, m]`; experts and
/// batches have one each, possibly empty.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    pub segments: &'a [usize],
    /// Rows of one weight (outputs of the layer).
    pub n: usize,
    /// Columns of one weight (inputs of the layer).
    pub k: usize,
    pub profile: Profile,
    /// Input gradient: add to the output. The forward product always overwrites, the weight
    /// gradient always adds.
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

    pub(crate) fn multiply_adds(&self) -> usize {
        self.rows() * self.n * self.k
    }

    /// Rows, outputs, inputs.
    pub(crate) fn size(&self) -> [usize; 3] {
        [self.rows(), self.n, self.k]
    }

    /// Panics unless the segments ascend from 0: backends give each to a thread of its own.
    pub(crate) fn check(&self) {
        super::check_segments(self.segments);
    }

    /// Panics unless `rows` is the shape of the left operand.
    pub(crate) fn check_left(&self, rows: SliceShape) {
        assert_eq!(rows, SliceShape { rows: self.rows(), width: self.k, profile: self.profile }, "left operand");
    }

    /// Panics unless `w` has the weight's shape.
    pub(crate) fn check_weight<M: Memory>(&self, w: Matrix<M>) {
        self.check();
        let shape = SliceShape { rows: self.n, width: self.k, profile: self.profile };
        match w {
            Matrix::Sliced(w) => assert_eq!(w.shape(), (self.weights(), shape), "sliced weight"),
            Matrix::Stored(w) => assert_eq!(w.len(), self.weights() * self.n * self.k, "stored weight"),
        }
    }

    /// Panics unless these are the operands of a forward product and the length of its output.
    pub(crate) fn check_forward<M: Memory>(&self, op: &'static str, y: usize, x: SliceShape, w: Matrix<M>) {
        self.check();
        assert!(!self.accumulate, "the forward product overwrites");
        self.check_left(x);
        self.check_weight(w);
        lengths(op, &[("y", y, self.rows() * self.n)]);
    }

    /// Panics unless these are the lengths of an input gradient and its source, and their weight.
    pub(crate) fn check_grad_input<M: Memory>(&self, op: &'static str, dx: usize, dy: usize, w: Matrix<M>) {
        self.check();
        self.check_weight(w);
        lengths(op, &[("dx", dx, self.rows() * self.k), ("dy", dy, self.rows() * self.n)]);
    }
}

/// `y = x Wᵀ`; overwrites.
pub struct ProductForward<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub x: &'a M::Rows,
    pub w: Matrix<'a, M>,
    pub p: Product<'a>,
}

impl<M: Memory> Op<M> for ProductForward<'_, M> {
    const NAME: &'static str = "product_forward";

    fn check(&self) {
        self.p.check_forward(Self::NAME, self.y.len(), self.x.shape(), self.w);
    }

    fn multiply_adds(&self) -> usize {
        self.p.multiply_adds()
    }

    fn size(&self) -> [usize; 3] {
        self.p.size()
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.product(&self.p)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}

/// `dx = dy W`, or added to `dx`.
pub struct ProductGradInput<'a, M: Memory> {
    pub dx: &'a mut F32<M>,
    pub dy: &'a F32<M>,
    pub w: Matrix<'a, M>,
    pub p: Product<'a>,
}

impl<M: Memory> Op<M> for ProductGradInput<'_, M> {
    const NAME: &'static str = "product_grad_input";

    fn check(&self) {
        self.p.check_grad_input(Self::NAME, self.dx.len(), self.dy.len(), self.w);
    }

    fn multiply_adds(&self) -> usize {
        self.p.multiply_adds()
    }

    fn size(&self) -> [usize; 3] {
        self.p.size()
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.product(&self.p)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dx)]
    }
}

/// `dW += dyᵀ x`.
pub struct ProductGradWeight<'a, M: Memory> {
    pub dw: &'a mut F32<M>,
    pub dy: &'a F32<M>,
    pub x: &'a F32<M>,
    pub p: Product<'a>,
    /// Includes the segment boundaries. No chunk crosses a row start.
    pub row_starts: &'a [usize],
}

impl<M: Memory> Op<M> for ProductGradWeight<'_, M> {
    const NAME: &'static str = "product_grad_weight";

    fn check(&self) {
        let p = &self.p;
        p.check();
        lengths(
            Self::NAME,
            &[
                ("dw", self.dw.len(), p.weights() * p.n * p.k),
                ("dy", self.dy.len(), p.rows() * p.n),
                ("x", self.x.len(), p.rows() * p.k),
            ],
        );
        assert!(self.row_starts.last().is_none_or(|&end| end <= p.rows()), "rows of data within the operands");
    }

    fn multiply_adds(&self) -> usize {
        self.p.multiply_adds()
    }

    fn size(&self) -> [usize; 3] {
        self.p.size()
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.product(&self.p)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dw)]
    }
}
