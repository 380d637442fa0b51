//! Exact sums of a 32×32 block whose right operand has one small byte per number instead of slices:
//! `Σ slice·d` for every slice of the left operand (`op/product4.rs`). The layouts are those of
//! `block.rs`; plane `s` of the sums belongs to left slice `s`.
//!
//! A piece may start and end inside a tile. Right bytes outside it are zero, and are skipped where
//! the path allows.

use super::block::{LeftView, RightView, Sums};
use super::epilogue::{Target, epilogue_block};
use super::path::Path;
use super::slices::{BLOCK, CHUNK_TILES, TILE_BYTES, TILE_DEPTH, TILE_ROWS};
use isobit_numerics::slices::Profile;
use std::ops::Range;

/// Groups of four elements in a tile.
const TILE_GROUPS: usize = TILE_DEPTH / 4;

/// `128·Σ_k right` of every column, which the VNNI path subtracts; other paths do not need it.
pub(super) fn column_sums(path: Path, bias: &mut [i32; BLOCK], right: RightView, groups: Range<usize>) {
    check_right(right, &groups);
    #[cfg(target_arch = "x86_64")]
    if path == Path::Avx512 {
        // SAFETY: a `Cpu` holds this path only after checking VNNI; the groups of both blocks are
        // inside (`check_right`).
        unsafe { vnni::column_sums(bias, right, groups) }
    }
    let _ = (path, bias);
}

fn check_right(right: RightView, groups: &Range<usize>) {
    assert!((1..=2).contains(&right.blocks), "one or two right blocks");
    assert!(!groups.is_empty() && groups.end <= CHUNK_TILES * TILE_GROUPS, "groups of one chunk");
    let end = (right.blocks - 1) * right.block_stride + groups.end.div_ceil(TILE_GROUPS) * TILE_BYTES;
    assert!(end <= right.tiles.len(), "right block in bounds");
}

/// A right panel whose groups of four elements, counted from the first tile, take part. `bias` are
/// its [`column_sums`].
pub(super) struct Int4Panel<'a> {
    pub(super) right: RightView<'a>,
    pub(super) bias: &'a [i32; BLOCK],
    pub(super) groups: Range<usize>,
}

/// Sums of a block of the target's rows against a right panel, with the target's epilogue. `sums`
/// is scratch.
pub(super) fn multiply_block(
    path: Path,
    sums: &mut Sums,
    left: LeftView,
    panel: &Int4Panel,
    profile: Profile,
    target: &Target,
) {
    check(path, left, target.rows, panel.right, &panel.groups, profile.slice_count());
    #[cfg(target_arch = "x86_64")]
    if path == Path::Avx512 && target.width == BLOCK && target.rows > 0 {
        // Pieces are short, so sums go straight from registers to the output.
        target.check_whole();
        // SAFETY: a `Cpu` holds this path only after checking AVX-512 VNNI; rows and groups of both
        // operands are inside (`check`), and the target is whole and its maker's own.
        return unsafe { vnni::sums(sums, left, target.rows, panel, profile, Some(target)) };
    }
    int4_sums(path, sums, left, target.rows, panel, profile);
    match profile {
        Profile::X2 => epilogue_block::<2>(path, sums, target),
        Profile::X3 => epilogue_block::<3>(path, sums, target),
    }
}

fn check(path: Path, left: LeftView, rows: usize, right: RightView, groups: &Range<usize>, slices: usize) {
    check_right(right, groups);
    let last_tile = (groups.end - 1) / TILE_GROUPS;
    let left_end = last_tile * left.column_stride + (slices - 1) * left.slice_stride;
    let rows_read = if path == Path::Amx { rows.next_multiple_of(TILE_ROWS) } else { rows };
    assert!(rows <= BLOCK && left_end + rows_read * TILE_DEPTH <= left.bytes.len(), "left block in bounds");
}

