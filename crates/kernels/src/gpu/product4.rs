//! Products with 4-bit weights on a GPU (defined in `op/product4.rs`): integers stay packed in
//! memory and are expanded to bytes while loading into a group's local memory. The input gradient
//! slices `dy·σ` into the workspace, one group of channels at a time. Tensor cores multiply in
//! `product4_mma.rs`.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments, dimension};
use super::memory::{DevicePointer, GpuBuffer, Parts, allocated_bytes};
use super::product::{MFMA_COLUMNS, RowTiles, TILE, folded_columns, folded_shape};
use super::product4_mma::{self, Packed, Rows};
use super::program::{Program, files, program};
use super::runtime::Language;
use super::slices::{self, CHUNK_GROUP, SLICES, SlicedRows, plane_bytes};
use crate::Device;
use crate::backend::{Arriving, Checked, Run, Shaped};
use crate::buffer::{Buffer, Element};
use crate::op::product4::{AsQuantized, CHANNELS_PER_WORD, QuantizedShape, Scales};
use crate::op::{Product, Product4Forward, Product4GradInput, Product4Rows};
use half::f16;
use isobit_numerics::slices::CHUNK;
use std::ops::Range;

impl Run<Product4Rows<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut Product4Rows<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        rows(self, op.rows, op.x, op.w, &op.p);
    }
}

impl Run<Product4Forward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut Product4Forward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        forward(self, op.y, op.x, op.w, &op.p, workspace);
    }
}

impl Run<Product4GradInput<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut Product4GradInput<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        grad_input(self, op.dx, op.dy, op.w, &op.p, workspace);
    }
}

static PRODUCT4: Program = program!("product4");
/// The same kernels on AMD's matrix cores.
static PRODUCT4_MFMA: Program = Program {
    name: "product4_mfma",
    text: files!("product_mfma.cl", "product4_mfma.cl"),
    language: Language::Portable,
};

/// The program of the kernels, and the columns of a group's outputs.
fn kernels(gpu: &Gpu) -> (&'static Program, usize) {
    if gpu.has_mfma() { (&PRODUCT4_MFMA, MFMA_COLUMNS) } else { (&PRODUCT4, TILE) }
}

/// Frozen 4-bit weights with their group scales and zero points.
pub struct QuantizedWeight {
    shape: QuantizedShape,
    /// `[weight][line of eight places][output]`
    lines: GpuBuffer<u32>,
    /// `[weight][group][output]`
    zeros: GpuBuffer<u8>,
    group_scales: KeptScales,
    /// `[weight][group + 1]`
    starts: GpuBuffer<u32>,
    /// `[weight][place]`: channels; none if the places of all weights are their channels.
    order: Option<GpuBuffer<u32>>,
}

impl Shaped<QuantizedShape> for QuantizedWeight {
    fn shape(&self) -> QuantizedShape {
        self.shape
    }
}

/// `[weight][group][output]`
enum KeptScales {
    F32(GpuBuffer<f32>),
    F16(GpuBuffer<f16>),
}

impl QuantizedWeight {
    /// The group scales and their format code for `load_stored`.
    fn group_scales(&self) -> (DevicePointer, u32) {
        match &self.group_scales {
            KeptScales::F32(scales) => (DevicePointer::from(scales), 0),
            KeptScales::F16(scales) => (DevicePointer::from(scales), 2),
        }
    }

    /// For tensor cores.
    fn packed(&self) -> Packed<'_> {
        let (lines, zeros, order) = (&self.lines, &self.zeros, self.order.as_ref());
        Packed { shape: self.shape, lines, zeros, group_scales: self.group_scales(), order }
    }
}

/// Bytes of such weights.
pub(super) fn quantized_bytes(shape: QuantizedShape) -> usize {
    let QuantizedShape { count, n, k, half_scales, ordered, .. } = shape;
    let (groups, word) = (shape.groups(), size_of::<u32>());
    let scale_bytes = if half_scales { size_of::<f16>() } else { size_of::<f32>() };
    let order = if ordered == 0 { 0 } else { allocated_bytes(count * k * word) };
    allocated_bytes(count * (k / CHANNELS_PER_WORD) * n * word)
        + allocated_bytes(count * groups * n)
        + allocated_bytes(count * groups * n * scale_bytes)
        + allocated_bytes(count * (groups + 1) * word)
        + order
}

