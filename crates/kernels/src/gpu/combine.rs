//! Combine on a GPU (`op/combine.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::{Combine, CombineBackward, CombineForward};
use isobit_numerics::lanes::LANES;

impl Run<CombineForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut CombineForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        forward(self, op.y, op.rows, op.weights, op.places, &op.p);
    }
}

impl Run<CombineBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut CombineBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        backward(self, op.drows, op.dweights, op.dy, op.rows, op.weights, op.places, &op.p);
    }
}

static COMBINE: Program = program!("combine");

/// Pairs of a group of the backward pass, `PAIRS` in `gpu/combine.cl`.
const PAIRS: usize = GROUP / LANES;

pub(super) fn forward(
    gpu: &Gpu,
    y: &mut GpuBuffer<f32>,
    rows: &GpuBuffer<f32>,
    weights: Option<&GpuBuffer<f32>>,
    places: &GpuBuffer<u32>,
    p: &Combine,
) {
    assert_eq!([y.len(), rows.len()], [p.tokens * p.width, p.rows() * p.width], "combine");
    assert_eq!([places.len(), weights.map_or(p.rows(), GpuBuffer::len)], [p.rows(); 2], "combine");
    let tiles = p.width.div_ceil(GROUP);
    let [row_count, slots, width, tile_count] = [p.rows(), p.slots, p.width, tiles].map(dimension);
    let flags = [weights.is_some(), p.accumulate].map(u32::from);
    let weights = weights.unwrap_or(rows);
    let arguments = arguments![y, rows, weights, places, row_count, slots, width, tile_count, flags[0], flags[1]];
    gpu.launch(&COMBINE, "combine_forward", Groups::each(p.tokens * tiles), arguments);
}

pub(super) fn backward(
    gpu: &Gpu,
    drows: &mut GpuBuffer<f32>,
    dweights: &mut GpuBuffer<f32>,
    dy: &GpuBuffer<f32>,
    rows: &GpuBuffer<f32>,
    weights: &GpuBuffer<f32>,
    places: &GpuBuffer<u32>,
    p: &Combine,
) {
    assert_eq!([drows.len(), rows.len(), dy.len()], [p.rows() * p.width, p.rows() * p.width, p.tokens * p.width]);
    assert_eq!([dweights.len(), weights.len(), places.len()], [p.rows(); 3], "combine");
    let [row_count, slots, width] = [p.rows(), p.slots, p.width].map(dimension);
    let arguments = arguments![drows, dweights, dy, rows, weights, places, row_count, slots, width];
    gpu.launch(&COMBINE, "combine_backward", Groups::each(p.rows().div_ceil(PAIRS)), arguments);
}
