//! Linear layers (`op/linear.rs`): one pass; bias and adapter are added when a block's last chunk
//! is written.

use super::{CpuMemory, product};
use crate::backend::Run;
use crate::op::{LinearForward, LinearGradInput, LowRankTerm};
use crate::{Buffer, Cpu};

impl Run<LinearForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut LinearForward<'_, CpuMemory>, workspace: &mut Buffer<u8>) {
        let low = op.adapter.as_ref().map(low);
        product::linear_forward(self, op.y, op.x, op.w, &op.p, op.bias.map(|bias| &bias[..]), low, workspace);
    }
}

impl Run<LinearGradInput<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut LinearGradInput<'_, CpuMemory>, workspace: &mut Buffer<u8>) {
        let low = op.adapter.as_ref().map(low);
        product::linear_grad_input(self, op.dx, op.dy, op.w, &op.p, low, workspace);
    }
}

fn low<'a>(adapter: &'a LowRankTerm<'a, CpuMemory>) -> product::Adapter<'a> {
    product::Adapter { u: adapter.u, factor: adapter.factor, p: &adapter.p }
}