/// Bytes of such weights in host memory, where starts of groups are not kept.
pub(super) fn host_quantized_bytes(shape: QuantizedShape) -> usize {
    let QuantizedShape { count, n, k, half_scales, ordered, .. } = shape;
    let (places, word) = (count * shape.groups() * n, size_of::<u32>());
    let scale_bytes = if half_scales { size_of::<f16>() } else { size_of::<f32>() };
    let order = if ordered == 0 { 0 } else { count * k * word };
    count * (k / CHANNELS_PER_WORD) * n * word + places + places * scale_bytes + order
}

pub(super) fn quantized_weight<Q: AsQuantized, E>(
    gpu: &Gpu,
    shape: QuantizedShape,
    mut make: impl FnMut(usize) -> Result<Q, E>,
) -> Result<QuantizedWeight, E> {
    let QuantizedShape { count, n, k, half_scales, ordered, .. } = shape;
    let (mut lines, mut zeros, mut starts, mut order) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut narrow, mut wide) = (Vec::new(), Vec::new());
    for e in 0..count {
        let made = make(e)?;
        let weight = made.quantized();
        shape.expect(&weight);
        let own = weight.order();
        let all = (0..k / CHANNELS_PER_WORD).flat_map(|line| (0..n).map(move |n| (line, n)));
        lines.extend(all.map(|(line, n)| weight.line(own.as_deref(), line, n)));
        zeros.extend_from_slice(weight.zeros);
        starts.extend(shape.starts());
        if ordered > 0 {
            order.extend(own.unwrap_or_else(|| (0u32..).take(k).collect()));
        }
        match weight.scales {
            Scales::F16(scales) if half_scales => narrow.extend_from_slice(scales),
            scales => wide.extend((0..scales.len()).map(|at| scales.get(at))),
        }
    }
    Ok(QuantizedWeight {
        shape,
        lines: gpu.upload(&lines),
        zeros: gpu.upload(&zeros),
        group_scales: if half_scales {
            KeptScales::F16(gpu.upload(&narrow))
        } else {
            KeptScales::F32(gpu.upload(&wide))
        },
        starts: gpu.offsets(&starts),
        order: (ordered > 0).then(|| gpu.upload(&order)),
    })
}

/// The same in host memory, so that none of it is prepared again when it returns.
pub struct HostQuantizedWeight {
    shape: QuantizedShape,
    lines: Buffer<u32>,
    zeros: Buffer<u8>,
    group_scales: HostScales,
    order: Option<Buffer<u32>>,
}

enum HostScales {
    F32(Buffer<f32>),
    F16(Buffer<f16>),
}

/// Copies to the host. A failure is kept by the device.
pub(super) fn save(gpu: &Gpu, weight: &QuantizedWeight) -> HostQuantizedWeight {
    fn copy<T: Element>(gpu: &Gpu, device: &GpuBuffer<T>) -> Buffer<T> {
        let mut host = Buffer::paged(device.len());
        let _ = gpu.save_to(&mut host, device);
        host
    }
    HostQuantizedWeight {
        shape: weight.shape,
        lines: copy(gpu, &weight.lines),
        zeros: copy(gpu, &weight.zeros),
        group_scales: match &weight.group_scales {
            KeptScales::F32(scales) => HostScales::F32(copy(gpu, scales)),
            KeptScales::F16(scales) => HostScales::F16(copy(gpu, scales)),
        },
        order: weight.order.as_ref().map(|order| copy(gpu, order)),
    }
}

