//! Column copies, the definition (`docs/numerics.md`, "Column copies").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{ColumnMode, CopyColumns};

impl Run<CopyColumns<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut CopyColumns<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let CopyColumns { y, x, p } = op;
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
}
