//! Halving trees over the 32 lanes of 32 rows at once: the shapes of `numerics::lanes`, row by row.
//!
//! The tree of a single row is a short chain of ever narrower shuffles. On AVX-512 the trees of 16
//! rows are merged, so every step uses whole registers.

use crate::cpu::path::{Path, Vector, multiversion};
use crate::cpu::slices::BLOCK;
use isobit_numerics::lanes::{LANES, max, tree_sum};

/// The lanes of 32 rows.
pub(super) type Rows<T> = [[T; LANES]; BLOCK];

/// Sum of the lanes of each row.
pub(super) fn sums(path: Path, rows: &Rows<f32>) -> [f32; BLOCK] {
    #[cfg(target_arch = "x86_64")]
    if path.vector() == Vector::Avx512 {
        // SAFETY: a `Cpu` holds the path only after checking AVX-512.
        return unsafe { avx512::sums(rows) };
    }
    plain_sums(path, rows)
}

/// Maximum lane of each row. A row with a NaN lane has an unusable result.
pub(super) fn maxima(path: Path, rows: &Rows<f32>) -> [f32; BLOCK] {
    #[cfg(target_arch = "x86_64")]
    if path.vector() == Vector::Avx512 {
        // SAFETY: a `Cpu` holds the path only after checking AVX-512.
        return unsafe { avx512::maxima(rows) };
    }
    plain_maxima(path, rows)
}

/// Maximum lane of each row.
pub(super) fn integer_maxima(path: Path, rows: &Rows<u32>) -> [u32; BLOCK] {
    #[cfg(target_arch = "x86_64")]
    if path.vector() == Vector::Avx512 {
        // SAFETY: a `Cpu` holds the path only after checking AVX-512.
        return unsafe { avx512::integer_maxima(rows) };
    }
    plain_integer_maxima(path, rows)
}

multiversion! {
    fn plain_sums<_F>(rows: &Rows<f32>) -> [f32; BLOCK] {
        rows.map(tree_sum)
    }
}

multiversion! {
    fn plain_maxima<_F>(rows: &Rows<f32>) -> [f32; BLOCK] {
        rows.map(|lanes| lanes.into_iter().fold(f32::NEG_INFINITY, max))
    }
}

multiversion! {
    fn plain_integer_maxima<_F>(rows: &Rows<u32>) -> [u32; BLOCK] {
        rows.map(|lanes| lanes.into_iter().fold(0, u32::max))
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{BLOCK, LANES, Rows};
    use std::arch::x86_64::*;

    /// Reduces the lanes of 32 rows, 16 rows at a time.
    macro_rules! reduce {
        ($name:ident, $type:ty, $join:expr) => {
            #[target_feature(enable = "avx512f")]
            pub(super) fn $name(rows: &Rows<$type>) -> [$type; BLOCK] {
                let mut out = [<$type>::default(); BLOCK];
                for (rows, out) in rows.as_chunks::<16>().0.iter().zip(out.as_chunks_mut::<16>().0) {
                    // SAFETY: reads 16 of a row's 32 lanes at 0 and at 16, and writes the 16
                    // results.
                    unsafe {
                        let load = |row: usize, at: usize| _mm512_loadu_ps(rows[row].as_ptr().add(at).cast());
                        let row = |row: usize| $join(load(row, 0), load(row, LANES / 2));
                        let reduced = reduce16(row, |a, b| $join(a, b));
                        _mm512_storeu_ps(out.as_mut_ptr().cast(), reduced);
                    }
                }
                out
            }
        };
    }

    reduce!(sums, f32, |a, b| _mm512_add_ps(a, b));
    reduce!(maxima, f32, |a, b| _mm512_max_ps(a, b));
    reduce!(integer_maxima, u32, |a, b| {
        _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)))
    });

    /// Lane `l` with lane `l + 8` of every row, then 4, 2 and 1 apart: element `i` of the result is
    /// row `i`'s.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn reduce16(row: impl Fn(usize) -> __m512, join: impl Fn(__m512, __m512) -> __m512) -> __m512 {
        // Eight lanes of each of two rows, four of each of four, two of each of eight.
        let two = |a: usize, b: usize| {
            let (a, b) = (row(a), row(b));
            join(_mm512_shuffle_f32x4::<0b0100_0100>(a, b), _mm512_shuffle_f32x4::<0b1110_1110>(a, b))
        };
        let four = |first: usize| {
            let (a, b) = (two(first, first + 4), two(first + 8, first + 12));
            join(_mm512_shuffle_f32x4::<0b1000_1000>(a, b), _mm512_shuffle_f32x4::<0b1101_1101>(a, b))
        };
        let eight = |first: usize| {
            let (a, b) = (_mm512_castps_pd(four(first)), _mm512_castps_pd(four(first + 1)));
            join(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
        };
        let (a, b) = (eight(0), eight(2));
        join(_mm512_shuffle_ps::<0b1000_1000>(a, b), _mm512_shuffle_ps::<0b1101_1101>(a, b))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_reduces_alike() {
        // Numbers of very different magnitude, so a different order of additions changes the
        // result.
        let number = |i: usize| ((i * 7919 % 1000) as f32 - 500.0) * [1.0, 1e-4, 1e4][i % 3];
        let rows: Rows<f32> = std::array::from_fn(|row| std::array::from_fn(|lane| number(row * LANES + lane)));
        let bits: Rows<u32> = rows.map(|lanes| lanes.map(f32::to_bits));
        for path in Path::available() {
            for row in 0..BLOCK {
                assert_eq!(sums(path, &rows)[row].to_bits(), tree_sum(rows[row]).to_bits(), "sum of row {row}, {path}");
                let largest = rows[row].into_iter().fold(f32::NEG_INFINITY, max);
                assert_eq!(maxima(path, &rows)[row], largest, "row {row}, {path}");
                assert_eq!(Some(integer_maxima(path, &bits)[row]), bits[row].into_iter().max(), "row {row}, {path}");
            }
        }
    }
}
