//! Products along the width of a head: scores, and gradients of outputs against values.
//!
//! Heads of up to 32 elements would leave half of every tile empty. In profile x2 they share one
//! tile instead: the left operand is `[high | low]`, the right ones `[high | 0]` and
//! `[low | high]`, so two products do the work of three.

use super::operands::Shape;
use crate::cpu::block::{LeftView, Prepared, RightView, Sums, block_sums};
use crate::cpu::path::Path;
use crate::cpu::slices::{BLOCK, TILE_BYTES, TILE_DEPTH, TILE_ROWS};
use isobit_numerics::slices::Profile;

/// Elements of a packed head; the other half of a tile is the other slice.
pub(super) const PACKED: usize = TILE_DEPTH / 2;

/// Whether heads of this width are packed.
pub(super) fn packs(path: Path, width: usize, profile: Profile) -> bool {
    matches!(path, Path::Avx512 | Path::Amx) && width <= PACKED && profile == Profile::X2
}

/// Data prepared once per right panel of 32 rows.
pub(super) struct Panel {
    pub(super) prepared: Prepared,
    /// `128·Σ_k right` of both right tiles, which the VNNI path subtracts.
    bias: [[i32; BLOCK]; 2],
}

impl Panel {
    pub(super) fn new(path: Path, profile: Profile) -> Self {
        Self { prepared: Prepared::new(path, profile), bias: [[0; BLOCK]; 2] }
    }

    pub(super) fn prepare(&mut self, path: Path, shape: Shape, right: RightView) {
        if !shape.packed {
            return self.prepared.prepare(path, right, shape.columns());
        }
        check_right(right);
        #[cfg(target_arch = "x86_64")]
        if path == Path::Avx512 {
            // SAFETY: a `Cpu` holds this path only after checking VNNI; both blocks of two tiles
            // are inside (`check_right`).
            unsafe { vnni::column_sums(&mut self.bias, right) }
        }
    }

