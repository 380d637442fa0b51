//! 4-bit weights, packed in right-tile order, and the panels that a product multiplies.
//!
//! A *line* is eight ordered channels of 16 outputs in 64 bytes: byte `(output, c)` holds channel
//! `c` in its low bits and channel `c + 4` in its high bits, so one mask and one shift give two
//! groups of a right tile. Lines are laid out as `[16 outputs][line]`.

use super::block::RightView;
use super::path::{Path, multiversion, prefetch};
use super::slices::{BLOCK, CHUNK_TILES, TILE_BYTES, TILE_DEPTH, TILE_ROWS, transpose_tile, widen};
use crate::Cpu;
use crate::backend::Shaped;
use crate::buffer::Buffer;
use crate::op::product4::{
    AsQuantized, CHANNELS_PER_WORD, GroupChunk, Quantized, QuantizedShape, Scales, group_chunks, sigma_factor,
};
use half::f16;
use isobit_numerics::e2m1::twice;
use isobit_numerics::slices::{CHUNK, Profile};
use std::ops::Range;

const LINE_BYTES: usize = 64;
/// Lines of a tile's 64 channels.
const TILE_LINES: usize = TILE_DEPTH / CHANNELS_PER_WORD;
/// Bytes of an unpacked line.
const UNPACKED: usize = 2 * LINE_BYTES;

/// Frozen 4-bit weights with their scales and zero points.
#[derive(Clone)]
pub struct QuantizedWeight {
    pub(super) shape: QuantizedShape,
    /// `[weight][16 outputs][line][64]`
    lines: Buffer<u8>,
    /// `[weight][group][outputs, padded to 16]`; zero for padding. Empty if all zero points are
    /// equal.
    zeros: Buffer<u8>,
    /// `[weight][group][output]`
    scales: KeptScales,
    /// `[ordered weight][place]`: channels.
    orders: Buffer<u32>,
    /// Index of each weight's order; None if its channels are already in order.
    order_of: Vec<Option<usize>>,
    pub(super) plan: Plan,
}

impl Shaped<QuantizedShape> for QuantizedWeight {
    fn shape(&self) -> QuantizedShape {
        self.shape
    }
}

#[derive(Clone)]
enum KeptScales {
    F32(Buffer<f32>),
    F16(Buffer<f16>),
}

/// How the ordered channels are divided, the same for all weights.
#[derive(Clone)]
pub(super) struct Plan {
    /// Places of each group.
    pub(super) starts: Vec<usize>,
    /// Group chunks of each chunk.
    pub(super) group_chunks: Vec<Vec<GroupChunk>>,
    /// Panels of up to 32 places within one group, for the input gradient.
    pub(super) panels: Vec<GroupChunk>,
    /// The first panel of each group, then the end.
    pub(super) panel_starts: Vec<usize>,
}

impl Plan {
    fn of(shape: QuantizedShape) -> Self {
        let starts = shape.starts();
        let mut by_chunk = vec![Vec::new(); shape.k.div_ceil(CHUNK)];
        for part in group_chunks(&starts) {
            by_chunk[part.chunk()].push(part);
        }
        let (mut panels, mut panel_starts) = (Vec::new(), vec![0]);
        for (group, ends) in starts.windows(2).enumerate() {
            for first in (ends[0]..ends[1]).step_by(BLOCK) {
                panels.push(GroupChunk { group, channels: first..(first + BLOCK).min(ends[1]) });
            }
            panel_starts.push(panels.len());
        }
        Self { starts, group_chunks: by_chunk, panels, panel_starts }
    }
}

/// Lengths of lines, zero points, scales and orders.
fn lengths(shape: QuantizedShape) -> [usize; 4] {
    let QuantizedShape { count, n, k, ordered, .. } = shape;
    let (blocks, groups) = (n.div_ceil(TILE_ROWS), shape.groups());
    let lines = count * blocks * (k / CHANNELS_PER_WORD) * LINE_BYTES;
    let zeros = if shape.zero.is_some() { 0 } else { count * groups * blocks * TILE_ROWS };
    [lines, zeros, count * groups * n, ordered * k]
}

