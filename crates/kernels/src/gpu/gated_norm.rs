//! Gated norm on a GPU (`op/gated_norm.rs`).

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::{GatedNorm, GatedNormBackward, GatedNormForward};
use isobit_numerics::lanes::LANES;

impl Run<GatedNormForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut GatedNormForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        forward(self, op.y, op.inverse, op.h, op.z, op.weight, &op.p);
    }
}

impl Run<GatedNormBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut GatedNormBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        backward(
            self,
            op.dh,
            op.dz,
            op.dweight.as_deref_mut(),
            op.dy,
            (op.h, op.z),
            op.inverse,
            op.weight,
            &op.p,
            op.row_starts,
        );
    }
}

static GATED_NORM: Program = program!("gated_norm");

/// Eight tokens per group, each with a work item per lane.
fn groups(p: &GatedNorm) -> Groups {
    Groups::each(p.tokens.div_ceil(GROUP / LANES))
}

pub(super) fn forward(
    gpu: &Gpu,
    y: &mut GpuBuffer<f32>,
    inverse: &mut GpuBuffer<f32>,
    h: &GpuBuffer<f32>,
    z: &GpuBuffer<f32>,
    weight: &GpuBuffer<f32>,
    p: &GatedNorm,
) {
    let length = p.tokens * p.width;
    assert_eq!([y.len(), h.len(), z.len()], [length; 3], "gated norm");
    assert_eq!([inverse.len(), weight.len()], [p.tokens, p.width], "gated norm");
    let arguments = arguments![y, inverse, h, z, weight, p.tokens, dimension(p.width), p.eps];
    gpu.launch(&GATED_NORM, "gated_norm_forward", groups(p), arguments);
}

pub(super) fn backward(
    gpu: &Gpu,
    dh: &mut GpuBuffer<f32>,
    dz: &mut GpuBuffer<f32>,
    dweight: Option<&mut GpuBuffer<f32>>,
    dy: &GpuBuffer<f32>,
    (h, z): (&GpuBuffer<f32>, &GpuBuffer<f32>),
    inverse: &GpuBuffer<f32>,
    weight: &GpuBuffer<f32>,
    p: &GatedNorm,
    row_starts: &[usize],
) {
    let (length, width) = (p.tokens * p.width, dimension(p.width));
    assert_eq!([dh.len(), dz.len(), dy.len(), h.len(), z.len()], [length; 5], "gated norm");
    assert_eq!([inverse.len(), weight.len()], [p.tokens, p.width], "gated norm");
    let arguments = arguments![dh, dz, dy, h, z, inverse, weight, p.tokens, width];
    gpu.launch(&GATED_NORM, "gated_norm_backward", groups(p), arguments);
    let Some(dweight) = dweight else { return };
    assert_eq!((dweight.len(), row_starts[row_starts.len() - 1]), (p.width, p.tokens), "gated norm");
    let blocks = gpu.token_blocks(row_starts);
    let count = dimension(blocks.len() / 2);
    let arguments = arguments![dweight, dy, h, z, inverse, &blocks, count, width];
    gpu.launch(&GATED_NORM, "gated_norm_grad_weight", Groups::each(p.width.div_ceil(LANES)), arguments);
}
