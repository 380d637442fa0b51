//! The reference product with 4-bit weights against float64, and against the slice product of the
//! expanded weight: whole numbers must not cost accuracy.
#![expect(clippy::float_arithmetic, reason = "float64 is the judge")]

use isobit_conformance::cases::product4::{HostWeight, packed};
use isobit_conformance::data::{Distribution, Random};
use isobit_kernels::op::{
    Product, Product4Forward, Product4GradInput, Product4Rows, ProductForward, ProductGradInput, SliceRows, SliceShape,
};
use isobit_kernels::{Device, Matrix, Reference, StoredMatrix};
use isobit_numerics::slices::Profile;

const M: usize = 6;
const N: usize = 560;
const K: usize = 1024;

/// ‖got − want‖ / ‖want‖
fn relative_error(got: &[f32], want: &[f64]) -> f64 {
    let difference: f64 = got.iter().zip(want).map(|(&g, w)| f64::from(g) - w).map(|d| d * d).sum();
    let size: f64 = want.iter().map(|w| w * w).sum();
    (difference / size).sqrt()
}

/// The weight as float32 `[n, k]`: eleven bits of scale times five bits are exact.
fn expanded(weight: &HostWeight) -> Vec<f32> {
    let view = weight.view();
    let element = |n: usize, k: usize| {
        let at = weight.group_of[k] as usize * N + n;
        weight.scales[at] * (f32::from(view.int4(k, n)) - f32::from(weight.zeros[at]))
    };
    (0..N * K).map(|index| element(index / K, index % K)).collect()
}

/// Errors of `y` and `dx`: with 4-bit weights, then of the slice product of the expanded weight.
fn errors(profile: Profile, group_size: usize, shuffled: bool, kind: Distribution) -> [[f64; 2]; 2] {
    let mut random = Random::new(11);
    let host = HostWeight::new(&mut random, N, K, group_size, shuffled, Distribution::Plain);
    let [x, dy] = [M * K, M * N].map(|length| random.f32s(kind, length));
    let weight = expanded(&host);
    let b = &Reference;
    let p = Product { segments: &[0, M], n: N, k: K, profile, accumulate: false };
    let mut rows = b.rows(SliceShape { rows: M, width: K, profile });
    let (mut y, mut dx) = (b.zeros(M * N), b.zeros(M * K));
    let (x_kept, dy_kept) = (b.upload(&x), b.upload(&dy));
    let packed = packed(b, &[host.view()]);
    b.run(Product4Rows { rows: &mut rows, x: &x_kept, w: &packed, p });
    b.run(Product4Forward { y: &mut y, x: &rows, w: &packed, p });
    b.run(Product4GradInput { dx: &mut dx, dy: &dy_kept, w: &packed, p });
    let want_y: Vec<f64> = (0..M * N)
        .map(|at| (0..K).map(|k| f64::from(x[at / N * K + k]) * f64::from(weight[at % N * K + k])).sum())
        .collect();
    let want_dx: Vec<f64> = (0..M * K)
        .map(|at| (0..N).map(|n| f64::from(dy[at / K * N + n]) * f64::from(weight[n * K + at % K])).sum())
        .collect();
    let packed = [relative_error(&y, &want_y), relative_error(&dx, &want_dx)];
    let stored = b.upload(&weight);
    let matrix = Matrix::Stored(StoredMatrix::F32(&stored));
    b.run(SliceRows { rows: &mut rows, x: &x_kept });
    b.run(ProductForward { y: &mut y, x: &rows, w: matrix, p });
    b.run(ProductGradInput { dx: &mut dx, dy: &dy_kept, w: matrix, p });
    [packed, [relative_error(&y, &want_y), relative_error(&dx, &want_dx)]]
}

/// Quantising to 32,512 steps of a maximum of at most 4 standard deviations leaves
/// `4/32512/√12 = 3.6e-5` of a standard deviation per element, and the weights add nothing; x3 has
/// 256 times as many steps and the roundings of the fold.
#[test]
fn errors_are_those_of_the_left_operand() {
    for (group_size, shuffled) in [(128, false), (128, true), (32, false), (0, false)] {
        for (profile, bound) in [(Profile::X2, 4e-5), (Profile::X3, 6e-7)] {
            let [packed, expanded] = errors(profile, group_size, shuffled, Distribution::Plain);
            for (error, other) in packed.into_iter().zip(expanded) {
                assert!(error < bound, "{profile:?}, groups of {group_size}: {error:e}, bound {bound:e}");
                assert!(error <= other, "{profile:?}, groups of {group_size}: {error:e}, {other:e} when expanded");
            }
        }
    }
}

#[test]
fn outliers_cost_no_more_than_with_expanded_weights() {
    for profile in Profile::ALL {
        let [packed, expanded] = errors(profile, 128, false, Distribution::Outliers);
        for (error, other) in packed.into_iter().zip(expanded) {
            assert!(error <= other, "{profile:?}: {error:e}, {other:e} when expanded");
        }
    }
}
