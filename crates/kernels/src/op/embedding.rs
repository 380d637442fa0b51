//! Embedding (`docs/numerics.md`, "Embedding"): rows of a table `[ids, width]`, one per token.
//!
//! Forward: `y[t] = table[id(t)]`, exact. Backward: `dtable[id]` is a chain of additions that
//! starts from what `dtable` holds and takes `dy[t]` for the tokens with that id in ascending `t`.
//! The chain ignores blocks and rows of data, so consecutive calls over consecutive tokens equal
//! one call. Rows whose id does not occur are not touched.

use crate::backend::{F32, Length, Memory, StoredMatrix, U32, Workspaces};
use crate::op::{Op, Output, lengths};

/// Panics unless a table of `length` elements has whole rows.
fn check_table(op: &'static str, length: usize, width: usize) {
    assert!(width == 0 || length.is_multiple_of(width), "{op}: whole rows of the table");
}

/// `y[t] = table[ids[t]]`.
pub struct EmbeddingForward<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub table: StoredMatrix<'a, M>,
    pub ids: &'a U32<M>,
    pub width: usize,
}

impl<M: Memory> Op<M> for EmbeddingForward<'_, M> {
    const NAME: &'static str = "embedding_forward";

    fn check(&self) {
        lengths(Self::NAME, &[("y", self.y.len(), self.ids.len() * self.width)]);
        check_table(Self::NAME, self.table.len(), self.width);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}

/// `dtable[ids[t]] += dy[t]`.
pub struct EmbeddingBackward<'a, M: Memory> {
    pub dtable: &'a mut F32<M>,
    pub dy: &'a F32<M>,
    pub ids: &'a U32<M>,
    pub width: usize,
}

impl<M: Memory> Op<M> for EmbeddingBackward<'_, M> {
    const NAME: &'static str = "embedding_backward";

    fn check(&self) {
        lengths(Self::NAME, &[("dy", self.dy.len(), self.ids.len() * self.width)]);
        check_table(Self::NAME, self.dtable.len(), self.width);
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.embedding(self.ids.len())
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dtable)]
    }
}
