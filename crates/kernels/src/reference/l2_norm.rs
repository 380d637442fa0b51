//! L2 norm, the definition (`docs/numerics.md`, "L2 norm").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{L2NormBackward, L2NormForward};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::rsqrt;
use isobit_numerics::fma::fma;
use isobit_numerics::lanes::{LANES, dot, for_lanes, tree_sum};

impl Run<L2NormForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut L2NormForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let L2NormForward { y, inverse, x, p } = op;
        for t in 0..p.tokens {
            let x = &x[t * p.width..][..p.width];
            inverse[t] = rsqrt(dot::<SoftFma>(x, x) + p.eps);
            for c in 0..p.width {
                y[t * p.width + c] = (x[c] * inverse[t]) * p.factor;
            }
        }
    }
}

impl Run<L2NormBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut L2NormBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let L2NormBackward { dx, dy, x, inverse, p } = op;
        for t in 0..p.tokens {
            let at = t * p.width;
            let normal = |c: usize| x[at + c] * inverse[t];
            let grad = |c: usize| dy[at + c] * p.factor;
            let mut acc = [0.0; LANES];
            for_lanes(&mut acc, p.width, |acc, c| fma(grad(c), normal(c), acc));
            let sum = tree_sum(acc);
            for c in 0..p.width {
                dx[at + c] = fma(-normal(c), sum, grad(c)) * inverse[t];
            }
        }
    }
}
