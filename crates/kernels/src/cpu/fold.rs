//! From exact sums to output: the value of a chunk, times the units, added to what the chunks before have left.

use super::block::Sums;
use super::path::{Path, Vector, multiversion};
use super::pool::SharedMut;
use super::slices::BLOCK;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// One block of output and what folds into it.
pub(super) struct Target<'a> {
    pub(super) out: &'a SharedMut<'a, f32>,
    pub(super) at: usize,
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) from_zero: bool,
    pub(super) left_units: &'a [f32],
    pub(super) left_stride: usize,
    pub(super) chunk_units: Option<&'a [f32]>,
    pub(super) row_units: Option<&'a [f32]>,
    /// What comes after the last chunk.
    pub(super) after: Option<After<'a>>,
}

/// What a linear layer adds to its product, for one block: `y + bias`, then `fma(alpha, Σ_j u[row, j]·factor[j, column], ·)`.
#[derive(Clone, Copy)]
pub(super) struct After<'a> {
    /// One for every column of the block, or none.
    pub(super) bias: Option<&'a [f32]>,
    /// `[rows, rank]`
    pub(super) u: &'a [f32],
    pub(super) rank: usize,
    /// `[rank, BLOCK]`
    pub(super) factor: &'a [f32],
    pub(super) alpha: f32,
}

impl Target<'_> {
    /// Panics unless this is a block of 32 columns and at least one row inside the output, with units, biases and factors for all of it.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn check_whole(&self) {
        assert!(self.width == BLOCK && (1..=BLOCK).contains(&self.rows), "a whole block");
        let last = self.at + (self.rows - 1) * self.stride;
        // SAFETY: the block is this thread's own; the slice checks that its last row is inside.
        let _ = unsafe { self.out.slice(last..last + BLOCK) };
        assert!((self.rows - 1) * self.left_stride < self.left_units.len(), "a unit for every row");
        for units in [self.chunk_units, self.row_units].into_iter().flatten() {
            assert_eq!(units.len(), BLOCK, "a unit for every column");
        }
        if let Some(after) = &self.after {
            assert!(after.bias.is_none_or(|bias| bias.len() == BLOCK), "a bias for every column");
            assert!(self.rows * after.rank <= after.u.len() && after.rank * BLOCK <= after.factor.len(), "factors");
        }
    }

    /// Asks for the output's cache lines while the block's sums are being formed.
    pub(super) fn prefetch(&self) {
        for row in 0..self.rows {
            let at = self.at + row * self.stride;
            self.out.prefetch(at);
            self.out.prefetch(at + self.width - 1);
        }
    }
}

/// The chunk's value from its exact sums.
#[inline(always)]
pub(super) fn chunk_value<F: isobit_numerics::Fma, const PLANES: usize>(sums: [i32; 3]) -> f32 {
    if PLANES == 2 {
        ((sums[0] << 8) + sums[1]) as f32
    } else {
        F::fma(sums[0] as f32, 65536.0, F::fma(sums[1] as f32, 256.0, sums[2] as f32))
    }
}

/// Folds a block. Whole blocks on AVX-512 have their own code: there the fold is a good part of the time.
pub(super) fn fold_block<const PLANES: usize>(path: Path, sums: &Sums, target: &Target) {
    #[cfg(target_arch = "x86_64")]
    if path.vector() == Vector::Avx512 && target.width == BLOCK && target.rows > 0 {
        target.check_whole();
        // SAFETY: the path has AVX-512; bounds were checked above.
        return unsafe { Whole::<PLANES>::new(sums, target).all() };
    }
    fold_any::<PLANES>(path, sums, target);
}

/// As `fold_any` for a block of 32 columns, row by row: a few rows now, the others later.
#[cfg(target_arch = "x86_64")]
pub(super) struct Whole<const PLANES: usize> {
    /// The next row's sums, output, unit and adapter.
    sums: [*const i32; PLANES],
    out: *mut f32,
    left_unit: *const f32,
    u: *const f32,
    rows: usize,
    stride: usize,
    left_stride: usize,
    chunk_units: [__m512; 2],
    row_units: [__m512; 2],
    bias: Option<[__m512; 2]>,
    factor: *const f32,
    rank: usize,
    alpha: f32,
    from_zero: bool,
}

/// A rank that is not known before.
pub(super) const ANY_RANK: usize = usize::MAX;

