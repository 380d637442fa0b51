//! Causal convolution on a GPU (`op/conv1d.rs`). A per-token table gives how far each token sees
//! into its document.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::{Checked, Device, Run};
use crate::op::{Conv1d, Conv1dBackward, Conv1dForward};
use isobit_numerics::lanes::LANES;

pub(super) static CONV1D: Program = program!("conv1d");

/// Tokens per work item of the backward pass, `STRETCH` in `gpu/conv1d.cl`.
const STRETCH: usize = 32;

/// For each token, the number of earlier tokens in its document, at most `kernel − 1`.
fn seen(gpu: &Gpu, p: &Conv1d) -> GpuBuffer<u32> {
    let places = p.starts.windows(2).flat_map(|ends| 0..ends[1] - ends[0]);
    gpu.upload(&places.map(|place| place.min(p.kernel - 1) as u32).collect::<Vec<_>>())
}

impl Run<Conv1dForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut Conv1dForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let (length, channels, kernel) = (op.x.len(), dimension(p.channels), dimension(p.kernel));
        let seen = seen(self, p);
        let Some(history) = op.history else {
            let arguments = arguments![&*op.y, op.x, op.weight, &seen, length, channels, kernel];
            return self.launch(&CONV1D, "conv1d_forward", Groups::over(length), arguments);
        };
        let documents = p.starts.windows(2).enumerate().flat_map(|(d, ends)| (ends[0]..ends[1]).map(move |_| d));
        let documents = self.offsets(&documents.collect::<Vec<_>>());
        let arguments = arguments![&*op.y, op.x, op.weight, history, &seen, &documents, length, channels, kernel];
        self.launch(&CONV1D, "conv1d_continue", Groups::over(length), arguments);
    }
}

impl Run<Conv1dBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut Conv1dBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let p = &op.p;
        let [tokens, channels, kernel] = [p.tokens(), p.channels, p.kernel].map(dimension);
        let tiles = p.channels.div_ceil(GROUP);
        let seen = seen(self, p);
        let arguments = arguments![&*op.dx, op.dy, op.x, op.weight, &seen, tokens, channels, kernel, dimension(tiles)];
        self.launch(&CONV1D, "conv1d_backward", Groups::each(p.tokens().div_ceil(STRETCH) * tiles), arguments);
        let Some(dweight) = &op.dweight else { return };
        let blocks = self.token_blocks(op.row_starts);
        let count = dimension(blocks.len() / 2);
        let arguments = arguments![&**dweight, op.dy, op.x, op.weight, &seen, &blocks, count, channels, kernel];
        self.launch(&CONV1D, "conv1d_grad_weight", Groups::each(p.channels.div_ceil(LANES)), arguments);
    }
}
