//! Combine, the definition (`docs/numerics.md`, "Combine").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{CombineBackward, CombineForward};
use isobit_numerics::fma::fma;
use isobit_numerics::lanes::{LANES, for_lanes, tree_sum};

impl Run<CombineForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut CombineForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let CombineForward { y, rows, weights, places, p } = op;
        for t in 0..p.tokens {
            for c in 0..p.width {
                let y = &mut y[t * p.width + c];
                let mut acc = if p.accumulate { *y } else { 0.0 };
                for pair in t * p.slots..(t + 1) * p.slots {
                    let row = rows[places[pair] as usize * p.width + c];
                    acc = weights.map_or(acc + row, |weights| fma(weights[pair], row, acc));
                }
                *y = acc;
            }
        }
    }
}

impl Run<CombineBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut CombineBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let CombineBackward { drows, dweights, dy, rows, weights, places, p } = op;
        for t in 0..p.tokens {
            for pair in t * p.slots..(t + 1) * p.slots {
                let (from, at) = (t * p.width, places[pair] as usize * p.width);
                let mut acc = [0.0; LANES];
                for_lanes(&mut acc, p.width, |acc, c| fma(dy[from + c], rows[at + c], acc));
                dweights[pair] = tree_sum(acc);
                for c in 0..p.width {
                    drows[at + c] = weights[pair] * dy[from + c];
                }
            }
        }
    }
}
