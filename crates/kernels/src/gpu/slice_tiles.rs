//! The common part of slice products on NVIDIA tensor cores: which devices have them, and for
//! Hopper's (`gpu/slice_tiles.cuh`) tile shapes, launches, and how the copy engine reads the
//! planes.

use super::device::{Gpu, Groups};
use super::memory::DevicePointer;
use super::runtime::{Argument, ByteMatrix};
use isobit_numerics::slices::Profile;

/// Bytes of the contraction axis per bulk copy: `KBLOCK` in `gpu/hopper.cuh`.
pub(super) const BLOCK: usize = 128;
/// From `gpu/slice_tiles.cuh`: work items per block, rows of its tile, blocks of a pair, slots.
pub(super) const THREADS: usize = 384;
pub(super) const ROWS: usize = 128;
pub(super) const CLUSTER: usize = 2;
const STAGES: usize = 3;

/// Columns of a block's tile: `COLUMNS` in `gpu/slice_tiles.cuh`.
pub(super) fn tile_columns(profile: Profile) -> usize {
    match profile {
        Profile::X2 => 128,
        Profile::X3 => 64,
    }
}

/// `SHARED_BYTES` in `gpu/slice_tiles.cuh`: slots, scales, barriers, slack for alignment.
pub(super) fn shared_bytes(profile: Profile) -> usize {
    let both = ROWS + tile_columns(profile);
    STAGES * profile.slice_count() * both * BLOCK + (STAGES + 1) * both * 4 + 2 * STAGES * 8 + 1024
}

/// Blocks for `pairs` pairs of tiles: at most as many pairs as the device runs at a time.
pub(super) fn blocks(gpu: &Gpu, pairs: usize) -> Groups {
    let pairs = (gpu.device.runtime.multiprocessors() / CLUSTER).min(pairs).max(1);
    Groups::of(pairs * CLUSTER, THREADS)
}

/// Whether the device's tensor cores multiply operands in this layout: those of Hopper, or by
/// `mma.sync` (`product_mma.rs`).
pub(super) fn serves(gpu: &Gpu) -> bool {
    gpu.architecture().is_some_and(|architecture| architecture >= (8, 0))
}

/// Whether they are used by kernels of their own.
pub(super) fn is_hopper(gpu: &Gpu) -> bool {
    gpu.architecture() == Some((9, 0)) && !gpu.only_mma_sync()
}

/// Consecutive planes of bytes `[row, stride]`, which the copy engine reads in boxes of [`BLOCK`]
/// bytes by `box_rows` rows. None after a device failure.
pub(super) fn map(gpu: &Gpu, planes: DevicePointer, rows: usize, stride: usize, box_rows: usize) -> Option<Argument> {
    let matrix = ByteMatrix { rows, width: stride, stride, box_rows, box_width: BLOCK };
    let handle = planes.handle()?;
    gpu.device.attempt(|runtime| runtime.matrix_descriptor(handle, planes.offset(), &matrix)).map(Argument::Descriptor)
}
