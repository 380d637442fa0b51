//! The slice product is the product: all three forms of the reference against float64.
//!
//! Paths that agree on bits may all be wrong by the same factor; this is the test that would notice.
#![expect(clippy::float_arithmetic, reason = "a comparison with float64")]

use isobit_conformance::data::{Kind, Random};
use isobit_kernels::op::{Product, SliceShape};
use isobit_kernels::{Backend, Matrix, Reference, StoredMatrix};
use isobit_numerics::slices::Profile;

const M: usize = 9;
const N: usize = 530;
const K: usize = 540;

/// ‖got − want‖ / ‖want‖ with `want[i] = Σ_j terms(i, j)`.
fn error(got: &[f32], length: usize, terms: impl Fn(usize, usize) -> (f32, f32)) -> f64 {
    let (mut off, mut size) = (0.0, 0.0);
    for (index, &got) in got.iter().enumerate() {
        let products = (0..length).map(|j| terms(index, j)).map(|(a, b)| f64::from(a) * f64::from(b));
        let want: f64 = products.sum();
        off += (f64::from(got) - want) * (f64::from(got) - want);
        size += want * want;
    }
    (off / size).sqrt()
}

#[test]
fn the_reference_computes_products() {
    let mut random = Random::new(7);
    let x = random.f32s(Kind::Plain, M * K);
    let dy = random.f32s(Kind::Plain, M * N);
    let w = random.f32s(Kind::Plain, N * K);
    let b = Reference;
    // `cargo xtask study` measures 1e-4 and 7e-7 on normal data.
    for (profile, bound) in [(Profile::X2, 4e-4), (Profile::X3, 4e-6)] {
        let p = Product { segments: &[0, M], n: N, k: K, profile, accumulate: false };
        let stored = b.upload(&w);
        let weight = Matrix::Stored(StoredMatrix::F32(&stored));
        let mut room = b.zeros(b.product_workspace(&p));
        let mut rows = b.rows(SliceShape { rows: M, width: K, profile });
        b.slice_rows(&mut rows, &b.upload(&x));
        let (mut y, mut dx, mut dw) = (b.zeros(M * N), b.zeros(M * K), b.zeros(N * K));
        b.product_forward(&mut y, &rows, weight, &p, &mut room);
        b.product_grad_input(&mut dx, &b.upload(&dy), weight, &p, &mut room);
        b.product_grad_weight(&mut dw, &b.upload(&dy), &b.upload(&x), &p, &[0, 4, M], &mut room);
        let forward = error(&b.download(&y), K, |i, k| (x[i / N * K + k], w[i % N * K + k]));
        let grad_input = error(&b.download(&dx), N, |i, n| (dy[i / K * N + n], w[n * K + i % K]));
        let grad_weight = error(&b.download(&dw), M, |i, t| (dy[t * N + i / K], x[t * K + i % K]));
        for (form, error) in [("forward", forward), ("input gradient", grad_input), ("weight gradient", grad_weight)] {
            assert!(error < bound, "{form}, {}: error {error:.1e}, at most {bound:.0e}", profile.name());
        }
    }
}
