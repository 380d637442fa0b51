//! Linear layers, the definition (`op/linear.rs`): a layer's component ops in sequence.

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Device, Run};
use crate::op::{
    BiasForward, LinearForward, LinearGradInput, LowRankExpand, LowRankTerm, ProductForward, ProductGradInput,
};

impl Run<LinearForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut LinearForward<'_, ReferenceMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        self.run_in(workspace, ProductForward { y: op.y, x: op.x, w: op.w, p: op.p });
        if let Some(bias) = op.bias {
            self.run_in(workspace, BiasForward { y: op.y, bias });
        }
        if let Some(LowRankTerm { u, factor, p }) = op.adapter {
            self.run_in(workspace, LowRankExpand { y: op.y, u, factor, p });
        }
    }
}

impl Run<LinearGradInput<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut LinearGradInput<'_, ReferenceMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        self.run_in(workspace, ProductGradInput { dx: op.dx, dy: op.dy, w: op.w, p: op.p });
        if let Some(LowRankTerm { u, factor, p }) = op.adapter {
            self.run_in(workspace, LowRankExpand { y: op.dx, u, factor, p });
        }
    }
}