/// Bytes of weights of this shape.
pub(super) fn quantized_bytes(shape: QuantizedShape) -> usize {
    let [lines, zeros, scales, orders] = lengths(shape);
    let scale_bytes = if shape.half_scales { size_of::<f16>() } else { size_of::<f32>() };
    lines + zeros + scales * scale_bytes + orders * size_of::<u32>()
}

/// Bytes of the tiles of one chunk's group chunks, for a panel of 32 outputs; the maximum over
/// chunks.
pub(super) fn group_chunk_bytes(shape: QuantizedShape) -> usize {
    let group_chunks = group_chunks(&shape.starts());
    let tiles = |chunk: &[GroupChunk]| -> usize { chunk.iter().map(group_chunk_tiles).sum() };
    let most = group_chunks.chunk_by(|a, b| a.chunk() == b.chunk()).map(tiles).max().unwrap_or(0);
    2 * most * TILE_BYTES
}

impl QuantizedWeight {
    /// The channel at each place; None if the channels are already in order.
    pub(super) fn order(&self, e: usize) -> Option<&[u32]> {
        self.order_of[e].map(|at| &self.orders[at * self.shape.k..][..self.shape.k])
    }

    /// σ of some outputs of a group as float32.
    pub(super) fn sigma(
        &self,
        path: Path,
        out: &mut [f32],
        e: usize,
        group: usize,
        outputs: Range<usize>,
        profile: Profile,
    ) {
        let first = (e * self.shape.groups() + group) * self.shape.n;
        let at = first + outputs.start..first + outputs.end;
        match &self.scales {
            KeptScales::F32(scales) => widen(path, out, &scales[at]),
            KeptScales::F16(scales) => widen(path, out, &scales[at]),
        }
        for sigma in out {
            *sigma *= sigma_factor(profile);
        }
    }

    fn row_blocks(&self) -> usize {
        self.shape.n.div_ceil(TILE_ROWS)
    }

    /// The lines of 16 outputs.
    fn block_lines(&self, e: usize, block: usize) -> &[u8] {
        let bytes = self.shape.k / CHANNELS_PER_WORD * LINE_BYTES;
        &self.lines[(e * self.row_blocks() + block) * bytes..][..bytes]
    }

    /// Zero points of 16 outputs, each repeated for all its bytes of a line.
    fn spread_zeros(&self, e: usize, group: usize, block: usize) -> [u8; LINE_BYTES] {
        if let Some(zero) = self.shape.zero {
            return std::array::from_fn(|i| if block * TILE_ROWS + i / 4 < self.shape.n { zero } else { 0 });
        }
        let first = ((e * self.shape.groups() + group) * self.row_blocks() + block) * TILE_ROWS;
        let zeros = &self.zeros[first..][..TILE_ROWS];
        std::array::from_fn(|i| zeros[i / 4])
    }

    /// `d` of whole lines of one group and 16 outputs: each line becomes two groups of a right
    /// tile.
    fn unpack_lines(&self, path: Path, out: &mut [i8], packed: &[u8], (e, group, block): (usize, usize, usize)) {
        if self.shape.is_e2m1() {
            // Bits of padding are zero, and so are the numbers.
            return unpack_floats(path, out, packed);
        }
        unpack(path, out, packed, &self.spread_zeros(e, group, block));
    }

