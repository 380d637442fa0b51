//! Groups the pairs (token, slot) of a router's expert indices by expert (`docs/numerics.md`,
//! "Grouped rows"): a stable counting sort, so pairs of one expert keep their order.
//!
//! Everything is an integer. The sort stays on the device; the host needs only the counts, from
//! which [`GroupSizes`] has where the rows of each expert begin.

use super::router::EXPERTS_MAX;
use crate::backend::{Length, Memory, U32, Workspaces};
use crate::op::{Op, Output, end, lengths};

/// The pairs of `indices[tokens, slots]` in ascending (expert, token, slot).
pub struct GroupRows<'a, M: Memory> {
    /// The token of each row: what `gather_rows` reads.
    pub tokens: &'a mut U32<M>,
    /// The row of each pair, `[tokens, slots]`: what `combine` reads.
    pub places: &'a mut U32<M>,
    /// Pairs of each row of data and expert, `[rows, experts]`.
    pub counts: &'a mut U32<M>,
    pub indices: &'a U32<M>,
    /// Where rows of data start among the tokens, ending with their number.
    pub row_starts: &'a [usize],
    pub slots: usize,
    pub experts: usize,
}

impl<M: Memory> Op<M> for GroupRows<'_, M> {
    const NAME: &'static str = "group_rows";

    fn check(&self) {
        let Self { slots, experts, .. } = *self;
        assert!((1..=EXPERTS_MAX).contains(&experts), "{experts} experts are outside 1..={EXPERTS_MAX}");
        let pairs = end(self.row_starts) * slots;
        assert!(u32::try_from(pairs).is_ok(), "rows are counted in 32 bits");
        let counts = (self.row_starts.len() - 1) * experts;
        lengths(
            Self::NAME,
            &[
                ("tokens", self.tokens.len(), pairs),
                ("places", self.places.len(), pairs),
                ("counts", self.counts.len(), counts),
                ("indices", self.indices.len(), pairs),
            ],
        );
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.grouping(self.row_starts, self.experts)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::U32(self.tokens), Output::U32(self.places), Output::U32(self.counts)]
    }
}

/// Where the grouped rows of experts begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSizes {
    /// First row of each expert, then the number of rows.
    pub segments: Vec<usize>,
    /// Where rows of data start among the grouped rows: inside each expert's segment where the row
    /// of data changes, and at the segment's borders. Sums over tokens use them.
    pub row_starts: Vec<usize>,
}

impl GroupSizes {
    /// From the counts `[rows, experts]`.
    pub fn new(counts: &[u32], experts: usize) -> Self {
        let (mut segments, mut row_starts, mut next) = (vec![0], vec![0], 0);
        for expert in 0..experts {
            for row in counts.chunks_exact(experts).filter(|row| row[expert] > 0) {
                next += row[expert] as usize;
                row_starts.push(next);
            }
            segments.push(next);
        }
        Self { segments, row_starts }
    }

    /// Rows of each expert.
    pub fn counts(&self) -> Vec<usize> {
        self.segments.windows(2).map(|segment| segment[1] - segment[0]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::router::{expert_counts, grouped};

    #[test]
    fn sizes_follow_from_the_counts() {
        // Two rows of data (tokens 0..3 and 3..5), two slots, four experts of which one is never
        // chosen.
        let indices = [3, 0, 0, 1, 3, 1, 1, 0, 0, 3];
        let grouped = grouped(&indices, 2, 4);
        for row_starts in [&[0, 3, 5][..], &[0, 0, 3, 3, 5, 5], &[0, 5], &[0, 1, 2, 3, 4, 5]] {
            let sizes = GroupSizes::new(&expert_counts(&indices, 2, 4, row_starts), 4);
            assert_eq!((&sizes.segments, sizes.counts()), (&grouped.segments, grouped.counts()));
            assert_eq!(sizes.row_starts, grouped.row_starts(row_starts), "{row_starts:?}");
        }
        assert_eq!(GroupSizes::new(&[0; 4], 4), GroupSizes { segments: vec![0; 5], row_starts: vec![0] });
    }
}
