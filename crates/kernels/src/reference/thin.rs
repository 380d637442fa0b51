//! Thin products, the definition (`docs/numerics.md`, "Thin products").

use crate::op::Thin;
use isobit_numerics::fma::fma;
use isobit_numerics::lanes::{LANES, for_lanes, tree_sum};

pub(super) fn workspace(_p: &Thin) -> usize {
    0
}

pub(super) fn contract(u: &mut [f32], x: &[f32], factor: &[f32], p: &Thin, _workspace: &mut [u8]) {
    for (segment, factor) in p.segments.windows(2).zip(factor.chunks_exact(p.factor_length())) {
        for t in segment[0]..segment[1] {
            for j in 0..p.rank {
                let mut acc = [0.0; LANES];
                for_lanes(&mut acc, p.width, |acc, l| fma(x[t * p.width + l], factor[p.at(j, l)], acc));
                u[t * p.rank + j] = tree_sum(acc);
            }
        }
    }
}

pub(super) fn expand(y: &mut [f32], u: &[f32], factor: &[f32], p: &Thin, _workspace: &mut [u8]) {
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

pub(super) fn outer(dfactor: &mut [f32], u: &[f32], x: &[f32], p: &Thin, row_starts: &[usize]) {
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
