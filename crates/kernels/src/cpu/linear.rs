//! Linear layers (`op/linear.rs`): one pass; bias and adapter are added when a block's last chunk
//! is written.

use super::product::{Adapter, Added};
use super::{CpuMemory, low_rank, product, slices};
use crate::backend::{Checked, Run};
use crate::op::{Contraction, LinearForward, LinearGradInput, LinearInput, LowRankGradient, LowRankTerm};
use crate::{Buffer, Cpu};

impl Run<LinearForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut LinearForward<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        let added = Added { bias: op.bias.map(|bias| &bias[..]), adapter: op.adapter.as_ref().map(adapter) };
        product::linear_forward(self, op.y, op.x, op.w, &op.p, added, workspace);
    }
}

impl Run<LinearInput<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut LinearInput<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        slices::slice_rows(self, op.rows, op.x);
        for Contraction { u, factor, p } in &mut op.parts {
            low_rank::contract(self, u, op.x, factor, p, workspace);
        }
    }
}

impl Run<LinearGradInput<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut LinearGradInput<'_, CpuMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        if let Some(Contraction { u, factor, p }) = op.adapter.as_mut().map(LowRankGradient::contraction) {
            low_rank::contract(self, u, op.dy, factor, &p, workspace);
        }
        let term = op.adapter.as_ref().map(LowRankGradient::term);
        let adapter = term.as_ref().map(adapter);
        product::linear_grad_input(self, op.dx, op.dy, op.w, &op.p, adapter, workspace);
    }
}

fn adapter<'a>(adapter: &'a LowRankTerm<'a, CpuMemory>) -> Adapter<'a> {
    Adapter { u: adapter.u, factor: adapter.factor, p: &adapter.p }
}
