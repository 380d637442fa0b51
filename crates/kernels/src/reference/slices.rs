//! Slices in their plainest form: integers and units (`docs/numerics.md`, "Slices").

use crate::op::SliceShape;
use crate::{Buffer, Element, Reference, StoredMatrix};
use isobit_numerics::slices::{CHUNK, Scale, magnitude_bits};

/// Rows cut into chunks along their width, each with its own unit.
#[derive(Clone, Debug)]
pub struct SlicedRows {
    pub shape: SliceShape,
    /// `[rows, width]`
    pub integers: Vec<i32>,
    /// `[rows, chunks]`
    pub units: Vec<f32>,
}

/// Weights: one unit for a whole row.
#[derive(Clone, Debug)]
pub struct SlicedWeight {
    pub shape: SliceShape,
    /// `[count, rows, width]`
    pub integers: Vec<i32>,
    /// `[count, rows]`
    pub units: Vec<f32>,
}

pub(super) fn rows(shape: SliceShape) -> SlicedRows {
    let chunks = shape.width.div_ceil(CHUNK);
    SlicedRows { shape, integers: vec![0; shape.rows * shape.width], units: vec![0.0; shape.rows * chunks] }
}

pub(super) fn slice_rows(out: &mut SlicedRows, x: &[f32]) {
    let SliceShape { rows, width, profile } = out.shape;
    assert_eq!(x.len(), rows * width, "rows to slice");
    let mut units = Vec::new();
    let mut integers = Vec::new();
    for row in x.chunks_exact(width.max(1)) {
        for chunk in row.chunks(CHUNK) {
            let scale = Scale::of(profile, chunk.iter().map(|&x| magnitude_bits(x)).max().unwrap_or(0));
            units.push(scale.unit);
            integers.extend(chunk.iter().map(|&x| scale.quantise(profile, x)));
        }
    }
    (out.units, out.integers) = (units, integers);
}

pub(super) fn slice_weight(w: StoredMatrix<Reference>, count: usize, shape: SliceShape) -> SlicedWeight {
    fn slice<T: Element>(w: &Buffer<T>, count: usize, shape: SliceShape) -> SlicedWeight {
        assert_eq!(w.len(), count * shape.rows * shape.width, "weights to slice");
        let mut sliced = SlicedWeight { shape, integers: Vec::new(), units: Vec::new() };
        for row in w.chunks_exact(shape.width.max(1)) {
            let max = row.iter().map(|x| magnitude_bits(x.to_f32())).max().unwrap_or(0);
            let scale = Scale::of(shape.profile, max);
            sliced.units.push(scale.unit);
            sliced.integers.extend(row.iter().map(|x| scale.quantise(shape.profile, x.to_f32())));
        }
        sliced
    }
    match w {
        StoredMatrix::F32(w) => slice(w, count, shape),
        StoredMatrix::Bf16(w) => slice(w, count, shape),
        StoredMatrix::F16(w) => slice(w, count, shape),
    }
}