/// Copies to the device, beside the kernels that follow.
pub(super) fn load_ahead(gpu: &Gpu, host: &HostQuantizedWeight) -> Arriving<QuantizedWeight> {
    fn copy<T: Element>(gpu: &Gpu, host: &Buffer<T>) -> GpuBuffer<T> {
        gpu.load_ahead(host).into_inner()
    }
    let starts: Vec<usize> = (0..host.shape.count).flat_map(|_| host.shape.starts()).collect();
    Arriving::new(QuantizedWeight {
        shape: host.shape,
        lines: copy(gpu, &host.lines),
        zeros: copy(gpu, &host.zeros),
        group_scales: match &host.group_scales {
            HostScales::F32(scales) => KeptScales::F32(copy(gpu, scales)),
            HostScales::F16(scales) => KeptScales::F16(copy(gpu, scales)),
        },
        starts: gpu.offsets(&starts),
        order: host.order.as_ref().map(|order| copy(gpu, order)),
    })
}

/// Kernels from now on come after the copies.
pub(super) fn wait_for(gpu: &Gpu, arriving: Arriving<QuantizedWeight>) -> QuantizedWeight {
    let weight = arriving.into_inner();
    gpu.come_after_copy(&weight.lines);
    gpu.come_after_copy(&weight.zeros);
    match &weight.group_scales {
        KeptScales::F32(scales) => gpu.come_after_copy(scales),
        KeptScales::F16(scales) => gpu.come_after_copy(scales),
    }
    if let Some(order) = &weight.order {
        gpu.come_after_copy(order);
    }
    weight
}

/// Slices rows with their channels in the order of the weight.
pub(super) fn rows(gpu: &Gpu, out: &mut SlicedRows, x: &GpuBuffer<f32>, w: &QuantizedWeight, p: &Product) {
    let Some(order) = &w.order else { return slices::slice_rows(gpu, out, x) };
    let tiles = RowTiles::of_segments(gpu, p.segments);
    let chosen = tiles.of_weights(&(0..p.weights()));
    let arguments = arguments![
        &mut out.planes,
        &mut out.scales,
        x,
        order,
        tiles.table(DevicePointer::from(order)),
        u32::from(tiles.table.is_some()),
        dimension(chosen.start),
        dimension(tiles.rows.start),
        dimension(tiles.rows.end),
        dimension(p.rows()),
        dimension(p.k),
    ];
    let groups = Groups::of(chosen.len() * TILE * p.k.div_ceil(CHUNK), CHUNK_GROUP);
    gpu.launch_sliced(&SLICES, "slice_ordered", p.profile, groups, arguments);
}

/// Space for the input gradient's slices of one group.
pub(super) fn workspace(gpu: &Gpu, p: &Product) -> usize {
    let folded = folded_shape(gpu, p);
    gpu.part::<i8>(plane_bytes(folded)) + gpu.part::<f32>(folded.rows * folded.width.div_ceil(CHUNK))
}

pub(super) fn forward(
    gpu: &Gpu,
    y: &mut GpuBuffer<f32>,
    x: &SlicedRows,
    w: &QuantizedWeight,
    p: &Product,
    _workspace: &mut GpuBuffer<u8>,
) {
    let tiles = RowTiles::of_segments(gpu, p.segments);
    if product4_mma::serves(gpu, w.shape) && p.k > 0 {
        let rows = Rows { planes: (&x.planes).into(), scales: (&x.scales).into(), count: p.rows() };
        return product4_mma::forward(gpu, y, rows, w.packed(), &tiles.tensor(&(0..p.weights())), p.profile);
    }
    let chosen = tiles.of_weights(&(0..p.weights()));
    let (group_scales, format) = w.group_scales();
    let arguments = arguments![
        y,
        &x.planes,
        &x.scales,
        dimension(p.rows()),
        &w.lines,
        &w.zeros,
        group_scales,
        format,
        &w.starts,
        dimension(w.shape.groups()),
        dimension(p.n),
        dimension(p.k),
        tiles.table(DevicePointer::from(&w.starts)),
        u32::from(tiles.table.is_some()),
        dimension(chosen.start),
        dimension(chosen.len()),
        dimension(tiles.rows.start),
        dimension(tiles.rows.end),
    ];
    let (program, columns) = kernels(gpu);
    let groups = Groups::each(chosen.len() * p.n.div_ceil(columns));
    gpu.launch_sliced(program, "product4_forward", p.profile, groups, arguments);
}