    /// Unpacks a group chunk for the outputs `first..first + 32`: right tiles, from the tile in
    /// which the group chunk starts. Bytes of these tiles outside it are zero.
    pub(super) fn panel<'s>(
        &self,
        path: Path,
        own: &'s mut [i8],
        e: usize,
        part: &GroupChunk,
        first: usize,
    ) -> RightView<'s> {
        let tiles = group_chunk_tiles(part);
        let block_stride = tiles * TILE_BYTES;
        let blocks = (self.row_blocks() - first / TILE_ROWS).min(2);
        let lines = part.channels.start / CHANNELS_PER_WORD..part.channels.end / CHANNELS_PER_WORD;
        let skipped = lines.start % TILE_LINES;
        for (block, out) in own[..blocks * block_stride].chunks_exact_mut(block_stride).enumerate() {
            if lines.len() < tiles * TILE_LINES {
                out.fill(0);
            }
            let block = first / TILE_ROWS + block;
            let packed = &self.block_lines(e, block)[lines.start * LINE_BYTES..lines.end * LINE_BYTES];
            self.unpack_lines(path, &mut out[skipped * UNPACKED..], packed, (e, part.group, block));
        }
        RightView { tiles: own, block_stride, blocks }
    }

    /// The panel of up to 32 places, contracted along one chunk of the outputs.
    pub(super) fn transposed_panel<'s>(
        &self,
        path: Path,
        own: &'s mut [i8],
        e: usize,
        panel: &GroupChunk,
        chunk: usize,
    ) -> RightView<'s> {
        let block_stride = CHUNK_TILES * TILE_BYTES;
        let blocks = panel.channels.len().div_ceil(TILE_ROWS);
        let row_blocks = chunk * CHUNK / TILE_ROWS..((chunk + 1) * CHUNK / TILE_ROWS).min(self.row_blocks());
        let lines = panel.channels.start / CHANNELS_PER_WORD..panel.channels.end / CHANNELS_PER_WORD;
        let places = lines.start * LINE_BYTES..lines.end * LINE_BYTES;
        for (column, four) in row_blocks.clone().step_by(4).enumerate() {
            // 64 outputs by 32 places, as [16 outputs][group of 4 places][output][4].
            let mut unpacked = [[0i8; 4 * UNPACKED]; 4];
            for (unpacked, block) in unpacked.iter_mut().zip(four..(four + 4).min(row_blocks.end)) {
                if block + 4 < row_blocks.end {
                    let ahead = &self.block_lines(e, block + 4)[places.clone()];
                    for line in ahead.chunks(LINE_BYTES) {
                        prefetch(line.as_ptr());
                    }
                }
                let packed = &self.block_lines(e, block)[places.clone()];
                self.unpack_lines(path, unpacked, packed, (e, panel.group, block));
            }
            for block in 0..blocks {
                let out = &mut own[block * block_stride + column * TILE_BYTES..][..TILE_BYTES];
                transpose_tile(path, out, [0, 1, 2, 3].map(|i| &unpacked[i][..]), block);
            }
        }
        RightView { tiles: own, block_stride, blocks }
    }
}

/// Scratch for a transposed panel.
pub(super) const TRANSPOSED_BYTES: usize = 2 * CHUNK_TILES * TILE_BYTES;

/// Tiles that a group chunk spans.
fn group_chunk_tiles(part: &GroupChunk) -> usize {
    part.channels.end.div_ceil(TILE_DEPTH) - part.channels.start / TILE_DEPTH
}

multiversion! {
    /// `q − z` of whole lines: each becomes two groups of a right tile.
    fn unpack<_F>(out: &mut [i8], packed: &[u8], zeros: &[u8; LINE_BYTES]) {
        let (out, _) = out.as_chunks_mut::<UNPACKED>();
        for (out, line) in out.iter_mut().zip(packed.as_chunks::<LINE_BYTES>().0) {
            let (low, high) = out.split_at_mut(LINE_BYTES);
            for i in 0..LINE_BYTES {
                low[i] = (line[i] & 15).wrapping_sub(zeros[i]) as i8;
                high[i] = (line[i] >> 4).wrapping_sub(zeros[i]) as i8;
            }
        }
    }
}

multiversion! {
    /// Twice the e2m1 floats of whole lines.
    fn unpack_floats<_F>(out: &mut [i8], packed: &[u8]) {
        let (out, _) = out.as_chunks_mut::<UNPACKED>();
        for (out, line) in out.iter_mut().zip(packed.as_chunks::<LINE_BYTES>().0) {
            let (low, high) = out.split_at_mut(LINE_BYTES);
            for i in 0..LINE_BYTES {
                low[i] = twice(line[i] & 15);
                high[i] = twice(line[i] >> 4);
            }
        }
    }
}

