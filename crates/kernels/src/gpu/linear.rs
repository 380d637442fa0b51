//! Linear layers on a GPU: with tensor cores, bias and adapter are added in the epilogue of the
//! product, and adapters are contracted by the pass that slices; otherwise they are separate ops.
//! The bits are the same.

use super::device::{Gpu, dimension};
use super::hopper::{Epilogue, LowRank};
use super::memory::{DevicePointer, GpuBuffer};
use super::runtime::Argument;
use super::slices::{self, FactoredRows, SlicePlaces};
use super::{GpuMemory, bias, low_rank, low_rank_contract, product};
use crate::backend::{Checked, Run};
use crate::op::{FactorLayout, LinearForward, LinearGradInput, LinearInput, LowRankGradient, LowRankTerm, SliceShape};
use std::slice;

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

impl Run<LinearInput<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut LinearInput<'_, GpuMemory>, _: &mut GpuBuffer<u8>, _: Checked) {
        let SliceShape { rows, width, profile } = op.rows.shape;
        if low_rank_contract::serves_slicing(self, &op.parts, FactorLayout::RankMajor) {
            let from = FactoredRows { x: Argument::from(op.x), factors: None, rows, width, stride: width };
            let places = SlicePlaces::from(&*op.rows);
            return low_rank_contract::slice_and_contract(self, places, &from, &op.parts, profile);
        }
        slices::slice_rows(self, op.rows, op.x);
        low_rank::contract(self, &mut op.parts, op.x);
    }
}

impl Run<LinearGradInput<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut LinearGradInput<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        let in_epilogue = product::takes_epilogue(self, op.p.profile, op.p.n);
        let low = op.adapter.as_ref().filter(|_| in_epilogue).map(|adapter| low_rank(adapter.term()));
        let mut part = op.adapter.as_mut().map(LowRankGradient::contraction);
        let together = part.as_ref().is_some_and(|part| product::contracts_gradients(self, op.w, &op.p, part));
        if let (Some(part), false) = (&mut part, together) {
            low_rank::contract(self, slice::from_mut(part), op.dy);
        }
        let contraction = part.as_ref().filter(|_| together);
        let terms = product::GradientTerms { contraction, epilogue: Epilogue { bias: None, low } };
        product::grad_input(self, op.dx, op.dy, op.w, &op.p, &terms, workspace);
        if let (Some(adapter), false) = (&op.adapter, in_epilogue) {
            let LowRankTerm { u, factor, p } = adapter.term();
            low_rank::expand(self, op.dx, u, factor, &p, workspace);
        }
    }
}

/// An adapter as an epilogue.
fn low_rank(LowRankTerm { u, factor, p }: LowRankTerm<GpuMemory>) -> LowRank {
    let (rank_step, width_step) = low_rank::steps(&p);
    let [u, factor] = [u, factor].map(|buffer| (DevicePointer::from(buffer), 0));
    LowRank { u, factor, rank: dimension(p.rank), rank_step, width_step, alpha: p.alpha }
}
