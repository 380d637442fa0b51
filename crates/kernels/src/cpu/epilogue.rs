//! The epilogue, from exact sums to output: the value of a chunk times the scales, added to the
//! result of earlier chunks.

use super::block::Sums;
use super::path::{Path, Vector, multiversion};
use super::pool::SharedMut;
use super::slices::BLOCK;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// One block of output and the epilogue that writes it. Its creator has exclusive access to these
/// rows and columns of the output ([`SharedMut::slice`]) until its epilogue is done.
pub(super) struct Target<'a> {
    pub(super) out: &'a SharedMut<'a, f32>,
    pub(super) at: usize,
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) from_zero: bool,
    pub(super) left_scales: &'a [f32],
    pub(super) left_stride: usize,
    pub(super) chunk_scales: Option<&'a [f32]>,
    pub(super) row_scales: Option<&'a [f32]>,
    /// Applied after the last chunk.
    pub(super) after: Option<BlockTerms<'a>>,
}

/// The terms a linear layer adds to its product, for one block: `y + bias`, then
/// `fma(alpha, Σ_j u[row, j]·factor[j, column], ·)`.
#[derive(Clone, Copy)]
pub(super) struct BlockTerms<'a> {
    /// One per column of the block, or none.
    pub(super) bias: Option<&'a [f32]>,
    /// `[rows, rank]`
    pub(super) u: &'a [f32],
    pub(super) rank: usize,
    /// `[rank, BLOCK]`
    pub(super) factor: &'a [f32],
    pub(super) alpha: f32,
}

impl Target<'_> {
    /// Panics unless the block has 32 columns and at least one row, is inside the output, and has
    /// scales, biases and factors for all of it.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn check_whole(&self) {
        assert!(self.width == BLOCK && (1..=BLOCK).contains(&self.rows), "a whole block");
        // Rows ascend: if the last one is inside, all are.
        let last = self.at + (self.rows - 1) * self.stride;
        let _ = self.out.pointer_to(last..last + BLOCK);
        assert!((self.rows - 1) * self.left_stride < self.left_scales.len(), "a scale for every row");
        for scales in [self.chunk_scales, self.row_scales].into_iter().flatten() {
            assert_eq!(scales.len(), BLOCK, "a scale for every column");
        }
        if let Some(after) = &self.after {
            assert!(after.bias.is_none_or(|bias| bias.len() == BLOCK), "a bias for every column");
            assert!(self.rows * after.rank <= after.u.len() && after.rank * BLOCK <= after.factor.len(), "factors");
        }
    }

    /// Rank of the adapter applied afterwards, or zero.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn rank(&self) -> usize {
        self.after.as_ref().map_or(0, |after| after.rank)
    }

    /// Prefetches the output's cache lines while the block's sums are computed.
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

/// Runs the epilogue of a block. Whole blocks on AVX-512 have their own code, because the epilogue
/// is a large part of the time there.
pub(super) fn epilogue_block<const PLANES: usize>(path: Path, sums: &Sums, target: &Target) {
    #[cfg(target_arch = "x86_64")]
    if path.vector() == Vector::Avx512 && target.width == BLOCK && target.rows > 0 {
        target.check_whole();
        // SAFETY: a `Cpu` holds the path only after checking AVX-512; the target is whole (checked
        // above) and its rank is the one that `for_rank` chooses by.
        return unsafe { for_rank!(target.rank(), epilogue_whole::<PLANES>(sums, target)) };
    }
    epilogue_any::<PLANES>(path, sums, target);
}

/// `epilogue_any` for a block of 32 columns, resumable row by row. `RANK` is the adapter's rank, or
/// [`ANY_RANK`]. The block's columns of the first `HELD` factor rows stay in registers: reloading
/// them for every row would compete with tile loads for the load ports.
#[cfg(target_arch = "x86_64")]
pub(super) struct Whole<const PLANES: usize, const RANK: usize, const HELD: usize> {
    /// The next row's sums, output, scale and adapter.
    sums: [*const i32; PLANES],
    out: *mut f32,
    left_scale: *const f32,
    u: *const f32,
    rows: usize,
    stride: usize,
    left_stride: usize,
    chunk_scales: [__m512; 2],
    row_scales: [__m512; 2],
    bias: Option<[__m512; 2]>,
    held: [[__m512; 2]; HELD],
    factor: *const f32,
    rank: usize,
    alpha: __m512,
    /// Lanes that start from the output's contents: all or none.
    before: __mmask16,
}

/// A rank not known at compile time.
pub(super) const ANY_RANK: usize = usize::MAX;

