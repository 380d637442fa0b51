//! The slice product on NVIDIA Hopper tensor cores (`gpu/product_hopper.cu`), profile x2. Other
//! devices use the portable kernel; the bits are the same.

use super::device::{Gpu, Groups};
use super::memory::DevicePointer;
use super::program::{Program, files};
use super::runtime::{Argument, ByteMatrix, Language};
use super::slice_tiles;
use super::slices::padded;
use isobit_numerics::slices::Profile;

pub(super) static PRODUCT_HOPPER: Program =
    Program { name: "product_hopper", text: files!("hopper.cuh", "product_hopper.cu"), language: Language::Native };

/// Work items per block: one warpgroup that copies, two that multiply.
const THREADS: usize = 384;
/// Rows and columns of a block's tile, and bytes of the contraction axis per copy.
const TILE: usize = 128;
/// Blocks per cluster; they share the right operand, and each loads half of it.
const CLUSTER: usize = 2;
/// Floats that each of the two consumer warpgroups stages for its epilogue: `STAGED_FLOATS` of the
/// kernel.
const STAGED_FLOATS: usize = (64 + TILE) * (16 + 4) + 2 * TILE;
/// `SHARED_BYTES` of the kernel: three slots of four planes, barriers, the epilogue's inputs,
/// alignment slack.
const SHARED_BYTES: usize = 3 * 4 * TILE * TILE + 64 + 2 * 4 * STAGED_FLOATS + 1024;

/// Sliced rows of one operand, both planes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    pub(super) planes: DevicePointer,
    /// Bytes from the high plane to the low one.
    pub(super) plane: usize,
    pub(super) first_row: usize,
    pub(super) rows: usize,
}

/// `y = left · rightᵀ` over `width`, chunks added with the left operand's scales.
#[derive(Clone, Copy, Debug)]
pub(super) struct HopperProduct {
    pub(super) y: DevicePointer,
    /// Element of `y` for the first row and column, and the row stride.
    pub(super) y_start: usize,
    pub(super) y_stride: usize,
    pub(super) left: Operand,
    /// `[row, chunk]`, starting at the left operand's first row.
    pub(super) left_scales: DevicePointer,
    pub(super) left_scales_start: usize,
    pub(super) right: Operand,
    /// The final factor on each column, starting at the right operand's first row; none if absent.
    pub(super) right_scales: Option<(DevicePointer, usize)>,
    pub(super) width: usize,
    pub(super) accumulate: bool,
    pub(super) epilogue: Epilogue,
}

/// The epilogue of a linear layer, applied before the product is stored.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Epilogue {
    /// Starting at this element, one per column.
    pub(super) bias: Option<(DevicePointer, usize)>,
    pub(super) low: Option<LowRank>,
}

/// An adapter: its low-rank input and its factor, starting at these elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct LowRank {
    pub(super) u: (DevicePointer, usize),
    pub(super) factor: (DevicePointer, usize),
    pub(super) rank: u32,
    /// Stride in the factor between ranks, and between columns.
    pub(super) rank_step: usize,
    pub(super) width_step: usize,
    pub(super) alpha: f32,
}

impl Epilogue {
    /// The same for the columns starting at `column`.
    pub(super) fn at_column(self, column: usize) -> Self {
        let bias = self.bias.map(|(place, start)| (place, start + column));
        let low = self.low.map(|low| {
            let (factor, start) = low.factor;
            LowRank { factor: (factor, start + column * low.width_step), ..low }
        });
        Self { bias, low }
    }
}

impl LowRank {
    /// No adapter: the kernel does not read it.
    pub(super) fn absent(instead: DevicePointer) -> Self {
        Self { u: (instead, 0), factor: (instead, 0), rank: 0, rank_step: 0, width_step: 0, alpha: 0.0 }
    }
}

/// Whether the device has these tensor cores and they support a contraction of this length.
pub(super) fn serves(gpu: &Gpu, profile: Profile, width: usize) -> bool {
    profile == Profile::X2 && width > 0 && slice_tiles::is_hopper(gpu)
}

pub(super) fn product(gpu: &Gpu, p: &HopperProduct) {
    let (m, n) = (p.left.rows, p.right.rows);
    assert!(p.width > 0, "the copy engine knows no empty axes");
    if m == 0 || n == 0 {
        return;
    }
    let [m32, n32, k32] = [m, n, p.width].map(|size| u32::try_from(size).expect("fewer than 2³² rows"));
    assert!([m32, n32, k32].iter().all(|&size| size < 1 << 30), "sizes are 32-bit signed in the kernel");
    let Some([left_high, left_low]) = maps(gpu, &p.left, p.width, TILE) else { return };
    let Some([right_high, right_low]) = maps(gpu, &p.right, p.width, TILE / CLUSTER) else { return };
    let low = p.epilogue.low.unwrap_or(LowRank::absent(p.y));
    let arguments = [
        left_high,
        left_low,
        right_high,
        right_low,
        p.left_scales.at::<f32>(p.left_scales_start),
        p.right_scales.map_or(Argument::U64(0), |(scales, start)| scales.at::<f32>(start)),
        p.y.at::<f32>(p.y_start),
        p.y_stride.into(),
        m32.into(),
        n32.into(),
        k32.into(),
        p.epilogue.bias.map_or(Argument::U64(0), |(bias, start)| bias.at::<f32>(start)),
        low.u.0.at::<f32>(low.u.1),
        low.factor.0.at::<f32>(low.factor.1),
        low.rank_step.into(),
        low.width_step.into(),
        low.rank.into(),
        low.alpha.into(),
    ];
    let tiles = m.div_ceil(TILE * CLUSTER) * n.div_ceil(TILE);
    let clusters = (gpu.device.runtime.multiprocessors() / CLUSTER).min(tiles).max(1);
    let groups = Groups::of(clusters * CLUSTER, THREADS);
    let kernel = if p.accumulate { "slice_product_x2_onto" } else { "slice_product_x2" };
    gpu.launch_with(&PRODUCT_HOPPER, kernel, Profile::X2, groups, SHARED_BYTES, &arguments);
}

/// Descriptors of an operand's planes for the copy engine. None after a failure of the device.
fn maps(gpu: &Gpu, operand: &Operand, width: usize, box_rows: usize) -> Option<[Argument; 2]> {
    let stride = padded(width);
    let matrix = ByteMatrix { rows: operand.rows, width: stride, stride, box_rows, box_width: TILE };
    let map = |plane: usize| {
        let offset = operand.planes.offset() + plane * operand.plane + operand.first_row * stride;
        let handle = operand.planes.handle()?;
        gpu.device.attempt(|runtime| runtime.matrix_descriptor(handle, offset, &matrix)).map(Argument::Descriptor)
    };
    Some([map(0)?, map(1)?])
}
