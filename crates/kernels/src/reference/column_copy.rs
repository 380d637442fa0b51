//! Column copies, the definition (`docs/numerics.md`, "Column copies").

use crate::op::{ColumnMode, Columns};

pub(super) fn apply(y: &mut [f32], x: &[f32], p: &Columns) {
    p.check(y.len(), x.len());
    for t in 0..p.tokens {
        for g in 0..p.groups {
            for j in 0..p.width {
                let value = x[t * p.from.row + p.from.offset + g * p.from.stride + j];
                let target = &mut y[t * p.to.row + p.to.offset + g * p.to.stride + j];
                let first = g == 0 || !p.gathers();
                *target = if first && p.mode == ColumnMode::Overwrite { value } else { *target + value };
            }
        }
    }
}
