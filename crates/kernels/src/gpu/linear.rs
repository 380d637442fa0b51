//! Linear layers on a GPU: with tensor cores, bias and adapter are added in the epilogue of the
//! product; otherwise they are separate ops. The bits are the same.

use super::device::{Gpu, dimension};
use super::hopper::{Epilogue, LowRank};
use super::memory::{DevicePointer, GpuBuffer};
use super::{GpuMemory, bias, low_rank, product};
use crate::backend::{Checked, Run};
use crate::op::{LinearForward, LinearGradInput, LowRankTerm};

impl Run<LinearForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut LinearForward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        if product::takes_epilogue(self, op.p.profile, op.p.k) {
            let bias = op.bias.map(|bias| (DevicePointer::from(bias), 0));
            let epilogue = Epilogue { bias, low: op.adapter.map(low_rank) };
            return product::forward(self, op.y, op.x, op.w, &op.p, epilogue, workspace);
        }
        product::forward(self, op.y, op.x, op.w, &op.p, Epilogue::default(), workspace);
        if let Some(bias) = op.bias {
            bias::forward(self, op.y, bias);
        }
        if let Some(LowRankTerm { u, factor, p }) = &op.adapter {
            low_rank::expand(self, op.y, u, factor, p, workspace);
        }
    }
}

impl Run<LinearGradInput<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut LinearGradInput<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        if product::takes_epilogue(self, op.p.profile, op.p.n) {
            let epilogue = Epilogue { bias: None, low: op.adapter.map(low_rank) };
            return product::grad_input(self, op.dx, op.dy, op.w, &op.p, epilogue, workspace);
        }
        product::grad_input(self, op.dx, op.dy, op.w, &op.p, Epilogue::default(), workspace);
        if let Some(LowRankTerm { u, factor, p }) = &op.adapter {
            low_rank::expand(self, op.dx, u, factor, p, workspace);
        }
    }
}

/// An adapter as an epilogue.
fn low_rank(LowRankTerm { u, factor, p }: LowRankTerm<GpuMemory>) -> LowRank {
    let (rank_step, width_step) = low_rank::steps(&p);
    let [u, factor] = [u, factor].map(|buffer| (DevicePointer::from(buffer), 0));
    LowRank { u, factor, rank: dimension(p.rank), rank_step, width_step, alpha: p.alpha }
}
