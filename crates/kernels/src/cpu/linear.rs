//! Linear layers (`op/linear.rs`): one pass; bias and adapter are added when a block's last chunk
//! is written.

use super::product::{Adapter, Added};
use super::{CpuMemory, product};
use crate::backend::{Checked, Run};
use crate::op::{LinearForward, LinearGradInput, LowRankTerm};
use crate::{Buffer, Cpu};

impl Run<LinearForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut LinearForward<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        let added = Added { bias: op.bias.map(|bias| &bias[..]), adapter: op.adapter.as_ref().map(adapter) };
        product::linear_forward(self, op.y, op.x, op.w, &op.p, added, workspace);
    }
}

impl Run<LinearGradInput<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut LinearGradInput<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        let adapter = op.adapter.as_ref().map(adapter);
        product::linear_grad_input(self, op.dx, op.dy, op.w, &op.p, adapter, workspace);
    }
}

fn adapter<'a>(adapter: &'a LowRankTerm<'a, CpuMemory>) -> Adapter<'a> {
    Adapter { u: adapter.u, factor: adapter.factor, p: &adapter.p }
}