pub(super) fn quantized_weight<Q: AsQuantized, E>(
    cpu: &Cpu,
    shape: QuantizedShape,
    mut make: impl FnMut(usize) -> Result<Q, E>,
) -> Result<QuantizedWeight, E> {
    let [lines, zeros, scales, orders] = lengths(shape);
    let (mut lines, mut zeros, mut orders) = (Buffer::zeros(lines), Buffer::zeros(zeros), Buffer::<u32>::zeros(orders));
    let mut scales =
        if shape.half_scales { KeptScales::F16(Buffer::zeros(scales)) } else { KeptScales::F32(Buffer::zeros(scales)) };
    let mut order_of = Vec::with_capacity(shape.count);
    let mut orders_left = orders.chunks_exact_mut(shape.k.max(1)).enumerate();
    let (line_bytes, zero_bytes) = (lines.len() / shape.count.max(1), zeros.len() / shape.count.max(1));
    for e in 0..shape.count {
        let made = make(e)?;
        let weight = made.quantized();
        shape.expect(&weight);
        let order = weight.order();
        order_of.push(order.as_ref().map(|order| {
            let (at, kept) = orders_left.next().expect("as many orders as were announced");
            kept.copy_from_slice(order);
            at
        }));
        pack(cpu, &mut lines[e * line_bytes..][..line_bytes], &weight, order.as_deref());
        // Nothing to store if the shape gives the zero point.
        keep_zeros(&mut zeros[e * zero_bytes..][..zero_bytes], &weight);
        scales.keep(e, &weight);
    }
    assert!(orders_left.next().is_none(), "as many orders as were announced");
    Ok(QuantizedWeight { shape, lines, zeros, scales, orders, order_of, plan: Plan::of(shape) })
}

impl KeptScales {
    /// Stores the scales of weight `e`.
    fn keep(&mut self, e: usize, weight: &Quantized) {
        let given = weight.scales;
        let at = e * given.len()..(e + 1) * given.len();
        match (self, given) {
            (Self::F16(kept), Scales::F16(given)) => kept[at].copy_from_slice(given),
            (Self::F32(kept), Scales::F32(given)) => kept[at].copy_from_slice(given),
            (Self::F32(kept), Scales::F16(_)) => {
                for (index, kept) in kept[at].iter_mut().enumerate() {
                    *kept = given.get(index);
                }
            }
            (Self::F16(_), Scales::F32(_)) => unreachable!("the announced format was checked"),
        }
    }
}

fn keep_zeros(zeros: &mut [u8], weight: &Quantized) {
    let n = weight.n.max(1);
    for (kept, given) in zeros.chunks_exact_mut(n.next_multiple_of(TILE_ROWS)).zip(weight.zeros.chunks_exact(n)) {
        kept[..n].copy_from_slice(given);
    }
}

/// Packs all lines of a weight.
fn pack(cpu: &Cpu, lines: &mut [u8], weight: &Quantized, order: Option<&[u32]>) {
    let block_bytes = weight.k / CHANNELS_PER_WORD * LINE_BYTES;
    cpu.pool.run_rows(lines, block_bytes, |range, lines| {
        for (block, lines) in range.zip(lines.chunks_exact_mut(block_bytes)) {
            let first = block * TILE_ROWS;
            pack_block(lines, weight, order, first..(first + TILE_ROWS).min(weight.n));
        }
    });
}

/// Packs the lines of up to 16 outputs.
fn pack_block(lines: &mut [u8], weight: &Quantized, order: Option<&[u32]>, outputs: Range<usize>) {
    for (line, bytes) in lines.as_chunks_mut::<LINE_BYTES>().0.iter_mut().enumerate() {
        for (bytes, n) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(outputs.clone()) {
            *bytes = weight.line(order, line, n).to_le_bytes();
        }
    }
}
