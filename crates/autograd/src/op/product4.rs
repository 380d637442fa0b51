//! Products with frozen 4-bit weights, of one layer or of a layer's experts (`docs/numerics.md`,
//! "Product with 4-bit weights").
//!
//! A matrix may consist of several parts stacked by rows, each a separate module in the file: gate
//! and up of experts. The parts' outputs lie side by side; the input gradient adds the parts in
//! order, the later ones accumulating.

use crate::arena::{Lease, RowsLease};
use crate::parameters::Quantized;
use crate::tape::Tape;
use isobit_kernels::Backend;
use isobit_kernels::op::{
    ColumnMode, Columns, CopyColumns, Place, Product, Product4Forward, Product4GradInput, Product4Rows, SliceShape,
};

/// Whether the weight takes a plain slicing of the input, which layers can share.
pub(crate) fn takes_plain_rows<B: Backend>(part: &Quantized<B>) -> bool {
    part.shape.ordered == 0
}

/// Columns of one part of a wider matrix.
#[derive(Clone, Copy)]
struct PartColumns {
    rows: usize,
    offset: usize,
    width: usize,
    whole: usize,
}

impl PartColumns {
    /// A copy from the whole matrix, or into it.
    fn columns(self, join: bool) -> Columns {
        let Self { rows, offset, width, whole } = self;
        let (wide, one) = (Place::dense(whole, offset, width), Place::dense(width, 0, width));
        let (from, to) = if join { (one, wide) } else { (wide, one) };
        Columns { tokens: rows, groups: 1, width, from, to, mode: ColumnMode::Overwrite }
    }
}

impl<B: Backend> Tape<'_, B> {
    /// `y = W x` for the rows of each segment; `rows` are the slices of `x` if already made.
    pub(crate) fn quantized_forward(
        &self,
        y: &mut Lease<B>,
        x: &Lease<B>,
        rows: Option<&RowsLease<B>>,
        parts: &[Quantized<B>],
        segments: &[usize],
    ) {
        let whole = parts.iter().map(|part| part.shape.n).sum();
        let count = segments.last().copied().unwrap_or(0);
        let [part] = parts else {
            let mut offset = 0;
            for part in parts {
                let width = part.shape.n;
                let mut one = self.take(count * width);
                self.one_quantized_forward(&mut one, x, rows, part, segments);
                let p = PartColumns { rows: count, offset, width, whole }.columns(true);
                self.backend.run(CopyColumns { y: y.buffer_mut(), x: one.buffer(), p });
                offset += width;
            }
            return;
        };
        self.one_quantized_forward(y, x, rows, part, segments);
    }

    fn one_quantized_forward(
        &self,
        y: &mut Lease<B>,
        x: &Lease<B>,
        rows: Option<&RowsLease<B>>,
        part: &Quantized<B>,
        segments: &[usize],
    ) {
        let p = self.quantized_product(part, segments);
        let own;
        let rows = if let Some(rows) = rows.filter(|_| takes_plain_rows(part)) {
            rows
        } else {
            own = self.ordered_rows(x, part, &p);
            &own
        };
        part.with_weight(self.backend, |w| {
            self.backend.run(Product4Forward { y: y.buffer_mut(), x: rows.slices(), w, p });
        });
    }

    /// Slices of rows, with channels in the order of the weight.
    fn ordered_rows(&self, x: &Lease<B>, part: &Quantized<B>, p: &Product) -> RowsLease<B> {
        let shape = SliceShape { rows: p.rows(), width: p.k, profile: p.profile };
        let mut rows = self.arena.rows(self.backend, shape);
        part.with_weight(self.backend, |w| {
            self.backend.run(Product4Rows { rows: rows.slices_mut(), x: x.buffer(), w, p: *p });
        });
        rows
    }

    /// `dx = Wᵀ dy`, or added to `dx`.
    pub(crate) fn quantized_grad_input(
        &self,
        dx: &mut Lease<B>,
        dy: &Lease<B>,
        parts: &[Quantized<B>],
        segments: &[usize],
        accumulate: bool,
    ) {
        let whole: usize = parts.iter().map(|part| part.shape.n).sum();
        let mut offset = 0;
        for (index, part) in parts.iter().enumerate() {
            // ORDER: parts in their order; the first starts from zero or from what is there.
            let p = Product { accumulate: accumulate || index > 0, ..self.quantized_product(part, segments) };
            let width = part.shape.n;
            let one = (width < whole).then(|| {
                let mut one = self.take(p.rows() * width);
                let p = PartColumns { rows: p.rows(), offset, width, whole }.columns(false);
                self.backend.run(CopyColumns { y: one.buffer_mut(), x: dy.buffer(), p });
                one
            });
            let dy = one.as_ref().unwrap_or(dy).buffer();
            part.with_weight(self.backend, |w| {
                self.backend.run(Product4GradInput { dx: dx.buffer_mut(), dy, w, p });
            });
            offset += width;
        }
    }

    fn quantized_product<'s>(&self, part: &Quantized<B>, segments: &'s [usize]) -> Product<'s> {
        Product { segments, n: part.shape.n, k: part.shape.k, profile: self.profile, accumulate: false }
    }
}