/// The sums of [`multiply_block`], without its epilogue. The caller has checked the bounds.
fn int4_sums(path: Path, sums: &mut Sums, left: LeftView, rows: usize, panel: &Int4Panel, profile: Profile) {
    let (slices, right, groups) = (profile.slice_count(), panel.right, panel.groups.clone());
    match path {
        Path::Scalar => wide::sums(sums, left, rows, right, groups, slices),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Cpu` holds this path only after checking AVX2.
        Path::Avx2 => unsafe { wide::sums_avx2(sums, left, rows, right, groups, slices) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Cpu` holds this path only after checking AVX-512 VNNI; `multiply_block`
        // checked that rows and groups of both operands are inside.
        Path::Avx512 => unsafe { vnni::sums(sums, left, rows, panel, profile, None) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: whoever computes on this path holds an AMX session; `multiply_block` checked that
        // whole tiles of both operands are inside and that there is a group.
        Path::Amx => unsafe { amx_sums(sums, left, rows, right, &groups, slices) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("only the scalar path exists on this architecture"),
    }
}

/// The groups of each tile, as numbers within the tile.
fn by_tile(groups: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let Range { start, end } = *groups;
    (start / TILE_GROUPS..end.div_ceil(TILE_GROUPS)).map(move |tile| {
        let first = tile * TILE_GROUPS;
        (tile, start.max(first) - first..end.min(first + TILE_GROUPS) - first)
    })
}

/// AMX: whole tiles, one pass per slice of the left operand.
///
/// # Safety
/// This thread holds an AMX session. There is at least one group; rows up to the next multiple of
/// 16 of all slices and of all tiles with groups, and those tiles of the right operand, are inside;
/// `rows ≤ 32`.
#[cfg(target_arch = "x86_64")]
unsafe fn amx_sums(
    sums: &mut Sums,
    left: LeftView,
    rows: usize,
    right: RightView,
    groups: &Range<usize>,
    slices: usize,
) {
    use super::amx;
    let first = groups.start / TILE_GROUPS;
    let columns = groups.end.div_ceil(TILE_GROUPS) - first;
    let tall = rows > TILE_ROWS;
    for slice in 0..slices {
        // SAFETY: the session is the caller's. A pass reads one or two left tiles of a slice and
        // two right ones in each of `columns` (at least one) columns, inside by the caller's
        // promise; a plane has 32 rows of 32 sums.
        unsafe {
            amx::zero();
            let pass = amx::Pass {
                left: left.bytes.as_ptr().add(first * left.column_stride + slice * left.slice_stride),
                left_stride: left.column_stride,
                right: right.tiles.as_ptr().add(first * TILE_BYTES),
                right_stride: TILE_BYTES,
                // For a missing second block the first is computed again and the result ignored.
                right_second: if right.blocks == 2 { right.block_stride } else { 0 },
                columns,
            };
            if tall {
                amx::multiply_tall(pass);
            } else {
                amx::multiply_flat(pass);
            }
            amx::store(sums.0[slice].as_mut_ptr().cast(), BLOCK, tall);
        }
    }
}

/// 16-bit multiplication: the scalar and AVX2 paths.
mod wide {
    use super::*;

    /// One row and 16 columns at a time; adjacent products are added in pairs, for which baseline
    /// x86-64 has an instruction.
    pub(super) fn sums(
        sums: &mut Sums,
        left: LeftView,
        rows: usize,
        right: RightView,
        groups: Range<usize>,
        slices: usize,
    ) {
        // Right bytes as 16-bit numbers, one block of 16 columns at a time.
        let mut widened = [[0i16; 4 * TILE_ROWS]; CHUNK_TILES * TILE_GROUPS];
        for block in 0..right.blocks {
            let bytes = &right.tiles[block * right.block_stride..];
            for group in groups.clone() {
                for (wide, byte) in widened[group].iter_mut().zip(&bytes[group * 4 * TILE_ROWS..]) {
                    *wide = i16::from(*byte);
                }
            }
            for (slice, row) in (0..slices).flat_map(|slice| (0..rows).map(move |row| (slice, row))) {
                let mut acc = [[0i32; 4]; TILE_ROWS / 2];
                for (tile, within) in by_tile(&groups) {
                    let at = tile * left.column_stride + slice * left.slice_stride + row * TILE_DEPTH;
                    let (bytes, _) = left.bytes[at..at + TILE_DEPTH].as_chunks::<4>();
                    let tile = &widened[tile * TILE_GROUPS..][..TILE_GROUPS];
                    for (a, b) in bytes[within.clone()].iter().zip(&tile[within]) {
                        let a: [i16; 8] = std::array::from_fn(|i| i16::from(a[i % 4]));
                        for (acc, b) in acc.iter_mut().zip(b.as_chunks::<8>().0) {
                            for i in 0..4 {
                                acc[i] += i32::from(a[2 * i]) * i32::from(b[2 * i])
                                    + i32::from(a[2 * i + 1]) * i32::from(b[2 * i + 1]);
                            }
                        }
                    }
                }
                let out = &mut sums.0[slice][row][block * TILE_ROWS..];
                for (out, pair) in out.iter_mut().zip(acc.as_flattened().as_chunks::<2>().0) {
                    *out = pair[0] + pair[1];
                }
            }
        }
    }

    /// Four rows and eight columns at a time: eight accumulators of `(column, half)` pairs.
    ///
    /// # Safety
    /// The machine has AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn sums_avx2(
        sums: &mut Sums,
        left: LeftView,
        rows: usize,
        right: RightView,
        groups: Range<usize>,
        slices: usize,
    ) {
        use std::arch::x86_64::*;
        const ROWS: usize = 4;
        // Left bytes of four rows as 16-bit numbers, four to a word: [group][row].
        let mut rows_wide = [[0i64; ROWS]; CHUNK_TILES * TILE_GROUPS];
        for (slice, first) in (0..slices).flat_map(|slice| (0..rows).step_by(ROWS).map(move |row| (slice, row))) {
            let count = ROWS.min(rows - first);
            for (tile, within) in by_tile(&groups) {
                for row in 0..count {
                    let at = tile * left.column_stride + slice * left.slice_stride + (first + row) * TILE_DEPTH;
                    let (bytes, _) = left.bytes[at..at + TILE_DEPTH].as_chunks::<4>();
                    for group in within.clone() {
                        let wide = bytes[group].map(|byte| u64::from(i16::from(byte) as u16));
                        let word = wide[0] | wide[1] << 16 | wide[2] << 32 | wide[3] << 48;
                        rows_wide[tile * TILE_GROUPS + group][row] = word as i64;
                    }
                }
            }
            for half in 0..2 * right.blocks {
                let bytes = &right.tiles[half / 2 * right.block_stride..][..groups.end * 64];
                let mut acc = [[_mm256_setzero_si256(); 2]; ROWS];
                for group in groups.clone() {
                    // SAFETY: reads the first or second 32 bytes of a group of 64, which the slice
                    // above, of all groups up to `groups.end`, holds.
                    unsafe {
                        let b = bytes.as_ptr().add(group * 64 + half % 2 * 32);
                        let b0 = _mm256_cvtepi8_epi16(_mm_loadu_si128(b.cast()));
                        let b1 = _mm256_cvtepi8_epi16(_mm_loadu_si128(b.add(16).cast()));
                        for row in 0..ROWS {
                            let a = _mm256_set1_epi64x(rows_wide[group][row]);
                            acc[row][0] = _mm256_add_epi32(acc[row][0], _mm256_madd_epi16(a, b0));
                            acc[row][1] = _mm256_add_epi32(acc[row][1], _mm256_madd_epi16(a, b1));
                        }
                    }
                }
                for row in 0..count {
                    // Adjacent pairs are the two halves of one column; the permutation undoes
                    // hadd's lane order.
                    let columns =
                        _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_hadd_epi32(acc[row][0], acc[row][1]));
                    // SAFETY: eight columns from `8·half`, which is at most 24, inside a row of 32.
                    unsafe {
                        _mm256_storeu_si256(sums.0[slice][first + row].as_mut_ptr().add(half * 8).cast(), columns);
                    }
                }
            }
        }
    }
}

