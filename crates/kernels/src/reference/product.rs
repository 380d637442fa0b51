//! Slice product, the definition (`docs/numerics.md`, "Slice product").

use super::ReferenceMemory;
use super::slices::{self, SlicedRows, SlicedWeight};
use crate::backend::{Checked, Run};
use crate::op::{Product, ProductForward, ProductGradInput, ProductGradWeight, SliceShape, token_blocks};
use crate::{Buffer, Matrix, Reference};
use isobit_numerics::fma::fma;
use isobit_numerics::slices::{CHUNK, Profile, split2, split3};

/// The value of one chunk: exact integer sums of the kept slice products, converted to float32.
pub(super) fn chunk_value(profile: Profile, pairs: impl Iterator<Item = (i32, i32)>) -> f32 {
    match profile {
        Profile::X2 => {
            let (mut high, mut cross) = (0i64, 0i64);
            for (a, b) in pairs {
                let ([ah, al], [bh, bl]) = (split2(a).map(i64::from), split2(b).map(i64::from));
                high += ah * bh;
                cross += ah * bl + al * bh;
            }
            // Fits 32 bits for a chunk of 512; one rounding.
            (256 * high + cross) as f32
        }
        Profile::X3 => {
            let (mut first, mut second, mut third) = (0i64, 0i64, 0i64);
            for (a, b) in pairs {
                let ([ah, am, al], [bh, bm, bl]) = (split3(a).map(i64::from), split3(b).map(i64::from));
                first += ah * bh;
                second += ah * bm + am * bh;
                third += ah * bl + am * bm + al * bh;
            }
            fma(first as f32, 65536.0, fma(second as f32, 256.0, third as f32))
        }
    }
}

/// The weight as slices, sliced here if necessary.
fn sliced(w: Matrix<ReferenceMemory>, p: &Product) -> SlicedWeight {
    match w {
        Matrix::Sliced(w) => w.clone(),
        Matrix::Stored(w) => {
            let mut sliced = slices::weight(p.weights(), SliceShape { rows: p.n, width: p.k, profile: p.profile });
            slices::slice_stored(&mut sliced, w);
            sliced
        }
    }
}

impl Run<ProductForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut ProductForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let ProductForward { y, x, w, p } = op;
        let w = sliced(*w, p);
        let chunks = p.k.div_ceil(CHUNK);
        for e in 0..p.weights() {
            for m in p.segments[e]..p.segments[e + 1] {
                for n in 0..p.n {
                    let (xm, wn) = (&x.integers[m * p.k..], &w.integers[(e * p.n + n) * p.k..]);
                    let mut acc = 0.0;
                    for c in 0..chunks {
                        let at = c * CHUNK..((c + 1) * CHUNK).min(p.k);
                        let v = chunk_value(p.profile, at.map(|k| (xm[k], wn[k])));
                        acc = fma(v, x.scales[m * chunks + c], acc);
                    }
                    y[m * p.n + n] = acc * w.scales[e * p.n + n];
                }
            }
        }
    }
}

impl Run<ProductGradInput<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut ProductGradInput<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let ProductGradInput { dx, dy, w, p } = op;
        let w = sliced(*w, p);
        let chunks = p.n.div_ceil(CHUNK);
        for e in 0..p.weights() {
            let weight = &w.integers[e * p.n * p.k..];
            for m in p.segments[e]..p.segments[e + 1] {
                let folded: Vec<f32> = (0..p.n).map(|n| dy[m * p.n + n] * w.scales[e * p.n + n]).collect();
                let mut row = slices::rows(SliceShape { rows: 1, width: p.n, profile: p.profile });
                slices::slice_rows(&mut row, &folded);
                for k in 0..p.k {
                    let dx = &mut dx[m * p.k + k];
                    let mut acc = if p.accumulate { *dx } else { 0.0 };
                    for c in 0..chunks {
                        let at = c * CHUNK..((c + 1) * CHUNK).min(p.n);
                        let v = chunk_value(p.profile, at.map(|n| (row.integers[n], weight[n * p.k + k])));
                        acc = fma(v, row.scales[c], acc);
                    }
                    *dx = acc;
                }
            }
        }
    }
}

impl Run<ProductGradWeight<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut ProductGradWeight<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let ProductGradWeight { dw, dy, x, p, row_starts } = op;
        for e in 0..p.weights() {
            let segment = p.segments[e]..p.segments[e + 1];
            for block in token_blocks(row_starts, CHUNK).filter(|b| segment.contains(&b.start)) {
                assert!(block.end <= segment.end, "row starts include the segment borders");
                let (a, b) = (column_slices(dy, p.n, &block, p.profile), column_slices(x, p.k, &block, p.profile));
                let length = block.len();
                for n in 0..p.n {
                    for k in 0..p.k {
                        let (an, bk) = (&a.integers[n * length..], &b.integers[k * length..]);
                        let v = chunk_value(p.profile, (0..length).map(|t| (an[t], bk[t])));
                        let dw = &mut dw[(e * p.n + n) * p.k + k];
                        *dw = fma(v, a.scales[n] * b.scales[k], *dw);
                    }
                }
            }
        }
    }
}

/// The columns of `x` over the tokens of one block, as sliced rows of a single chunk.
fn column_slices(x: &[f32], width: usize, block: &std::ops::Range<usize>, profile: Profile) -> SlicedRows {
    let transposed: Vec<f32> = (0..width).flat_map(|n| block.clone().map(move |t| x[t * width + n])).collect();
    let mut rows = slices::rows(SliceShape { rows: width, width: block.len(), profile });
    slices::slice_rows(&mut rows, &transposed);
    rows
}
