//! The core of the slice product: exact integer sums of one 32×32 block over one chunk, per
//! instruction set.
//!
//! A profile is a list of slice products, each adding into a plane of sums. Every path fills the
//! same planes with different multiply instructions. Integer sums are exact, so the paths need to
//! agree only on the layout.

use super::path::Path;
use super::slices::{BLOCK, CHUNK_TILES, TILE_BYTES, TILE_DEPTH, TILE_ROWS};
use isobit_numerics::slices::Profile;

/// Integer sums of one block, `[plane][row][column]`.
///
/// Profile x2: plane 0 is `Σ hi·hi`, plane 1 `Σ (hi·lo + lo·hi)`. Profile x3: `Σ hh`,
/// `Σ (hm + mh)`, `Σ (hl + mm + lh)`.
#[repr(C, align(64))]
pub(super) struct Sums(pub(super) [[[i32; BLOCK]; BLOCK]; 3]);

impl Sums {
    pub(super) const fn new() -> Self {
        Self([[[0; BLOCK]; BLOCK]; 3])
    }
}

/// `(plane, left slice, right slice)` of every product a profile keeps.
const fn products(profile: Profile) -> &'static [(usize, usize, usize)] {
    match profile {
        Profile::X2 => &[(0, 0, 0), (1, 0, 1), (1, 1, 0)],
        Profile::X3 => &[(0, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 2), (2, 1, 1), (2, 2, 0)],
    }
}

/// Layout of a left operand's rows: byte `(column, slice, row, depth)` is at
/// `column·column_stride + slice·slice_stride + row·64 + depth`. Rows may be read up to the next
/// multiple of 16 or 32.
#[derive(Clone, Copy)]
pub(super) struct LeftView<'a> {
    pub(super) bytes: &'a [i8],
    pub(super) column_stride: usize,
    pub(super) slice_stride: usize,
}

/// Up to two right blocks of 16: block `b` starts at `b·block_stride`, tiles inside it as
/// `[column][slice]`.
#[derive(Clone, Copy)]
pub(super) struct RightView<'a> {
    pub(super) tiles: &'a [i8],
    pub(super) block_stride: usize,
    /// 1 or 2.
    pub(super) blocks: usize,
}

/// Data that a path prepares once per right panel and chunk and reuses for every row block.
pub(super) struct Prepared {
    profile: Profile,
    /// Right bytes as 16-bit numbers, for paths without 8-bit multiplication:
    /// `[block][column][slice][group][row][4]`.
    /// BOUND: 96 KiB a thread.
    wide: Vec<i16>,
    /// `128·Σ_k right`, `[slice][column of the block]`, which the VNNI path subtracts.
    bias: [[i32; BLOCK]; 3],
}

impl Prepared {
    pub(super) fn new(path: Path, profile: Profile) -> Self {
        let wide = match path {
            Path::Scalar | Path::Avx2 => 2 * CHUNK_TILES * profile.slice_count() * TILE_BYTES,
            Path::Avx512 | Path::Amx => 0,
        };
        Self { profile, wide: vec![0; wide], bias: [[0; BLOCK]; 3] }
    }

