//! Slicing (`docs/numerics.md`, "Slices"): float32 numbers become int8 slices with a power-of-two
//! scale.
//!
//! Activations have one scale per row and chunk of 512 columns, weights one per row. Each backend
//! chooses its own memory layout of slices; the values they represent are fixed.

use crate::backend::{Device, F32, Length, Memory, Run, Shaped, StoredMatrix};
use crate::op::{Op, Output, lengths};
use isobit_numerics::slices::Profile;

/// Rows to be sliced along their width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceShape {
    pub rows: usize,
    pub width: usize,
    pub profile: Profile,
}

/// Slices activations along their width.
pub struct SliceRows<'a, M: Memory> {
    pub rows: &'a mut M::Rows,
    pub x: &'a F32<M>,
}

impl<M: Memory> Op<M> for SliceRows<'_, M> {
    const NAME: &'static str = "slice_rows";

    fn check(&self) {
        let shape = self.rows.shape();
        lengths(Self::NAME, &[("x", self.x.len(), shape.rows * shape.width)]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::Rows(self.rows)]
    }
}

/// Slices consecutive weights, with one scale per row.
pub struct SliceWeight<'a, M: Memory> {
    pub weight: &'a mut M::Weight,
    pub w: StoredMatrix<'a, M>,
}

impl<M: Memory> Op<M> for SliceWeight<'_, M> {
    const NAME: &'static str = "slice_weight";

    fn check(&self) {
        let (count, shape) = self.weight.shape();
        lengths(Self::NAME, &[("w", self.w.len(), count * shape.rows * shape.width)]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::Weight(self.weight)]
    }
}

/// Slices `count` weights of `shape` each.
#[track_caller]
pub fn sliced_weight<D>(
    device: &D,
    w: StoredMatrix<D::Memory>,
    count: usize,
    shape: SliceShape,
) -> <D::Memory as Memory>::Weight
where
    D: Device + for<'a> Run<SliceWeight<'a, <D as Device>::Memory>>,
{
    let mut weight = device.weight(count, shape);
    device.run(SliceWeight { weight: &mut weight, w });
    weight
}
