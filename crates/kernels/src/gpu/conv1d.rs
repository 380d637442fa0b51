//! Causal convolution on a GPU (`op/conv1d.rs`). What a token sees of its document goes along as a number per token.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Device, Run};
use crate::op::{Conv1d, Conv1dBackward, Conv1dForward};
use isobit_numerics::lanes::LANES;

impl Run<Conv1dForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut Conv1dForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        forward(self, op.y, op.x, op.weight, op.history, &op.p);
    }
}

impl Run<Conv1dBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut Conv1dBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        backward(self, op.dx, op.dweight.as_deref_mut(), op.dy, op.x, op.weight, &op.p, op.row_starts);
    }
}

static CONV1D: Program = program!("conv1d");

/// Tokens that a work item of the backward pass walks along, `STRETCH` in `gpu/conv1d.cl`.
const STRETCH: usize = 32;

fn check(lengths: [usize; 3], p: &Conv1d) {
    p.check();
    let length = p.tokens() * p.channels;
    assert_eq!(lengths, [length, length, p.channels * p.kernel], "convolution");
}

/// For each token, the tokens of its document before it, `kernel − 1` at most.
fn seen(gpu: &Gpu, p: &Conv1d) -> GpuBuffer<u32> {
    let places = p.starts.windows(2).flat_map(|ends| 0..ends[1] - ends[0]);
    gpu.upload(&places.map(|place| place.min(p.kernel - 1) as u32).collect::<Vec<_>>())
}

pub(super) fn forward(
    gpu: &Gpu,
    y: &mut GpuBuffer<f32>,
    x: &GpuBuffer<f32>,
    weight: &GpuBuffer<f32>,
    history: Option<&GpuBuffer<f32>>,
    p: &Conv1d,
) {
    check([y.len(), x.len(), weight.len()], p);
    let (length, channels, kernel) = (x.len(), dimension(p.channels), dimension(p.kernel));
    let seen = seen(gpu, p);
    let Some(history) = history else {
        let arguments = arguments![y, x, weight, &seen, length, channels, kernel];
        return gpu.launch(&CONV1D, "conv1d_forward", Groups::over(length), arguments);
    };
    assert_eq!(history.len(), p.history(), "{} taps before each document", p.kernel - 1);
    let documents = p.starts.windows(2).enumerate().flat_map(|(d, ends)| (ends[0]..ends[1]).map(move |_| d));
    let documents = gpu.offsets(&documents.collect::<Vec<_>>());
    let arguments = arguments![y, x, weight, history, &seen, &documents, length, channels, kernel];
    gpu.launch(&CONV1D, "conv1d_continue", Groups::over(length), arguments);
}

pub(super) fn backward(
    gpu: &Gpu,
    dx: &mut GpuBuffer<f32>,
    dweight: Option<&mut GpuBuffer<f32>>,
    dy: &GpuBuffer<f32>,
    x: &GpuBuffer<f32>,
    weight: &GpuBuffer<f32>,
    p: &Conv1d,
    row_starts: &[usize],
) {
    check([dy.len(), x.len(), weight.len()], p);
    assert_eq!(dx.len(), x.len(), "convolution");
    let [tokens, channels, kernel] = [p.tokens(), p.channels, p.kernel].map(dimension);
    let tiles = p.channels.div_ceil(GROUP);
    let seen = seen(gpu, p);
    let arguments = arguments![dx, dy, x, weight, &seen, tokens, channels, kernel, dimension(tiles)];
    gpu.launch(&CONV1D, "conv1d_backward", Groups::each(p.tokens().div_ceil(STRETCH) * tiles), arguments);
    let Some(dweight) = dweight else { return };
    assert_eq!(dweight.len(), weight.len(), "convolution");
    assert_eq!(row_starts[row_starts.len() - 1], p.tokens(), "rows of data end with the tokens");
    let blocks = gpu.token_blocks(row_starts);
    let count = dimension(blocks.len() / 2);
    let arguments = arguments![dweight, dy, x, weight, &seen, &blocks, count, channels, kernel];
    gpu.launch(&CONV1D, "conv1d_grad_weight", Groups::each(p.channels.div_ceil(LANES)), arguments);
}