    pub(super) fn prepare(&mut self, path: Path, right: RightView, columns: usize) {
        let slices = self.profile.slice_count();
        let length = columns * slices * TILE_BYTES;
        assert!((right.blocks - 1) * right.block_stride + length <= right.tiles.len(), "right panel in bounds");
        match path {
            Path::Scalar | Path::Avx2 => {
                for block in 0..right.blocks {
                    let source = &right.tiles[block * right.block_stride..][..length];
                    for (wide, byte) in self.wide[block * CHUNK_TILES * slices * TILE_BYTES..].iter_mut().zip(source) {
                        *wide = i16::from(*byte);
                    }
                }
            }
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Cpu` holds this path only after checking VNNI; `columns` tile columns of
            // every block are inside (asserted above).
            Path::Avx512 => unsafe { vnni::column_sums(&mut self.bias, right, columns, slices) },
            _ => {}
        }
    }
}

/// Sums of `rows` (up to 32) rows against a prepared right panel over `columns` tile columns (one
/// chunk at most).
pub(super) fn block_sums(
    path: Path,
    sums: &mut Sums,
    left: LeftView,
    rows: usize,
    right: RightView,
    prepared: &Prepared,
    columns: usize,
) {
    let profile = prepared.profile;
    let slices = profile.slice_count();
    assert!(rows <= BLOCK && (1..=2).contains(&right.blocks), "a block of rows and columns");
    assert!((1..=CHUNK_TILES).contains(&columns), "tile columns of one chunk");
    let left_end = (columns - 1) * left.column_stride + (slices - 1) * left.slice_stride;
    let rows_read = if path == Path::Amx { rows.next_multiple_of(TILE_ROWS) } else { rows };
    assert!(left_end + rows_read * TILE_DEPTH <= left.bytes.len(), "left block in bounds");
    let right_end = (right.blocks - 1) * right.block_stride + columns * slices * TILE_BYTES;
    assert!(right_end <= right.tiles.len(), "right block in bounds");
    match path {
        Path::Scalar => wide::sums(sums, left, rows, right, &prepared.wide, columns, profile),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Cpu` holds this path only after checking AVX2.
        Path::Avx2 => unsafe { wide::sums_avx2(sums, left, rows, right, &prepared.wide, columns, profile) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Cpu` holds this path only after checking AVX-512 VNNI; rows and tiles of both
        // operands are inside (asserted above).
        Path::Avx512 => unsafe { vnni::sums(sums, left, rows, right, &prepared.bias, columns, profile) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: whoever computes on this path holds an AMX session; whole tiles of both operands
        // are inside and there is at least one column (asserted above).
        Path::Amx => unsafe { amx_sums(sums, left, rows, right, columns, profile) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("only the scalar path exists on this architecture"),
    }
}

/// AMX: one pass over the chunk per slice product, four tiles of accumulators per plane.
///
/// # Safety
/// This thread holds an AMX session. There is at least one column; rows up to the next multiple of
/// 16 of all slices and columns of the left operand and all tiles of the right one are inside;
/// `rows ≤ 32`.
#[cfg(target_arch = "x86_64")]
unsafe fn amx_sums(sums: &mut Sums, left: LeftView, rows: usize, right: RightView, columns: usize, profile: Profile) {
    use super::amx;
    let slices = profile.slice_count();
    let tall = rows > TILE_ROWS;
    let last = products(profile).len() - 1;
    for (index, &(plane, a, b)) in products(profile).iter().enumerate() {
        // SAFETY: the session is the caller's. A pass reads one or two left tiles of slice `a` and
        // two right ones of slice `b` in every column, inside by the caller's promise; a plane has
        // 32 rows of 32 sums.
        unsafe {
            if index == 0 || products(profile)[index - 1].0 != plane {
                amx::zero();
            }
            let pass = amx::Pass {
                left: left.bytes.as_ptr().add(a * left.slice_stride),
                left_stride: left.column_stride,
                right: right.tiles.as_ptr().add(b * TILE_BYTES),
                right_stride: slices * TILE_BYTES,
                // For a missing second block the first is computed again and the result ignored.
                right_second: if right.blocks == 2 { right.block_stride } else { 0 },
                columns,
            };
            if tall {
                amx::multiply_tall(pass);
            } else {
                amx::multiply_flat(pass);
            }
            if index == last || products(profile)[index + 1].0 != plane {
                amx::store(sums.0[plane].as_mut_ptr().cast(), BLOCK, tall);
            }
        }
    }
}

/// 16-bit multiplication of widened bytes: the scalar and AVX2 paths.
mod wide {
    use super::*;

    /// One row and 16 columns at a time. Adjacent 16-bit products are added in pairs, for which
    /// baseline x86-64 has an instruction.
    pub(super) fn sums(
        sums: &mut Sums,
        left: LeftView,
        rows: usize,
        right: RightView,
        wide: &[i16],
        columns: usize,
        profile: Profile,
    ) {
        let slices = profile.slice_count();
        let (groups, _) = wide.as_chunks::<{ 4 * TILE_ROWS }>();
        for (plane, row) in (0..slices).flat_map(|plane| (0..rows).map(move |row| (plane, row))) {
            for block in 0..right.blocks {
                // Two sums for each column: of the first and of the second pair of a group of four.
                let mut acc = [[0i32; 4]; TILE_ROWS / 2];
                for &(_, a, b) in products(profile).iter().filter(|product| product.0 == plane) {
                    for column in 0..columns {
                        let at = column * left.column_stride + a * left.slice_stride + row * TILE_DEPTH;
                        let (bytes, _) = left.bytes[at..at + TILE_DEPTH].as_chunks::<4>();
                        let tile = &groups[(block * CHUNK_TILES * slices + column * slices + b) * 16..][..16];
                        for (a, b) in bytes.iter().zip(tile) {
                            let a: [i16; 8] = std::array::from_fn(|i| i16::from(a[i % 4]));
                            for (acc, b) in acc.iter_mut().zip(b.as_chunks::<8>().0) {
                                for i in 0..4 {
                                    acc[i] += i32::from(a[2 * i]) * i32::from(b[2 * i])
                                        + i32::from(a[2 * i + 1]) * i32::from(b[2 * i + 1]);
                                }
                            }
                        }
                    }
                }
                let out = &mut sums.0[plane][row][block * TILE_ROWS..];
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
        wide: &[i16],
        columns: usize,
        profile: Profile,
    ) {
        use std::arch::x86_64::*;
        const ROWS: usize = 4;
        let slices = profile.slice_count();
        // Left bytes of four rows as 16-bit numbers: [slice][column][row][64].
        let mut rows_wide = [0i16; 3 * CHUNK_TILES * ROWS * TILE_DEPTH];
        for first in (0..rows).step_by(ROWS) {
            let count = ROWS.min(rows - first);
            for slice in 0..slices {
                for column in 0..columns {
                    for row in 0..count {
                        let from = column * left.column_stride + slice * left.slice_stride + (first + row) * TILE_DEPTH;
                        let to = ((slice * CHUNK_TILES + column) * ROWS + row) * TILE_DEPTH;
                        for (wide, byte) in
                            rows_wide[to..to + TILE_DEPTH].iter_mut().zip(&left.bytes[from..from + TILE_DEPTH])
                        {
                            *wide = i16::from(*byte);
                        }
                    }
                }
            }
            for plane in 0..slices {
                for half in 0..2 * right.blocks {
                    let mut acc = [[_mm256_setzero_si256(); 2]; ROWS];
                    for &(_, a, b) in products(profile).iter().filter(|product| product.0 == plane) {
                        for column in 0..columns {
                            let tile =
                                ((half / 2) * CHUNK_TILES * slices + column * slices + b) * TILE_BYTES + half % 2 * 32;
                            // SAFETY: of `wide`, 16 groups of 32 numbers are read, 64 apart, which
                            // the slice holds; of `rows_wide`, four rows of 64 numbers of one
                            // column, which the array has for every slice and column.
                            unsafe {
                                let right = wide[tile..tile + TILE_BYTES - 32].as_ptr();
                                let left = rows_wide[(a * CHUNK_TILES + column) * ROWS * TILE_DEPTH..].as_ptr();
                                for group in 0..16 {
                                    let b0 = _mm256_loadu_si256(right.add(group * 64).cast());
                                    let b1 = _mm256_loadu_si256(right.add(group * 64 + 16).cast());
                                    for row in 0..ROWS {
                                        let a = left.add(row * TILE_DEPTH + group * 4).cast::<i64>().read_unaligned();
                                        let a = _mm256_set1_epi64x(a);
                                        acc[row][0] = _mm256_add_epi32(acc[row][0], _mm256_madd_epi16(a, b0));
                                        acc[row][1] = _mm256_add_epi32(acc[row][1], _mm256_madd_epi16(a, b1));
                                    }
                                }
                            }
                        }
                    }
                    for row in 0..count {
                        // Adjacent pairs are the two halves of one column; the permutation undoes
                        // hadd's lane order.
                        let columns =
                            _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_hadd_epi32(acc[row][0], acc[row][1]));
                        // SAFETY: eight columns from `8·half`, which is at most 24, inside a row
                        // of 32.
                        unsafe {
                            _mm256_storeu_si256(sums.0[plane][first + row].as_mut_ptr().add(half * 8).cast(), columns);
                        }
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

    /// `128·Σ_k right` per slice and column.
    ///
    /// # Safety
    /// The machine has these features; `columns` tile columns of every right block are inside.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub(super) unsafe fn column_sums(bias: &mut [[i32; BLOCK]; 3], right: RightView, columns: usize, slices: usize) {
        let weight = _mm512_set1_epi8(-128); // 128 as an unsigned byte
        for slice in 0..slices {
            for block in 0..right.blocks {
                let mut acc = _mm512_setzero_si512();
                for column in 0..columns {
                    // SAFETY: reads one tile of 1024 bytes, inside by the caller's promise.
                    unsafe {
                        let tile = right
                            .tiles
                            .as_ptr()
                            .add(block * right.block_stride + (column * slices + slice) * TILE_BYTES);
                        for group in 0..16 {
                            acc = _mm512_dpbusd_epi32(acc, weight, _mm512_loadu_si512(tile.add(group * 64).cast()));
                        }
                    }
                }
                // SAFETY: writes 16 columns from `16·block`, which is at most 16, of a row of 32.
                unsafe { _mm512_storeu_si512(bias[slice].as_mut_ptr().add(block * 16).cast(), acc) }
            }
        }
    }

    /// # Safety
    /// The machine has these features; `rows ≤ 32` rows of all slices and columns of the left
    /// operand and all tiles of the right one are inside.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub(super) unsafe fn sums(
        sums: &mut Sums,
        left: LeftView,
        rows: usize,
        right: RightView,
        bias: &[[i32; BLOCK]; 3],
        columns: usize,
        profile: Profile,
    ) {
        let mut row = 0;
        while row < rows {
            let rest = rows - row;
            // SAFETY: features and operands by the caller's promise; at least as many rows are left
            // as each arm takes, so `row + ROWS ≤ rows`.
            let done = unsafe {
                match (profile, rest) {
                    (Profile::X2, 6..) => x2::<6>(sums, left, row, right, bias, columns),
                    (Profile::X2, 4..) => x2::<4>(sums, left, row, right, bias, columns),
                    (Profile::X2, 2..) => x2::<2>(sums, left, row, right, bias, columns),
                    (Profile::X2, _) => x2::<1>(sums, left, row, right, bias, columns),
                    (Profile::X3, 4..) => x3::<4>(sums, left, row, right, bias, columns),
                    (Profile::X3, 2..) => x3::<2>(sums, left, row, right, bias, columns),
                    (Profile::X3, _) => x3::<1>(sums, left, row, right, bias, columns),
                }
            };
            row += done;
        }
    }

    /// # Safety
    /// Four bytes are readable, and AVX-512 is enabled where this is inlined.
    #[inline(always)]
    unsafe fn spread(address: *const i8) -> __m512i {
        // SAFETY: reads the four bytes, which need no alignment.
        unsafe { _mm512_set1_epi32(address.cast::<i32>().read_unaligned()) }
    }

    /// `ROWS` rows by 32 columns, two slices.
    ///
    /// # Safety
    /// The machine has these features; rows `row..row + ROWS`, at most 32 in all, of two slices and
    /// all columns of the left operand and all tiles of the right one are inside.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn x2<const ROWS: usize>(
        sums: &mut Sums,
        left: LeftView,
        row: usize,
        right: RightView,
        bias: &[[i32; BLOCK]; 3],
        columns: usize,
    ) -> usize {
        let zero = _mm512_setzero_si512();
        let mut high = [[zero; 2]; ROWS];
        let mut cross = [[zero; 2]; ROWS];
        let second = if right.blocks == 2 { right.block_stride } else { 0 };
        // SAFETY: reads two slices of each row and right tile of a column, groups of four and 64
        // bytes of whole tiles, inside by the caller's promise (a missing second block is the first
        // one again). Writes 16 columns of rows that the planes, indexed here, have.
        unsafe {
            for column in 0..columns {
                let a = left.bytes.as_ptr().add(column * left.column_stride + row * TILE_DEPTH);
                let b = right.tiles.as_ptr().add(column * 2 * TILE_BYTES);
                for group in 0..16 {
                    let load = |offset: usize| _mm512_loadu_si512(b.add(offset + group * 64).cast());
                    let (h0, h1) = (load(0), load(second));
                    let (l0, l1) = (load(TILE_BYTES), load(second + TILE_BYTES));
                    for r in 0..ROWS {
                        let ah = spread(a.add(r * TILE_DEPTH + group * 4));
                        let al = spread(a.add(left.slice_stride + r * TILE_DEPTH + group * 4));
                        high[r][0] = _mm512_dpbusd_epi32(high[r][0], ah, h0);
                        high[r][1] = _mm512_dpbusd_epi32(high[r][1], ah, h1);
                        cross[r][0] = _mm512_dpbusd_epi32(cross[r][0], ah, l0);
                        cross[r][1] = _mm512_dpbusd_epi32(cross[r][1], ah, l1);
                        cross[r][0] = _mm512_dpbusd_epi32(cross[r][0], al, h0);
                        cross[r][1] = _mm512_dpbusd_epi32(cross[r][1], al, h1);
                    }
                }
            }
            for block in 0..2 {
                let part = |slice: usize| _mm512_loadu_si512(bias[slice].as_ptr().add(block * 16).cast());
                let (h, l) = (part(0), part(1));
                for r in 0..ROWS {
                    let store = |plane: &mut [[i32; BLOCK]; BLOCK], value| {
                        _mm512_storeu_si512(plane[row + r].as_mut_ptr().add(block * 16).cast(), value);
                    };
                    store(&mut sums.0[0], _mm512_sub_epi32(high[r][block], h));
                    store(&mut sums.0[1], _mm512_sub_epi32(cross[r][block], _mm512_add_epi32(h, l)));
                }
            }
        }
        ROWS
    }

    /// `ROWS` rows by 32 columns, three slices.
    ///
    /// # Safety
    /// As [`x2`], with three slices.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn x3<const ROWS: usize>(
        sums: &mut Sums,
        left: LeftView,
        row: usize,
        right: RightView,
        bias: &[[i32; BLOCK]; 3],
        columns: usize,
    ) -> usize {
        let zero = _mm512_setzero_si512();
        let mut acc = [[[zero; 3]; 2]; ROWS];
        let second = if right.blocks == 2 { right.block_stride } else { 0 };
        // SAFETY: reads three slices of each row and right tile of a column, groups of four and 64
        // bytes of whole tiles, inside by the caller's promise (a missing second block is the first
        // one again). Writes 16 columns of rows that the planes, indexed here, have.
        unsafe {
            for column in 0..columns {
                let a = left.bytes.as_ptr().add(column * left.column_stride + row * TILE_DEPTH);
                let b = right.tiles.as_ptr().add(column * 3 * TILE_BYTES);
                for group in 0..16 {
                    let load = |offset: usize| _mm512_loadu_si512(b.add(offset + group * 64).cast());
                    let w: [[__m512i; 3]; 2] =
                        std::array::from_fn(|j| std::array::from_fn(|slice| load(j * second + slice * TILE_BYTES)));
                    for r in 0..ROWS {
                        let at = a.add(r * TILE_DEPTH + group * 4);
                        let (h, m) = (spread(at), spread(at.add(left.slice_stride)));
                        let l = spread(at.add(2 * left.slice_stride));
                        for j in 0..2 {
                            let acc = &mut acc[r][j];
                            acc[0] = _mm512_dpbusd_epi32(acc[0], h, w[j][0]);
                            acc[1] = _mm512_dpbusd_epi32(acc[1], h, w[j][1]);
                            acc[2] = _mm512_dpbusd_epi32(acc[2], h, w[j][2]);
                            acc[1] = _mm512_dpbusd_epi32(acc[1], m, w[j][0]);
                            acc[2] = _mm512_dpbusd_epi32(acc[2], m, w[j][1]);
                            acc[2] = _mm512_dpbusd_epi32(acc[2], l, w[j][0]);
                        }
                    }
                }
            }
            for block in 0..2 {
                let part = |slice: usize| _mm512_loadu_si512(bias[slice].as_ptr().add(block * 16).cast());
                let h = part(0);
                let hm = _mm512_add_epi32(h, part(1));
                let hml = _mm512_add_epi32(hm, part(2));
                for r in 0..ROWS {
                    for (plane, bias) in [h, hm, hml].into_iter().enumerate() {
                        let value = _mm512_sub_epi32(acc[r][block][plane], bias);
                        _mm512_storeu_si512(sums.0[plane][row + r].as_mut_ptr().add(block * 16).cast(), value);
                    }
                }
            }
        }
        ROWS
    }
}
