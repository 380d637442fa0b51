//! Linear layers, the definition (`op/linear.rs`): a layer's component ops in sequence.

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Device, Run};
use crate::op::{
    BiasForward, Contraction, LinearForward, LinearGradInput, LinearInput, LowRankContract, LowRankExpand, LowRankTerm,
    ProductForward, ProductGradInput, SliceRows,
};

impl Run<LinearInput<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut LinearInput<'_, ReferenceMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        self.run_in(workspace, SliceRows { rows: op.rows, x: op.x });
        for Contraction { u, factor, p } in &mut op.parts {
            self.run_in(workspace, LowRankContract::one(&mut **u, op.x, *factor, *p));
        }
    }
}

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
        if let Some(adapter) = &mut op.adapter {
            let Contraction { u, factor, p } = adapter.contraction();
            self.run_in(workspace, LowRankContract::one(u, op.dy, factor, p));
        }
        self.run_in(workspace, ProductGradInput { dx: op.dx, dy: op.dy, w: op.w, p: op.p });
        if let Some(adapter) = &op.adapter {
            let LowRankTerm { u, factor, p } = adapter.term();
            self.run_in(workspace, LowRankExpand { y: op.dx, u, factor, p });
        }
    }
}