    /// Sums of up to 32 rows against the panel.
    pub(super) fn sums(
        &self,
        path: Path,
        shape: Shape,
        sums: &mut Sums,
        left: LeftView,
        rows: usize,
        right: RightView,
    ) {
        if !shape.packed {
            return block_sums(path, sums, left, rows, right, &self.prepared, shape.columns());
        }
        check_right(right);
        let rows_read = if path == Path::Amx { rows.next_multiple_of(TILE_ROWS) } else { rows };
        assert!(rows <= BLOCK && rows_read * TILE_DEPTH <= left.bytes.len(), "left block in bounds");
        match path {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Cpu` holds this path only after checking AVX-512 VNNI; the rows and both
            // right blocks are inside (checked above).
            Path::Avx512 => unsafe { vnni::sums(sums, left.bytes, rows, right, &self.bias) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: whoever computes on this path holds an AMX session; whole left tiles and both
            // right blocks are inside (checked above).
            Path::Amx => unsafe { amx_sums(sums, left.bytes, rows, right) },
            _ => unreachable!("only paths with 8-bit products pack heads"),
        }
    }
}

fn check_right(right: RightView) {
    assert!(right.blocks == 2 && right.block_stride + 2 * TILE_BYTES <= right.tiles.len(), "right panel in bounds");
}

/// # Safety
/// This thread holds an AMX session; `rows ≤ 32` rows, up to the next multiple of 16, of the left
/// tile and two tiles of both right blocks are inside.
#[cfg(target_arch = "x86_64")]
unsafe fn amx_sums(sums: &mut Sums, left: &[i8], rows: usize, right: RightView) {
    use crate::cpu::amx;
    let right = [right.tiles.as_ptr(), right.tiles[right.block_stride..].as_ptr()];
    let [first, second, _] = &mut sums.0;
    let planes = [first, second].map(|plane| plane.as_mut_ptr().cast());
    // SAFETY: the session is the caller's; one left tile, or two where there are more than 16 rows,
    // and two tiles at both right addresses are inside by its promise; a plane has 32 rows of 32
    // sums.
    unsafe { amx::multiply_packed(planes, BLOCK, left.as_ptr(), right, rows > TILE_ROWS) }
}

/// AVX-512 VNNI: unsigned by signed bytes. The left bytes are kept 128 too large (`left_bias`).
#[cfg(target_arch = "x86_64")]
mod vnni {
    use super::{BLOCK, RightView, Sums, TILE_BYTES, TILE_DEPTH};
    use std::arch::x86_64::*;

    /// Groups of four elements in a tile.
    const GROUPS: usize = TILE_DEPTH / 4;

    /// # Safety
    /// The machine has these features; two tiles of both right blocks are inside.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub(super) unsafe fn column_sums(bias: &mut [[i32; BLOCK]; 2], right: RightView) {
        let weight = _mm512_set1_epi8(-128); // 128 as an unsigned byte
        for (tile, block) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let mut sum = _mm512_setzero_si512();
            // SAFETY: reads one tile of 1024 bytes, inside by the caller's promise; writes 16
            // columns from `16·block`, which is at most 16, of a row of 32.
            unsafe {
                let tiles = right.tiles.as_ptr().add(block * right.block_stride + tile * TILE_BYTES);
                for group in 0..GROUPS {
                    sum = _mm512_dpbusd_epi32(sum, weight, _mm512_loadu_si512(tiles.add(group * 64).cast()));
                }
                _mm512_storeu_si512(bias[tile].as_mut_ptr().add(block * 16).cast(), sum);
            }
        }
    }

    /// # Safety
    /// The machine has these features; `rows ≤ 32` rows of the left tile and two tiles of both
    /// right blocks are inside.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub(super) unsafe fn sums(sums: &mut Sums, left: &[i8], rows: usize, right: RightView, bias: &[[i32; BLOCK]; 2]) {
        let mut row = 0;
        while row < rows {
            // SAFETY: all by the caller's promise; at least as many rows are left as each arm
            // takes, so `row + ROWS ≤ rows`.
            row += unsafe {
                match rows - row {
                    6.. => some_rows::<6>(sums, left, row, right, bias),
                    4.. => some_rows::<4>(sums, left, row, right, bias),
                    2.. => some_rows::<2>(sums, left, row, right, bias),
                    _ => some_rows::<1>(sums, left, row, right, bias),
                }
            };
        }
    }

    /// `ROWS` rows by 32 columns.
    ///
    /// # Safety
    /// As [`sums`], with `row + ROWS` rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn some_rows<const ROWS: usize>(
        sums: &mut Sums,
        left: &[i8],
        row: usize,
        right: RightView,
        bias: &[[i32; BLOCK]; 2],
    ) -> usize {
        let zero = _mm512_setzero_si512();
        let mut high = [[zero; 2]; ROWS];
        let mut cross = [[zero; 2]; ROWS];
        // SAFETY: reads groups of four bytes of each row of 64 and of 64 bytes of both tiles of
        // both right blocks, inside by the caller's promise; writes 16 columns of rows that the
        // planes, indexed here, have.
        unsafe {
            let left = left.as_ptr().add(row * TILE_DEPTH);
            let spread = |row: usize, group: usize| {
                _mm512_set1_epi32(left.add(row * TILE_DEPTH + group * 4).cast::<i32>().read_unaligned())
            };
            let load = |block: usize, tile: usize, group: usize| {
                let at = block * right.block_stride + tile * TILE_BYTES + group * 64;
                _mm512_loadu_si512(right.tiles.as_ptr().add(at).cast())
            };
            // One loop over both halves of a tile: two short ones would be unrolled until they
            // spill registers. The second half of the first right tile is empty.
            for group in 0..GROUPS / 2 {
                let (h, c) = ([load(0, 0, group), load(1, 0, group)], [load(0, 1, group), load(1, 1, group)]);
                for r in 0..ROWS {
                    let a = spread(r, group);
                    for block in 0..2 {
                        high[r][block] = _mm512_dpbusd_epi32(high[r][block], a, h[block]);
                        cross[r][block] = _mm512_dpbusd_epi32(cross[r][block], a, c[block]);
                    }
                }
                let c = [load(0, 1, group + GROUPS / 2), load(1, 1, group + GROUPS / 2)];
                for r in 0..ROWS {
                    let a = spread(r, group + GROUPS / 2);
                    for block in 0..2 {
                        cross[r][block] = _mm512_dpbusd_epi32(cross[r][block], a, c[block]);
                    }
                }
            }
            for (plane, planes) in [high, cross].iter().enumerate() {
                for block in 0..2 {
                    let bias = _mm512_loadu_si512(bias[plane].as_ptr().add(block * 16).cast());
                    for r in 0..ROWS {
                        let out = sums.0[plane][row + r].as_mut_ptr().add(block * 16);
                        _mm512_storeu_si512(out.cast(), _mm512_sub_epi32(planes[r][block], bias));
                    }
                }
            }
        }
        ROWS
    }
}