/// Calls a function with const parameters `RANK` and `HELD` for a target's rank.
#[cfg(target_arch = "x86_64")]
macro_rules! for_rank {
    ($rank:expr, $function:ident $(::<$plane:tt>)? ($($argument:expr),*)) => {
        match $rank {
            0 => $function::<$($plane,)? 0, 0>($($argument),*),
            8 => $function::<$($plane,)? 8, 8>($($argument),*),
            16 => $function::<$($plane,)? 16, 8>($($argument),*),
            _ => $function::<$($plane,)? { ANY_RANK }, 0>($($argument),*),
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use for_rank;

#[cfg(target_arch = "x86_64")]
impl<const PLANES: usize, const RANK: usize, const HELD: usize> Whole<PLANES, RANK, HELD> {
    /// # Safety
    /// AVX-512 is enabled where this is inlined. The target, of rank `RANK` unless that is any,
    /// passed [`Target::check_whole`], and its output is the caller's own. Until the last row is
    /// written, sums and target are neither moved nor written.
    #[inline(always)]
    pub(super) unsafe fn new(sums: &Sums, target: &Target) -> Self {
        // SAFETY: `check_whole` saw 32 scales, 32 biases, `rank` rows of 32 factors (of which
        // `HELD`, at most `RANK`, are loaded here) and the block inside the output.
        unsafe {
            let load = |row: *const f32| [_mm512_loadu_ps(row), _mm512_loadu_ps(row.add(16))];
            let ones = [_mm512_set1_ps(1.0); 2];
            let scales = |scales: Option<&[f32]>| scales.map_or(ones, |scales| load(scales.as_ptr()));
            let after = target.after.as_ref();
            let factor = after.map_or(std::ptr::null(), |after| after.factor.as_ptr());
            let mut held = [ones; HELD];
            for (j, held) in held.iter_mut().enumerate() {
                *held = load(factor.add(j * BLOCK));
            }
            Self {
                sums: std::array::from_fn(|plane| sums.0[plane].as_ptr().cast()),
                out: target.out.pointer().add(target.at),
                left_scale: target.left_scales.as_ptr(),
                u: after.map_or(std::ptr::null(), |after| after.u.as_ptr()),
                rows: target.rows,
                stride: target.stride,
                left_stride: target.left_stride,
                chunk_scales: scales(target.chunk_scales),
                row_scales: scales(target.row_scales),
                bias: after.and_then(|after| after.bias).map(|bias| load(bias.as_ptr())),
                held,
                factor,
                rank: if RANK == ANY_RANK { target.rank() } else { RANK },
                alpha: _mm512_set1_ps(after.map_or(0.0, |after| after.alpha)),
                before: if target.from_zero { 0 } else { u16::MAX },
            }
        }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Finishes `count` rows, or the remaining ones.
    ///
    /// # Safety
    /// AVX-512 is enabled where this is inlined, and the promises of [`Self::new`] still hold.
    #[inline(always)]
    pub(super) unsafe fn some(&mut self, count: usize) {
        for _ in 0..count.min(self.rows) {
            // SAFETY: at least one of the target's rows is left.
            unsafe { self.row() }
        }
    }

    /// # Safety
    /// As [`Self::some`], and a row is left.
    #[inline(always)]
    unsafe fn row(&mut self) {
        // SAFETY: the next row is one of the target's: its scale, its `rank` numbers of `u` and 32
        // columns of output are inside (`check_whole`), and a plane has 32 rows of 32 sums, so that
        // the address after the last is still that of the plane's end. Other addresses may run past
        // theirs, unused.
        unsafe {
            let left = _mm512_set1_ps(*self.left_scale);
            let mut y = [self.product(left, 0), self.product(left, 1)];
            if let Some(bias) = &self.bias {
                y = [_mm512_add_ps(y[0], bias[0]), _mm512_add_ps(y[1], bias[1])];
            }
            if self.rank > 0 {
                let mut sums = [_mm512_setzero_ps(); 2];
                for j in 0..self.rank {
                    let load = |half: usize| _mm512_loadu_ps(self.factor.add(j * BLOCK + half * 16));
                    let factor = if j < HELD { self.held[j] } else { [load(0), load(1)] };
                    let u = _mm512_set1_ps(*self.u.add(j));
                    sums = [_mm512_fmadd_ps(u, factor[0], sums[0]), _mm512_fmadd_ps(u, factor[1], sums[1])];
                }
                y = [_mm512_fmadd_ps(self.alpha, sums[0], y[0]), _mm512_fmadd_ps(self.alpha, sums[1], y[1])];
            }
            _mm512_storeu_ps(self.out, y[0]);
            _mm512_storeu_ps(self.out.add(16), y[1]);
            self.sums = self.sums.map(|sums| sums.add(BLOCK));
            self.out = self.out.wrapping_add(self.stride);
            self.left_scale = self.left_scale.wrapping_add(self.left_stride);
            self.u = self.u.wrapping_add(self.rank);
            self.rows -= 1;
        }
    }

    /// The next row's 16 columns before bias and adapter.
    ///
    /// # Safety
    /// As [`Self::row`]; `half` is 0 or 1.
    #[inline(always)]
    unsafe fn product(&self, left: __m512, half: usize) -> __m512 {
        // SAFETY: 16 of the 32 sums of the next row in every plane, and of the 32 columns of its
        // output, which are inside; a masked load with no lanes reads nothing.
        unsafe {
            let load = |plane: usize| _mm512_loadu_si512(self.sums[plane].add(half * 16).cast());
            let v = if PLANES == 2 {
                _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(load(0)), load(1)))
            } else {
                let [first, second, third] = [0, 1, 2].map(|plane| _mm512_cvtepi32_ps(load(plane)));
                let lower = _mm512_fmadd_ps(second, _mm512_set1_ps(256.0), third);
                _mm512_fmadd_ps(first, _mm512_set1_ps(65536.0), lower)
            };
            let before = _mm512_maskz_loadu_ps(self.before, self.out.add(half * 16));
            let sum = _mm512_fmadd_ps(v, _mm512_mul_ps(left, self.chunk_scales[half]), before);
            _mm512_mul_ps(sum, self.row_scales[half])
        }
    }
}

/// The epilogue of a whole block at once.
///
/// # Safety
/// The machine has AVX-512. The target, of rank `RANK` unless that is any, passed
/// [`Target::check_whole`], and its output is the caller's own.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,fma")]
pub(super) unsafe fn epilogue_whole<const PLANES: usize, const RANK: usize, const HELD: usize>(
    sums: &Sums,
    target: &Target,
) {
    // SAFETY: AVX-512 is enabled here, the target is as the caller promises, and both borrows last
    // until all rows are finished.
    unsafe { Whole::<PLANES, RANK, HELD>::new(sums, target).some(BLOCK) }
}

multiversion! {
    fn epilogue_any<F, const PLANES: usize>(sums: &Sums, target: &Target) {
        let padded = |scales: Option<&[f32]>| {
            let mut row = [1.0f32; BLOCK];
            if let Some(scales) = scales {
                row[..scales.len()].copy_from_slice(scales);
            }
            row
        };
        let (chunk_scales, row_scales) = (padded(target.chunk_scales), padded(target.row_scales));
        let add_terms = |y: f32, row: usize, column: usize, after: &BlockTerms| {
            let y = after.bias.and_then(|bias| bias.get(column)).map_or(y, |bias| y + bias);
            if after.rank == 0 {
                return y;
            }
            let u = &after.u[row * after.rank..][..after.rank];
            let sum = u.iter().enumerate().fold(0.0, |sum, (j, &u)| F::fma(u, after.factor[j * BLOCK + column], sum));
            F::fma(after.alpha, sum, y)
        };
        // ORDER: one fused multiply-add per chunk, then the weight's scale. A missing right scale
        // is 1, which changes nothing.
        let finish_row = |out: &mut [f32; BLOCK], row: usize| {
            let left = target.left_scales[row * target.left_stride];
            let [first, second, third] = [&sums.0[0][row], &sums.0[1][row], &sums.0[2][row]];
            for column in 0..BLOCK {
                let v = chunk_value::<F, PLANES>([first[column], second[column], third[column]]);
                let acc = if target.from_zero { 0.0 } else { out[column] };
                out[column] = F::fma(v, left * chunk_scales[column], acc) * row_scales[column];
            }
            if let Some(after) = &target.after {
                for column in 0..BLOCK {
                    out[column] = add_terms(out[column], row, column, after);
                }
            }
        };
        for row in 0..target.rows {
            let at = target.at + row * target.stride;
            // SAFETY: rows and columns of the target are its maker's own; one row at a time is
            // borrowed.
            let out = unsafe { target.out.slice(at..at + target.width) };
            if let Ok(out) = out.try_into() {
                finish_row(out, row);
            } else {
                let mut whole = [0.0f32; BLOCK];
                whole[..out.len()].copy_from_slice(out);
                finish_row(&mut whole, row);
                out.copy_from_slice(&whole[..out.len()]);
            }
        }
    }
}