/// AVX-512 VNNI: unsigned by signed bytes. The left bytes are kept 128 too large (`left_bias`).
#[cfg(target_arch = "x86_64")]
mod vnni {
    use super::*;
    use std::arch::x86_64::*;

    /// # Safety
    /// The machine has these features; the groups of every right block are inside.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub(super) unsafe fn column_sums(bias: &mut [i32; BLOCK], right: RightView, groups: Range<usize>) {
        let weight = _mm512_set1_epi8(-128); // 128 as an unsigned byte
        for block in 0..right.blocks {
            let mut acc = _mm512_setzero_si512();
            for group in groups.clone() {
                // SAFETY: reads the 64 bytes of a group, inside by the caller's promise.
                let bytes = unsafe {
                    let bytes = right.tiles.as_ptr().add(block * right.block_stride + group * 64);
                    _mm512_loadu_si512(bytes.cast())
                };
                acc = _mm512_dpbusd_epi32(acc, weight, bytes);
            }
            // SAFETY: writes 16 columns from `16·block`, which is at most 16, of a row of 32.
            unsafe { _mm512_storeu_si512(bias.as_mut_ptr().add(block * 16).cast(), acc) }
        }
    }

    /// Stores the sums, or adds them to a target of 32 columns if given.
    ///
    /// # Safety
    /// The machine has these features; `rows ≤ 32` rows of all slices and of all tiles with groups,
    /// and the groups of the right operand, are inside. A target has `rows` rows, passed
    /// [`Target::check_whole`], and its output is the caller's own.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,fma")]
    pub(super) unsafe fn sums(
        sums: &mut Sums,
        left: LeftView,
        rows: usize,
        panel: &Int4Panel,
        profile: Profile,
        target: Option<&Target>,
    ) {
        let Int4Panel { right, bias, ref groups } = *panel;
        let mut row = 0;
        while row < rows {
            // SAFETY: all by the caller's promise; at least as many rows are left as each arm
            // takes, so `row + ROWS ≤ rows`.
            row += unsafe {
                match (profile, rows - row) {
                    (Profile::X2, 6..) => multiply::<6, 2>(sums, left, row, right, bias, groups, target),
                    (Profile::X2, 4..) => multiply::<4, 2>(sums, left, row, right, bias, groups, target),
                    (Profile::X2, 2..) => multiply::<2, 2>(sums, left, row, right, bias, groups, target),
                    (Profile::X2, _) => multiply::<1, 2>(sums, left, row, right, bias, groups, target),
                    (Profile::X3, 4..) => multiply::<4, 3>(sums, left, row, right, bias, groups, target),
                    (Profile::X3, 2..) => multiply::<2, 3>(sums, left, row, right, bias, groups, target),
                    (Profile::X3, _) => multiply::<1, 3>(sums, left, row, right, bias, groups, target),
                }
            };
        }
    }

    /// `ROWS` rows by 32 columns.
    ///
    /// # Safety
    /// As [`sums`], with `row + ROWS` rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,fma")]
    unsafe fn multiply<const ROWS: usize, const SLICES: usize>(
        sums: &mut Sums,
        left: LeftView,
        row: usize,
        right: RightView,
        bias: &[i32; BLOCK],
        groups: &Range<usize>,
        target: Option<&Target>,
    ) -> usize {
        let mut acc = [[[_mm512_setzero_si512(); 2]; SLICES]; ROWS];
        let second = if right.blocks == 2 { right.block_stride } else { 0 };
        // SAFETY: reads groups of four bytes of each slice of each row and of 64 bytes of the right
        // operand, inside by the caller's promise (a missing second block is the first one again).
        // Of the target, 32 scales of columns, one of each row and 32 outputs of each row are
        // inside (`check_whole`); rows of planes are indexed.
        unsafe {
            for (tile, within) in by_tile(groups) {
                let a = left.bytes.as_ptr().add(tile * left.column_stride + row * TILE_DEPTH);
                let b = right.tiles.as_ptr().add(tile * TILE_BYTES);
                for group in within {
                    let d0 = _mm512_loadu_si512(b.add(group * 64).cast());
                    let d1 = _mm512_loadu_si512(b.add(second + group * 64).cast());
                    for r in 0..ROWS {
                        for slice in 0..SLICES {
                            let at = a.add(slice * left.slice_stride + r * TILE_DEPTH + group * 4);
                            let spread = _mm512_set1_epi32(at.cast::<i32>().read_unaligned());
                            acc[r][slice][0] = _mm512_dpbusd_epi32(acc[r][slice][0], spread, d0);
                            acc[r][slice][1] = _mm512_dpbusd_epi32(acc[r][slice][1], spread, d1);
                        }
                    }
                }
            }
            for block in 0..2 {
                let bias = _mm512_loadu_si512(bias.as_ptr().add(block * 16).cast());
                // No closures here: one that is not inlined spills all registers.
                let right = match target {
                    Some(Target { chunk_scales: Some(scales), .. }) => _mm512_loadu_ps(scales.as_ptr().add(block * 16)),
                    _ => _mm512_set1_ps(1.0),
                };
                for r in 0..ROWS {
                    let mut exact = [_mm512_setzero_si512(); SLICES];
                    for slice in 0..SLICES {
                        exact[slice] = _mm512_sub_epi32(acc[r][slice][block], bias);
                    }
                    if let Some(target) = target {
                        let left = *target.left_scales.as_ptr().add((row + r) * target.left_stride);
                        let out = target.out.pointer().add(target.at + (row + r) * target.stride + block * 16);
                        accumulate::<SLICES>(out, exact, _mm512_mul_ps(_mm512_set1_ps(left), right), target.from_zero);
                    } else {
                        for slice in 0..SLICES {
                            let to = sums.0[slice][row + r].as_mut_ptr().add(block * 16);
                            _mm512_storeu_si512(to.cast(), exact[slice]);
                        }
                    }
                }
            }
        }
        ROWS
    }

    /// Like `epilogue_block`, from registers; these sums never come with row scales. By value: a
    /// reference would keep the accumulators in memory.
    ///
    /// # Safety
    /// AVX-512 is enabled where this is inlined; 16 outputs at `out` are the caller's own.
    #[inline(always)]
    unsafe fn accumulate<const SLICES: usize>(out: *mut f32, sums: [__m512i; SLICES], scale: __m512, from_zero: bool) {
        // SAFETY: reads and writes the 16 outputs, which are the caller's.
        unsafe {
            let v = if SLICES == 2 {
                _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(sums[0]), sums[1]))
            } else {
                let third = _mm512_cvtepi32_ps(sums[SLICES - 1]);
                let lower = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[1]), _mm512_set1_ps(256.0), third);
                _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[0]), _mm512_set1_ps(65536.0), lower)
            };
            let old = if from_zero { _mm512_setzero_ps() } else { _mm512_loadu_ps(out) };
            _mm512_storeu_ps(out, _mm512_fmadd_ps(v, scale, old));
        }
    }
}
