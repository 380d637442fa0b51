//! Slices in their plainest form: integers and scales (`docs/numerics.md`, "Slices").

use super::ReferenceMemory;
use crate::backend::{Checked, Run, Shaped};
use crate::op::{SliceRows, SliceShape, SliceWeight};
use crate::{Buffer, Element, Reference, StoredMatrix};
use isobit_numerics::slices::{CHUNK, Quantiser, magnitude_bits};

impl Run<SliceRows<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut SliceRows<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        slice_rows(op.rows, op.x);
    }
}

/// Rows cut into chunks along their width, each with its own scale.
#[derive(Clone, Debug)]
pub struct SlicedRows {
    pub shape: SliceShape,
    /// `[rows, width]`
    pub integers: Vec<i32>,
    /// `[rows, chunks]`
    pub scales: Vec<f32>,
}

/// Weights: one scale per row.
#[derive(Clone, Debug)]
pub struct SlicedWeight {
    pub shape: SliceShape,
    pub count: usize,
    /// `[count, rows, width]`
    pub integers: Vec<i32>,
    /// `[count, rows]`
    pub scales: Vec<f32>,
}

pub(super) fn rows(shape: SliceShape) -> SlicedRows {
    let chunks = shape.width.div_ceil(CHUNK);
    SlicedRows { shape, integers: vec![0; shape.rows * shape.width], scales: vec![0.0; shape.rows * chunks] }
}

pub(super) fn weight(count: usize, shape: SliceShape) -> SlicedWeight {
    let rows = count * shape.rows;
    SlicedWeight { shape, count, integers: vec![0; rows * shape.width], scales: vec![0.0; rows] }
}

impl Shaped<SliceShape> for SlicedRows {
    fn shape(&self) -> SliceShape {
        self.shape
    }
}

impl Shaped<(usize, SliceShape)> for SlicedWeight {
    fn shape(&self) -> (usize, SliceShape) {
        (self.count, self.shape)
    }
}

pub(super) fn slice_rows(out: &mut SlicedRows, x: &[f32]) {
    let SliceShape { width, profile, .. } = out.shape;
    let mut scales = Vec::new();
    let mut integers = Vec::new();
    for row in x.chunks_exact(width.max(1)) {
        for chunk in row.chunks(CHUNK) {
            let quantiser = Quantiser::of(profile, chunk.iter().map(|&x| magnitude_bits(x)).max().unwrap_or(0));
            scales.push(quantiser.scale);
            integers.extend(chunk.iter().map(|&x| quantiser.quantise(profile, x)));
        }
    }
    (out.scales, out.integers) = (scales, integers);
}

impl Run<SliceWeight<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut SliceWeight<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        slice_stored(op.weight, op.w);
    }
}

pub(super) fn slice_stored(out: &mut SlicedWeight, w: StoredMatrix<ReferenceMemory>) {
    match w {
        StoredMatrix::F32(w) => slice(out, w),
        StoredMatrix::Bf16(w) => slice(out, w),
        StoredMatrix::F16(w) => slice(out, w),
    }
}

fn slice<T: Element>(out: &mut SlicedWeight, w: &[T]) {
    let SliceShape { width, profile, .. } = out.shape;
    let integers = out.integers.chunks_exact_mut(width.max(1));
    for ((row, integers), scale) in w.chunks_exact(width.max(1)).zip(integers).zip(&mut out.scales) {
        let max = row.iter().map(|x| magnitude_bits(x.to_f32())).max().unwrap_or(0);
        let quantiser = Quantiser::of(profile, max);
        *scale = quantiser.scale;
        for (integer, x) in integers.iter_mut().zip(row) {
            *integer = quantiser.quantise(profile, x.to_f32());
        }
    }
}
