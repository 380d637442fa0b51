//! Groups the pairs of a router by expert, the definition (`docs/numerics.md`, "Grouped rows").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::GroupRows;
use crate::op::router::{expert_counts, grouped};

impl Run<GroupRows<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut GroupRows<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let GroupRows { tokens, places, counts, indices, row_starts, slots, experts } = op;
        let grouped = grouped(indices, *slots, *experts);
        tokens.copy_from_slice(&grouped.tokens);
        places.copy_from_slice(&grouped.places);
        counts.copy_from_slice(&expert_counts(indices, *slots, *experts, row_starts));
    }
}
