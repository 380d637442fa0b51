//! The products that the study compares, on small samples of an output: the slice product with
//! other chunk lengths and other rules for the weight's scale, and the usual float formats. Integer
//! sums are exact, float32 steps follow the contract (`crates/kernels/src/op/product.rs`); a test
//! checks that the contract's own variant has the reference's bits.

use crate::study_data::{bf16, tf32};
use isobit_numerics::fma::fma;
use isobit_numerics::slices::{Profile, Quantiser, magnitude_bits, split2, split3};
use isobit_numerics::{Fma, HardFma, SoftFma, lanes};

/// Rows along the contraction axis.
#[derive(Clone)]
pub(crate) struct Rows {
    pub(crate) count: usize,
    pub(crate) width: usize,
    pub(crate) values: Vec<f32>,
}

impl Rows {
    pub(crate) fn new(count: usize, width: usize, values: Vec<f32>) -> Self {
        assert_eq!(values.len(), count * width, "rows");
        Self { count, width, values }
    }

    fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.width..(index + 1) * self.width]
    }

    fn map(&self, f: impl Fn(f32) -> f32) -> Self {
        Self { values: self.values.iter().map(|&x| f(x)).collect(), ..*self }
    }
}

/// Which products of slices are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// Two slices, three products.
    X2,
    /// Two slices, all four products.
    X2Full,
    /// Three slices, six products.
    X3,
}

impl Kept {
    pub(crate) const fn profile(self) -> Profile {
        match self {
            Self::X2 | Self::X2Full => Profile::X2,
            Self::X3 => Profile::X3,
        }
    }
}

/// Multiplier and scale of a group. The kept products omit a factor of 256 (x2) or 65536 (x3); each
/// operand's scale carries half of it, a factor of 16 or 256 that costs no bit.
pub(crate) fn quantiser_of(profile: Profile, group: &[f32]) -> Quantiser {
    let max_bits = group.iter().map(|&x| magnitude_bits(x)).max().unwrap_or(0);
    let divisor = match profile {
        Profile::X2 => 32512.0 / 16.0,
        Profile::X3 => 8323072.0 / 256.0,
    };
    Quantiser { scale: f32::from_bits(max_bits) / divisor, ..Quantiser::of(profile, max_bits) }
}

/// Sliced rows; `scales` holds one scale per (row, group of `group` elements).
pub(crate) struct Sliced {
    pub(crate) count: usize,
    pub(crate) width: usize,
    pub(crate) group: usize,
    pub(crate) scales: Vec<f32>,
    slices: [Vec<i16>; 3],
}

impl Sliced {
    pub(crate) fn new(rows: &Rows, group: usize, profile: Profile) -> Self {
        let (mut scales, mut integers) = (Vec::new(), Vec::with_capacity(rows.values.len()));
        for row in rows.values.chunks_exact(rows.width) {
            for chunk in row.chunks(group) {
                let quantiser = quantiser_of(profile, chunk);
                scales.push(quantiser.scale);
                integers.extend(chunk.iter().map(|&x| quantiser.quantise(profile, x)));
            }
        }
        Self::from_integers(rows.count, rows.width, group, scales, &integers, profile)
    }

    pub(crate) fn from_integers(
        count: usize,
        width: usize,
        group: usize,
        scales: Vec<f32>,
        integers: &[i32],
        profile: Profile,
    ) -> Self {
        let split = |q: i32| match profile {
            Profile::X2 => {
                let [hi, lo] = split2(q);
                [hi, lo, 0]
            }
            Profile::X3 => split3(q),
        };
        let slices = [0, 1, 2].map(|part| integers.iter().map(|&q| i16::from(split(q)[part])).collect());
        Self { count, width, group, scales, slices }
    }

    fn slice(&self, part: usize, row: usize, at: &std::ops::Range<usize>) -> &[i16] {
        &self.slices[part][row * self.width + at.start..row * self.width + at.end]
    }
}

/// The rule for applying a weight's scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleRule {
    /// One per (row, chunk): `acc = fma(v, scale_a·scale_b, acc)`.
    Chunk,
    /// One per row: `acc = fma(v, scale_a, acc)`, at the end `acc·scale_b`.
    Row,
    /// Already applied to the left operand.
    Folded,
}

/// `out[m, n] = Σ a[m, ·]·b[n, ·]` in chunks of `a.group`.
pub(crate) fn slice_product(a: &Sliced, b: &Sliced, kept: Kept, rule: ScaleRule) -> Vec<f32> {
    let chunks = a.width.div_ceil(a.group);
    let mut out = Vec::with_capacity(a.count * b.count);
    for m in 0..a.count {
        for n in 0..b.count {
            let mut acc = 0.0;
            for c in 0..chunks {
                let at = c * a.group..((c + 1) * a.group).min(a.width);
                let v = chunk_value(a, b, kept, m, n, &at);
                let scale_a = a.scales[m * chunks + c];
                let s = if rule == ScaleRule::Chunk { scale_a * b.scales[n * chunks + c] } else { scale_a };
                acc = fma(v, s, acc);
            }
            out.push(if rule == ScaleRule::Row { acc * b.scales[n] } else { acc });
        }
    }
    out
}

