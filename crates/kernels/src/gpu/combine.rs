//! Combine on a GPU (`op/combine.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::{CombineBackward, CombineForward};
use isobit_numerics::lanes::LANES;

pub(super) static COMBINE: Program = program!("combine");

/// Pairs per group of the backward pass, `PAIRS` in `gpu/combine.cl`.
const PAIRS: usize = GROUP / LANES;

impl Run<CombineForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut CombineForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let tiles = p.width.div_ceil(GROUP);
        let [row_count, slots, width, tile_count] = [p.rows(), p.slots, p.width, tiles].map(dimension);
        let [weighted, accumulate] = [op.weights.is_some(), p.accumulate].map(u32::from);
        let weights = op.weights.unwrap_or(op.rows);
        let arguments =
            arguments![&*op.y, op.rows, weights, op.places, row_count, slots, width, tile_count, weighted, accumulate];
        self.launch(&COMBINE, "combine_forward", Groups::each(p.tokens * tiles), arguments);
    }
}

impl Run<CombineBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut CombineBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let [row_count, slots, width] = [p.rows(), p.slots, p.width].map(dimension);
        let arguments =
            arguments![&*op.drows, &*op.dweights, op.dy, op.rows, op.weights, op.places, row_count, slots, width];
        self.launch(&COMBINE, "combine_backward", Groups::each(p.rows().div_ceil(PAIRS)), arguments);
    }
}