/// The input gradient of one group of channels: `dy·σ` of some outputs is sliced into the scratch,
/// then multiplied by the group.
struct GroupGradient<'a> {
    gpu: &'a Gpu,
    planes: DevicePointer,
    scales: DevicePointer,
    w: &'a QuantizedWeight,
    group: usize,
    outputs: &'a Range<usize>,
    tiles: &'a RowTiles,
    p: &'a Product<'a>,
}

pub(super) fn grad_input(
    gpu: &Gpu,
    dx: &mut GpuBuffer<f32>,
    dy: &GpuBuffer<f32>,
    w: &QuantizedWeight,
    p: &Product,
    workspace: &mut GpuBuffer<u8>,
) {
    let mut parts = Parts::new(gpu, workspace);
    let scratch = folded_shape(gpu, p);
    let planes = parts.take::<i8>(plane_bytes(scratch));
    let scales = parts.take::<f32>(scratch.rows * scratch.width.div_ceil(CHUNK));
    let tiles = RowTiles::of_segments(gpu, p.segments);
    // ORDER: stripes of the outputs ascend for every element; groups are independent.
    for first in (0..p.n.max(1)).step_by(folded_columns(gpu, p)) {
        let outputs = first..(first + folded_columns(gpu, p)).min(p.n);
        for group in 0..w.shape.groups() {
            let gradient = GroupGradient { gpu, planes, scales, w, group, outputs: &outputs, tiles: &tiles, p };
            gradient.slice_scaled(dy);
            gradient.multiply(dx);
        }
    }
}

impl GroupGradient<'_> {
    fn slice_scaled(&self, dy: &GpuBuffer<f32>) {
        let Self { gpu, planes, scales, w, group, outputs, tiles, p } = *self;
        let (group_scales, format) = w.group_scales();
        let chosen = tiles.of_weights(&(0..p.weights()));
        let arguments = arguments![
            planes,
            scales,
            dy,
            group_scales,
            format,
            tiles.table(DevicePointer::from(&w.starts)),
            u32::from(tiles.table.is_some()),
            dimension(chosen.start),
            dimension(tiles.rows.start),
            dimension(tiles.rows.end),
            dimension(p.rows()),
            dimension(outputs.len()),
            p.n,
            dimension(outputs.start),
            w.shape.groups() * p.n,
            group * p.n,
        ];
        let groups = Groups::of(chosen.len() * TILE * outputs.len().div_ceil(CHUNK), CHUNK_GROUP);
        gpu.launch_sliced(&SLICES, "slice_scaled", p.profile, groups, arguments);
    }

    fn multiply(&self, dx: &GpuBuffer<f32>) {
        let Self { gpu, planes, scales, w, group, outputs, tiles, p } = *self;
        let fresh = outputs.start == 0 && !p.accumulate;
        if product4_mma::serves(gpu, w.shape) && !outputs.is_empty() {
            let (rows, tiles) = (Rows { planes, scales, count: p.rows() }, tiles.tensor(&(0..p.weights())));
            let part = (group, outputs, fresh);
            return product4_mma::grad_input(gpu, dx, rows, w.packed(), part, &tiles, p.profile);
        }
        let chosen = tiles.of_weights(&(0..p.weights()));
        let arguments = arguments![
            dx,
            planes,
            scales,
            dimension(p.rows()),
            &w.lines,
            &w.zeros,
            &w.starts,
            w.order.as_ref().map_or(DevicePointer::from(&w.starts), DevicePointer::from),
            u32::from(w.order.is_some()),
            dimension(w.shape.groups()),
            dimension(group),
            dimension(p.n),
            dimension(p.k),
            dimension(outputs.start),
            dimension(outputs.len()),
            u32::from(fresh),
            tiles.table(DevicePointer::from(&w.starts)),
            u32::from(tiles.table.is_some()),
            dimension(chosen.start),
            dimension(chosen.len()),
            dimension(tiles.rows.start),
            dimension(tiles.rows.end),
        ];
        let (program, columns) = kernels(gpu);
        let groups = Groups::each(chosen.len() * w.shape.group_size.min(p.k).div_ceil(columns));
        gpu.launch_sliced(program, "product4_input", p.profile, groups, arguments);
    }
}
