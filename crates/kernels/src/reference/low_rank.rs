//! Low-rank products, the definition (`docs/numerics.md`, "Low-rank products").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{Contraction, LowRankContract, LowRankExpand, LowRankOuter, OuterProduct};
use isobit_numerics::fma::fma;
use isobit_numerics::lanes::{LANES, for_lanes, tree_sum};

impl Run<LowRankContract<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut LowRankContract<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        for Contraction { u, factor, p } in &mut op.parts {
            for (segment, factor) in p.segments.windows(2).zip(factor.chunks_exact(p.factor_length())) {
                for t in segment[0]..segment[1] {
                    for j in 0..p.rank {
                        let mut acc = [0.0; LANES];
                        for_lanes(&mut acc, p.width, |acc, l| fma(op.x[t * p.width + l], factor[p.at(j, l)], acc));
                        u[t * p.rank + j] = tree_sum(acc);
                    }
                }
            }
        }
    }
}

impl Run<LowRankExpand<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut LowRankExpand<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let LowRankExpand { y, u, factor, p } = op;
        for (segment, factor) in p.segments.windows(2).zip(factor.chunks_exact(p.factor_length())) {
            for t in segment[0]..segment[1] {
                for l in 0..p.width {
                    let mut acc = 0.0;
                    for j in 0..p.rank {
                        acc = fma(u[t * p.rank + j], factor[p.at(j, l)], acc);
                    }
                    let y = &mut y[t * p.width + l];
                    *y = fma(p.alpha, acc, *y);
                }
            }
        }
    }
}

impl Run<LowRankOuter<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut LowRankOuter<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        for part in &mut op.parts {
            outer(part, op.row_starts);
        }
    }
}

fn outer(OuterProduct { dfactor, u, x, p }: &mut OuterProduct<ReferenceMemory>, row_starts: &[usize]) {
    for (e, block) in p.blocks(row_starts) {
        for j in 0..p.rank {
            for l in 0..p.width {
                let mut acc = 0.0;
                for t in block.clone() {
                    acc = fma(p.alpha * u[t * p.rank + j], x[t * p.width + l], acc);
                }
                dfactor[e * p.factor_length() + p.at(j, l)] += acc;
            }
        }
    }
}
