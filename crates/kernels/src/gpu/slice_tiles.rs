//! What slice products on the tensor cores of NVIDIA's Hopper share (`gpu/slice_tiles.cuh`): the
//! shape of tiles, launches, and how the copy engine sees the planes.

use super::device::{Gpu, Groups};
use super::memory::Place;
use super::runtime::{Argument, ByteMatrix};
use isobit_numerics::slices::Profile;

/// Bytes of the contraction that one bulk copy brings: `KBLOCK` in `gpu/hopper.cuh`.
pub(super) const BLOCK: usize = 128;
/// Of `gpu/slice_tiles.cuh`: work items of a block, rows of its tile, blocks of a pair, slots.
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

/// Blocks for so many pairs of tiles: as many pairs as the device runs at a time.
pub(super) fn blocks(gpu: &Gpu, pairs: usize) -> Groups {
    let pairs = (gpu.device.runtime.multiprocessors() / CLUSTER).min(pairs).max(1);
    Groups::of(pairs * CLUSTER, THREADS)
}

/// Whether the device has these tensor cores.
pub(super) fn serves(gpu: &Gpu) -> bool {
    gpu.architecture() == Some((9, 0))
}

/// Planes of bytes `[row, stride]`, one after another, as the copy engine reads them in boxes of
/// [`BLOCK`] bytes by `box_rows` rows. None after a failure of the device.
pub(super) fn map(gpu: &Gpu, planes: Place, rows: usize, stride: usize, box_rows: usize) -> Option<Argument> {
    let matrix = ByteMatrix { rows, width: stride, stride, box_rows, box_width: BLOCK };
    let handle = planes.handle()?;
    gpu.device.attempt(|runtime| runtime.matrix_descriptor(handle, planes.offset(), &matrix)).map(Argument::Descriptor)
}
