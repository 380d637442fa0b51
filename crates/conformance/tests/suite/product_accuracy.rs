//! The reference slice product against float64: the suite compares paths with the reference, this
//! compares the reference with the mathematics.
#![expect(clippy::float_arithmetic, reason = "float64 is the judge")]

use isobit_conformance::data::{Distribution, Random};
use isobit_kernels::op::{Product, ProductForward, ProductGradInput, ProductGradWeight, SliceRows, SliceShape};
use isobit_kernels::{Device, Matrix, Reference, StoredMatrix};
use isobit_numerics::slices::Profile;

const M: usize = 9;
const N: usize = 70;
const K: usize = 1100;

/// ‖got − want‖ / ‖want‖
fn relative_error(got: &[f32], want: &[f64]) -> f64 {
    let difference: f64 = got.iter().zip(want).map(|(&g, w)| f64::from(g) - w).map(|d| d * d).sum();
    let size: f64 = want.iter().map(|w| w * w).sum();
    (difference / size).sqrt()
}

fn check(profile: Profile, bound: f64) {
    let mut random = Random::new(7);
    let [x, w, dy] = [M * K, N * K, M * N].map(|length| random.f32s(Distribution::Plain, length));
    let b = &Reference;
    let p = Product { segments: &[0, M], n: N, k: K, profile, accumulate: false };
    let (mut y, mut dx, mut dw) = (b.zeros(M * N), b.zeros(M * K), b.zeros(N * K));
    let mut rows = b.rows(SliceShape { rows: M, width: K, profile });
    b.run(SliceRows { rows: &mut rows, x: &b.upload(&x) });
    let stored = b.upload(&w);
    let weight = Matrix::Stored(StoredMatrix::F32(&stored));
    b.run(ProductForward { y: &mut y, x: &rows, w: weight, p });
    b.run(ProductGradInput { dx: &mut dx, dy: &b.upload(&dy), w: weight, p });
    b.run(ProductGradWeight { dw: &mut dw, dy: &b.upload(&dy), x: &b.upload(&x), p, row_starts: &[0, 4, M] });
    let exact =
        |rows: usize, columns: usize, depth: usize, term: &dyn Fn(usize, usize, usize) -> (f32, f32)| -> Vec<f64> {
            let at = |index: usize, d: usize| term(index / columns, index % columns, d);
            let product =
                |index: usize| (0..depth).map(|d| at(index, d)).map(|(a, b)| f64::from(a) * f64::from(b)).sum();
            (0..rows * columns).map(product).collect()
        };
    let want_y = exact(M, N, K, &|m, n, k| (x[m * K + k], w[n * K + k]));
    let want_dx = exact(M, K, N, &|m, k, n| (dy[m * N + n], w[n * K + k]));
    let want_dw = exact(N, K, M, &|n, k, m| (dy[m * N + n], x[m * K + k]));
    for (name, got, want) in [("y", &y, want_y), ("dx", &dx, want_dx), ("dw", &dw, want_dw)] {
        let error = relative_error(got, &want);
        assert!(error < bound, "{name}: relative error {error:e}, bound {bound:e}");
        assert!(error > bound / 1000.0, "{name}: relative error {error:e} is too good to be sliced");
    }
}

/// Quantising to `limit` steps of a maximum of at most 4 standard deviations leaves an error of
/// `4/limit/√12` of a standard deviation per operand and element, 5e-5 for x2 with both operands;
/// the dropped `lo·lo` adds `(74/8128)² = 8e-5`.
#[test]
fn x2_is_within_its_bound() {
    check(Profile::X2, 2e-4);
}

/// As above with 2¹⁶ times 127 steps and `(74·256/2080768)² = 8e-5/256`, plus float32 rounding of
/// the fold (3 roundings of 6e-8).
#[test]
fn x3_is_within_its_bound() {
    check(Profile::X3, 1.5e-6);
}