fn chunk_value(a: &Sliced, b: &Sliced, kept: Kept, m: usize, n: usize, at: &std::ops::Range<usize>) -> f32 {
    let dot = |i: usize, j: usize| i64::from(dot_integers(a.slice(i, m, at), b.slice(j, n, at)));
    match kept {
        Kept::X2 => (256 * dot(0, 0) + dot(0, 1) + dot(1, 0)) as f32,
        Kept::X2Full => {
            let exact = 65536 * dot(0, 0) + 256 * (dot(0, 1) + dot(1, 0)) + dot(1, 1);
            (exact as f64 / 256.0) as f32
        }
        Kept::X3 => {
            let (first, second) = (dot(0, 0), dot(0, 1) + dot(1, 0));
            let third = dot(0, 2) + dot(1, 1) + dot(2, 0);
            fma(first as f32, 65536.0, fma(second as f32, 256.0, third as f32))
        }
    }
}

/// The input gradient's left operand under the whole-row rule: `dy[m, n]·scale_w[n]`.
pub(crate) fn folded(dy: &Rows, scales: &[f32]) -> Rows {
    let values = dy.values.chunks_exact(dy.width).flat_map(|row| row.iter().zip(scales).map(|(x, u)| x * u)).collect();
    Rows::new(dy.count, dy.width, values)
}

/// Columns `0..count` of whole weight rows, quantised with the rows' own scales, as rows along the
/// other axis.
pub(crate) fn transposed(w: &Rows, quantisers: &[Quantiser], profile: Profile) -> Sliced {
    let integers: Vec<i32> =
        w.values.iter().enumerate().map(|(i, &x)| quantisers[i % w.width].quantise(profile, x)).collect();
    let scales = quantisers.iter().map(|quantiser| quantiser.scale).collect();
    Sliced::from_integers(w.count, w.width, w.width, scales, &integers, profile)
}

/// Arithmetic to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FloatArithmetic {
    /// Operands rounded to bfloat16, the sum exact and rounded once.
    Bf16,
    /// Operands rounded to TF32, the sum exact and rounded once.
    Tf32,
    /// One chain of float32 FMA in ascending order.
    F32Chain,
    /// 32 chains and a halving tree.
    F32Lanes,
}

pub(crate) fn float_product(a: &Rows, b: &Rows, arithmetic: FloatArithmetic) -> Vec<f32> {
    match arithmetic {
        FloatArithmetic::Bf16 => reference(&a.map(bf16), &b.map(bf16)).into_iter().map(|x| x as f32).collect(),
        FloatArithmetic::Tf32 => reference(&a.map(tf32), &b.map(tf32)).into_iter().map(|x| x as f32).collect(),
        FloatArithmetic::F32Chain => each_pair(a, b, dot_chain),
        FloatArithmetic::F32Lanes => each_pair(a, b, dot_lanes),
    }
}

/// In float64: the yardstick for all others.
pub(crate) fn reference(a: &Rows, b: &Rows) -> Vec<f64> {
    each_pair(a, b, dot_f64)
}

fn each_pair<T>(a: &Rows, b: &Rows, dot: impl Fn(&[f32], &[f32]) -> T) -> Vec<T> {
    (0..a.count).flat_map(|m| (0..b.count).map(move |n| (m, n))).map(|(m, n)| dot(a.row(m), b.row(n))).collect()
}

/// Compiles a sum for AVX2 with FMA and for the plain target; the bits agree.
macro_rules! fast {
    (fn $name:ident($a:ident: $a_type:ty, $b:ident: $b_type:ty) -> $ret:ty { hard: $hard:expr, soft: $soft:expr }) => {
        fn $name($a: $a_type, $b: $b_type) -> $ret {
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                #[target_feature(enable = "avx2,fma")]
                fn avx2($a: $a_type, $b: $b_type) -> $ret {
                    $hard
                }
                // SAFETY: both features were detected above.
                return unsafe { avx2($a, $b) };
            }
            $soft
        }
    };
}

fast! { fn dot_integers(a: &[i16], b: &[i16]) -> i32 { hard: integers(a, b), soft: integers(a, b) } }
fast! { fn dot_f64(a: &[f32], b: &[f32]) -> f64 { hard: wide(a, b), soft: wide(a, b) } }
fast! { fn dot_chain(a: &[f32], b: &[f32]) -> f32 { hard: chain::<HardFma>(a, b), soft: chain::<SoftFma>(a, b) } }
fast! { fn dot_lanes(a: &[f32], b: &[f32]) -> f32 { hard: lanes::dot::<HardFma>(a, b), soft: lanes::dot::<SoftFma>(a, b) } }

