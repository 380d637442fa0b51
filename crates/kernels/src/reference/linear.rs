//! Linear layers, the definition (`op/linear.rs`): a layer's component ops in sequence.

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::Run;
use crate::op::{
    BiasForward, LinearForward, LinearGradInput, LowRankExpand, LowRankTerm, ProductForward, ProductGradInput,
};

impl Run<LinearForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut LinearForward<'_, ReferenceMemory>, workspace: &mut Buffer<u8>) {
        self.execute(&mut ProductForward { y: op.y, x: op.x, w: op.w, p: op.p }, workspace);
        if let Some(bias) = op.bias {
            self.execute(&mut BiasForward { y: op.y, bias }, workspace);
        }
        if let Some(LowRankTerm { u, factor, p }) = op.adapter {
            self.execute(&mut LowRankExpand { y: op.y, u, factor, p }, workspace);
        }
    }
}

impl Run<LinearGradInput<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut LinearGradInput<'_, ReferenceMemory>, workspace: &mut Buffer<u8>) {
        self.execute(&mut ProductGradInput { dx: op.dx, dy: op.dy, w: op.w, p: op.p }, workspace);
        if let Some(LowRankTerm { u, factor, p }) = op.adapter {
            self.execute(&mut LowRankExpand { y: op.dx, u, factor, p }, workspace);
        }
    }
}