#[cfg(target_arch = "x86_64")]
impl<const PLANES: usize> Whole<PLANES> {
    /// # Safety
    /// The path has AVX-512, and the target passed [`Target::check_whole`]. Until the last row is folded, sums and target stay.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn new(sums: &Sums, target: &Target) -> Self {
        // SAFETY: whole blocks have 32 units and biases.
        unsafe {
            let load = |row: &[f32]| [_mm512_loadu_ps(row.as_ptr()), _mm512_loadu_ps(row.as_ptr().add(16))];
            let ones = [_mm512_set1_ps(1.0); 2];
            let after = target.after.as_ref();
            Self {
                sums: std::array::from_fn(|plane| sums.0[plane].as_ptr().cast()),
                out: target.out.pointer().add(target.at),
                left_unit: target.left_units.as_ptr(),
                u: after.map_or(std::ptr::null(), |after| after.u.as_ptr()),
                rows: target.rows,
                stride: target.stride,
                left_stride: target.left_stride,
                chunk_units: target.chunk_units.map_or(ones, load),
                row_units: target.row_units.map_or(ones, load),
                bias: after.and_then(|after| after.bias).map(load),
                factor: after.map_or(std::ptr::null(), |after| after.factor.as_ptr()),
                rank: after.map_or(0, |after| after.rank),
                alpha: after.map_or(0.0, |after| after.alpha),
                from_zero: target.from_zero,
            }
        }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Folds all rows that are left.
    ///
    /// # Safety
    /// As for [`Self::new`].
    #[target_feature(enable = "avx512f,fma")]
    pub(super) unsafe fn all(&mut self) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.rank {
                0 => self.some::<0>(BLOCK),
                8 => self.some::<8>(BLOCK),
                16 => self.some::<16>(BLOCK),
                _ => self.some::<ANY_RANK>(BLOCK),
            }
        }
    }

    /// Folds `count` rows, or those that are left. `RANK` is the adapter's, or [`ANY_RANK`].
    ///
    /// # Safety
    /// As for [`Self::new`], called where AVX-512 is enabled.
    #[inline(always)]
    pub(super) unsafe fn some<const RANK: usize>(&mut self, count: usize) {
        for _ in 0..count.min(self.rows) {
            // SAFETY: one of the target's rows, which were checked.
            unsafe {
                let left = _mm512_set1_ps(*self.left_unit);
                for half in 0..2 {
                    let y = self.half::<RANK>(left, half);
                    _mm512_storeu_ps(self.out.add(half * 16), y);
                }
                self.sums = self.sums.map(|sums| sums.add(BLOCK));
                self.out = self.out.wrapping_add(self.stride);
                self.left_unit = self.left_unit.wrapping_add(self.left_stride);
                self.u = self.u.wrapping_add(self.rank);
                self.rows -= 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn half<const RANK: usize>(&self, left: __m512, half: usize) -> __m512 {
        // SAFETY: the next row is one of the target's, which were checked.
        unsafe {
            let load = |plane: usize| _mm512_loadu_si512(self.sums[plane].add(half * 16).cast());
            let v = if PLANES == 2 {
                _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(load(0)), load(1)))
            } else {
                let [first, second, third] = [0, 1, 2].map(|plane| _mm512_cvtepi32_ps(load(plane)));
                let lower = _mm512_fmadd_ps(second, _mm512_set1_ps(256.0), third);
                _mm512_fmadd_ps(first, _mm512_set1_ps(65536.0), lower)
            };
            let acc = if self.from_zero { _mm512_setzero_ps() } else { _mm512_loadu_ps(self.out.add(half * 16)) };
            let folded = _mm512_fmadd_ps(v, _mm512_mul_ps(left, self.chunk_units[half]), acc);
            let mut y = _mm512_mul_ps(folded, self.row_units[half]);
            if let Some(bias) = &self.bias {
                y = _mm512_add_ps(y, bias[half]);
            }
            if RANK == 0 || self.rank == 0 {
                return y;
            }
            let mut sum = _mm512_setzero_ps();
            for j in 0..if RANK == ANY_RANK { self.rank } else { RANK } {
                let factor = _mm512_loadu_ps(self.factor.add(j * BLOCK + half * 16));
                sum = _mm512_fmadd_ps(_mm512_set1_ps(*self.u.add(j)), factor, sum);
            }
            _mm512_fmadd_ps(_mm512_set1_ps(self.alpha), sum, y)
        }
    }
}

multiversion! {
    fn fold_any<F, const PLANES: usize>(sums: &Sums, target: &Target) {
        let padded = |units: Option<&[f32]>| {
            let mut row = [1.0f32; BLOCK];
            if let Some(units) = units {
                row[..units.len()].copy_from_slice(units);
            }
            row
        };
        let (chunk_units, row_units) = (padded(target.chunk_units), padded(target.row_units));
        let follow = |y: f32, row: usize, column: usize, after: &After| {
            let y = after.bias.and_then(|bias| bias.get(column)).map_or(y, |bias| y + bias);
            if after.rank == 0 {
                return y;
            }
            let u = &after.u[row * after.rank..][..after.rank];
            let sum = u.iter().enumerate().fold(0.0, |sum, (j, &u)| F::fma(u, after.factor[j * BLOCK + column], sum));
            F::fma(after.alpha, sum, y)
        };
        // ORDER: one fused multiply-add per chunk, then the weight's unit. A missing right unit is 1, which changes nothing.
        let fold_row = |out: &mut [f32; BLOCK], row: usize| {
            let left = target.left_units[row * target.left_stride];
            let [first, second, third] = [&sums.0[0][row], &sums.0[1][row], &sums.0[2][row]];
            for column in 0..BLOCK {
                let v = chunk_value::<F, PLANES>([first[column], second[column], third[column]]);
                let acc = if target.from_zero { 0.0 } else { out[column] };
                out[column] = F::fma(v, left * chunk_units[column], acc) * row_units[column];
            }
            if let Some(after) = &target.after {
                for column in 0..BLOCK {
                    out[column] = follow(out[column], row, column, after);
                }
            }
        };
        for row in 0..target.rows {
            let at = target.at + row * target.stride;
            // SAFETY: the block is this thread's own.
            let out = unsafe { target.out.slice(at..at + target.width) };
            if let Ok(out) = out.try_into() {
                fold_row(out, row);
            } else {
                let mut whole = [0.0f32; BLOCK];
                whole[..out.len()].copy_from_slice(out);
                fold_row(&mut whole, row);
                out.copy_from_slice(&whole[..out.len()]);
            }
        }
    }
}