// BOUND: 8960 products of at most 2^14 stay below 2^28.
#[inline(always)]
fn integers(a: &[i16], b: &[i16]) -> i32 {
    a.iter().zip(b).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum()
}

#[inline(always)]
fn chain<F: Fma>(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |acc, (&a, &b)| F::fma(a, b, acc))
}

#[inline(always)]
fn wide(a: &[f32], b: &[f32]) -> f64 {
    let mut acc = [0.0; 16];
    for (a, b) in a.chunks(16).zip(b.chunks(16)) {
        for (lane, (&a, &b)) in a.iter().zip(b).enumerate() {
            acc[lane] += f64::from(a) * f64::from(b);
        }
    }
    acc.iter().sum()
}

/// The error of a product against float64.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Error {
    /// ‖out − ref‖ / ‖ref‖.
    pub(crate) whole: f64,
    /// The same for the worst column of the output.
    pub(crate) worst_column: f64,
}

impl Error {
    pub(crate) fn of(out: &[f32], reference: &[f64], columns: usize) -> Self {
        let mut sums = vec![(0.0f64, 0.0f64); columns];
        for (index, (&out, &want)) in out.iter().zip(reference).enumerate() {
            let sum = &mut sums[index % columns];
            sum.0 += (f64::from(out) - want) * (f64::from(out) - want);
            sum.1 += want * want;
        }
        let ratio = |(error, size): (f64, f64)| libm::sqrt(error / size);
        let total = sums.iter().fold((0.0, 0.0), |total, sum| (total.0 + sum.0, total.1 + sum.1));
        Self { whole: ratio(total), worst_column: sums.into_iter().map(ratio).fold(0.0, f64::max) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study_data::{Data, Random, Weights};
    use isobit_kernels::op::{Product, ProductForward, ProductGradInput, SliceRows, SliceShape};
    use isobit_kernels::{Device, Matrix, Reference, StoredMatrix};
    use isobit_numerics::slices::CHUNK;

    /// The study measures the real arithmetic: its variant "whole row, 512" has the bits of the
    /// reference.
    #[test]
    fn the_contracts_variant_has_the_references_bits() {
        let (m, n, k) = (5, 600, 700);
        let mut random = Random::new(1);
        let x = Rows::new(m, k, Data::Channels.generate(&mut random, m, k));
        let dy = Rows::new(m, n, Data::Student.generate(&mut random, m, n));
        let w = Rows::new(n, k, (0..n).flat_map(|_| Weights::Outliers.row(&mut random, k)).collect());
        for kept in [Kept::X2, Kept::X3] {
            let profile = kept.profile();
            let segments = [0, m];
            let p = Product { segments: &segments, n, k, profile, accumulate: false };
            let b = Reference;
            let stored = b.upload(&w.values);
            let mut rows = b.rows(SliceShape { rows: m, width: k, profile });
            b.run(SliceRows { rows: &mut rows, x: &b.upload(&x.values) });
            let mut y = b.zeros(m * n);
            b.run(ProductForward { y: &mut y, x: &rows, w: Matrix::Stored(StoredMatrix::F32(&stored)), p });
            let sliced = Sliced::new(&w, k, profile);
            let got = slice_product(&Sliced::new(&x, CHUNK, profile), &sliced, kept, ScaleRule::Row);
            same(&y, &got);
            assert!(Error::of(&got, &reference(&x, &w), n).whole < 1e-2, "a product, not a multiple of it");

            let mut dx = b.zeros(m * k);
            let stored = Matrix::Stored(StoredMatrix::F32(&stored));
            b.run(ProductGradInput { dx: &mut dx, dy: &b.upload(&dy.values), w: stored, p });
            let columns = Rows::new(k, n, (0..k * n).map(|i| w.values[i % n * k + i / n]).collect());
            let quantisers: Vec<Quantiser> = w.values.chunks_exact(k).map(|row| quantiser_of(profile, row)).collect();
            let sliced = transposed(&columns, &quantisers, profile);
            let dy = Sliced::new(&folded(&dy, &sliced.scales), CHUNK, profile);
            same(&dx, &slice_product(&dy, &sliced, kept, ScaleRule::Folded));
        }
    }

    fn same(want: &[f32], got: &[f32]) {
        for (index, (want, got)) in want.iter().zip(got).enumerate() {
            assert_eq!(want.to_bits(), got.to_bits(), "[{index}]: {want:e} wanted, {got:e} given");
        }
    }
}
