//! Slices along tokens: columns of an activation matrix over one chunk of tokens become rows of an
//! operand, for weight gradients. Values are gathered once into a buffer that fits the cache,
//! because rows of the source are pages apart.

use super::path::{Path, multiversion, prefetch};
use super::pool::SharedMut;
use super::slices::{
    CHUNK_TILES, LeftMut, TILE_BYTES, TILE_DEPTH, TILE_ROWS, left_bias, left_to_right, right_block_bytes, slices_of,
};
use crate::Cpu;
use isobit_numerics::slices::{CHUNK, Profile, Quantiser, magnitude_bits};
use std::ops::Range;

/// Up to 16 columns over a chunk of tokens.
type Gathered = [[f32; TILE_ROWS]; CHUNK];

/// Slices the columns of `x[tokens, width]` along the tokens (one chunk) into a right operand.
pub(super) fn columns_to_right(
    cpu: &Cpu,
    tiles: &mut [i8],
    scales: &mut [f32],
    x: &[f32],
    width: usize,
    profile: Profile,
) {
    let tokens = x.len() / width.max(1);
    let block_bytes = right_block_bytes(tokens, profile);
    let source = Source { x, stride: width, profile };
    let scales = SharedMut::new(scales);
    cpu.pool.run_rows(&mut tiles[..width.div_ceil(TILE_ROWS) * block_bytes], block_bytes, |blocks, tiles| {
        #[expect(clippy::large_stack_arrays, reason = "32 KiB, far below the stack of a thread")]
        let mut gathered: Gathered = [[0.0; TILE_ROWS]; CHUNK];
        for (block, tiles) in blocks.zip(tiles.chunks_exact_mut(block_bytes)) {
            let columns = block * TILE_ROWS..((block + 1) * TILE_ROWS).min(width);
            // SAFETY: columns of one block belong to one thread.
            let scales = unsafe { scales.slice(columns.clone()) };
            source.tiles(cpu.path, tiles, scales, &mut gathered, columns);
        }
    });
}

/// The same for the first columns of rows `stride` apart: they become the rows of a left operand.
pub(super) fn columns_to_left(cpu: &Cpu, out: LeftMut, x: &[f32], stride: usize) {
    let LeftMut { shape, layout, tiles, scales } = out;
    let (tokens, width) = (x.len() / stride.max(1), shape.rows);
    let bytes = right_block_bytes(tokens, shape.profile);
    let source = Source { x, stride, profile: shape.profile };
    let (tiles, scales) = (SharedMut::new(tiles), SharedMut::new(scales));
    let bias = left_bias(cpu.path) as i8;
    cpu.pool.run_ranges(width.div_ceil(TILE_ROWS), 1, |blocks| {
        #[expect(clippy::large_stack_arrays, reason = "56 KiB, far below the stack of a thread")]
        let (mut right, mut gathered) = ([0i8; 3 * CHUNK_TILES * TILE_BYTES], [[0.0; TILE_ROWS]; CHUNK]);
        for block in blocks {
            let columns = block * TILE_ROWS..((block + 1) * TILE_ROWS).min(width);
            // SAFETY: columns of one block belong to one thread.
            let scales = unsafe { scales.slice(columns.clone()) };
            source.tiles(cpu.path, &mut right[..bytes], scales, &mut gathered, columns.clone());
            for (index, tile) in right[..bytes].as_chunks::<TILE_BYTES>().0.iter().enumerate() {
                let at = index / layout.slices * layout.column_stride()
                    + index % layout.slices * layout.slice_stride()
                    + columns.start * TILE_DEPTH;
                // SAFETY: 16 rows of this block; the layout has padding rows past the last one.
                let left = unsafe { tiles.slice(at..at + TILE_BYTES) };
                // The reordering of a tile is its own inverse.
                left_to_right(cpu.path, left, tile);
                if bias != 0 {
                    for byte in left.iter_mut() {
                        *byte ^= bias;
                    }
                }
            }
        }
    });
}

/// Tokens (at most a chunk) in rows `stride` apart, whose columns are sliced.
struct Source<'a> {
    x: &'a [f32],
    stride: usize,
    profile: Profile,
}

impl Source<'_> {
    /// Right tiles and scales of up to 16 columns over all tokens.
    fn tiles(&self, path: Path, tiles: &mut [i8], scales: &mut [f32], gathered: &mut Gathered, columns: Range<usize>) {
        let gathered = &mut gathered[..self.x.len() / self.stride];
        if columns.len() < TILE_ROWS {
            gathered.fill([0.0; TILE_ROWS]);
        }
        for (row, x) in gathered.iter_mut().zip(self.x.chunks_exact(self.stride)) {
            prefetch(x.as_ptr().wrapping_add(columns.end));
            let x = &x[columns.clone()];
            if let Ok(whole) = x.try_into() {
                *row = whole;
            } else {
                row[..x.len()].copy_from_slice(x);
            }
        }
        match self.profile {
            Profile::X2 => slice_gathered::<2>(path, tiles, scales, gathered),
            Profile::X3 => slice_gathered::<3>(path, tiles, scales, gathered),
        }
    }
}

multiversion! {
    fn slice_gathered<_F, const SLICES: usize>(tiles: &mut [i8], scales: &mut [f32], gathered: &[[f32; TILE_ROWS]]) {
        let profile = if SLICES == 2 { Profile::X2 } else { Profile::X3 };
        let mut bits = [0u32; TILE_ROWS];
        for row in gathered {
            for column in 0..TILE_ROWS {
                bits[column] = bits[column].max(magnitude_bits(row[column]));
            }
        }
        let mut multipliers = [0.0f32; TILE_ROWS];
        for column in 0..TILE_ROWS {
            let quantiser = Quantiser::of(profile, bits[column]);
            multipliers[column] = quantiser.multiplier;
            if column < scales.len() {
                scales[column] = quantiser.scale;
            }
        }
        let (groups, _) = tiles.as_chunks_mut::<4>();
        let (groups, _) = groups.as_chunks_mut::<TILE_ROWS>();
        for group in 0..gathered.len().next_multiple_of(TILE_DEPTH) / 4 {
            // Four tokens of a column make one little-endian word of its tile.
            let mut words = [[0u32; TILE_ROWS]; SLICES];
            for (i, row) in gathered.iter().skip(group * 4).take(4).enumerate() {
                for column in 0..TILE_ROWS {
                    // A column with non-finite values has multiplier zero, so its integers are
                    // zero.
                    let x = if multipliers[column] == 0.0 { 0.0 } else { row[column] };
                    let slices = slices_of::<SLICES>(x * multipliers[column]);
                    for slice in 0..SLICES {
                        words[slice][column] |= u32::from(slices[slice] as u8) << (8 * i);
                    }
                }
            }
            for slice in 0..SLICES {
                let out = &mut groups[(group / 16 * SLICES + slice) * 16 + group % 16];
                for column in 0..TILE_ROWS {
                    out[column] = words[slice][column].to_le_bytes().map(|byte| byte as i8);
                }
            }
        }
    }
}
