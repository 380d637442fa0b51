//! Router of a mixture of experts (`docs/numerics.md`, "Router"): which experts a token goes to,
//! and with what weight.
//!
//! Choosing and weighting are separate ops because recomputation computes weights for the expert
//! indices that the forward pass kept. A token's results depend on its own logits alone. `grouped`
//! sorts the (token, slot) pairs by expert: the definition of the op in `grouping.rs`.
//!
//! - choose: the score is the logit, or `sigmoid(logit) + bias`; larger scores first, smaller index
//!   first among equals, NaN last. Before that, groups of experts are selected by the sum of their
//!   two best scores.
//! - weights: a softmax over the chosen logits, or over all; or sigmoids, optionally divided by
//!   their sum + 1e-20. Sums over slots are chains, the sum over all experts is a lane sum. The
//!   result is multiplied by `scale`.
//! - backward: with `g = dw·scale` and `M` the chain of `fma(g, q, ·)`, `dz = q·(g − M)`, times
//!   `sigmoid(−z)` for sigmoids.

use crate::backend::{F32, Length, Memory, U32};
use crate::op::{Op, Output, lengths};

/// Largest number of experts, of chosen ones, and of groups.
pub const EXPERTS_MAX: usize = 1024;
pub const CHOSEN_MAX: usize = 64;
pub const GROUPS_MAX: usize = 32;

/// Added to the sum of the chosen scores before a sigmoid router divides by it.
pub const SUM_FLOOR: f32 = 1e-20;

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Probabilities over all experts. They are ordered like the logits, so logits are compared.
    Softmax,
    /// Each expert independently; the bias is added for choosing, not for weights.
    Sigmoid,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    pub tokens: usize,
    pub experts: usize,
    /// Experts per token.
    pub chosen: usize,
    pub scoring: Scoring,
    /// Divide the chosen scores by their sum.
    pub renormalise: bool,
    /// Factor applied to all weights.
    pub scale: f32,
    /// Groups of consecutive experts, of which each token keeps some before choosing; 1 for no
    /// grouping.
    pub groups: usize,
    pub kept_groups: usize,
}

impl Router {
    /// Experts per group.
    pub fn group_size(&self) -> usize {
        self.experts / self.groups
    }

    /// Panics unless the parameters are consistent.
    pub fn check(&self) {
        let Self { experts, chosen, groups, kept_groups, .. } = *self;
        assert!((1..=EXPERTS_MAX).contains(&experts), "{experts} experts are outside 1..={EXPERTS_MAX}");
        assert!((1..=GROUPS_MAX).contains(&groups), "{groups} groups are outside 1..={GROUPS_MAX}");
        assert!(experts.is_multiple_of(groups), "{groups} groups do not divide {experts} experts");
        assert!((1..=groups).contains(&kept_groups), "{kept_groups} of {groups} groups kept");
        let most = CHOSEN_MAX.min(kept_groups * self.group_size());
        assert!((1..=most).contains(&chosen), "{chosen} chosen experts are outside 1..={most}");
    }
}

/// The pairs (token, slot) of some expert indices, in ascending (expert, token, slot): the rows of
/// the experts' matrices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grouped {
    /// First row of each expert, then the number of rows.
    pub segments: Vec<usize>,
    /// The token of each row: what `gather_rows` reads.
    pub tokens: Vec<u32>,
    /// The row of each pair, `[tokens, slots]`: what `combine` reads.
    pub places: Vec<u32>,
}

/// Groups the pairs of `expert_indices[tokens, slots]` by expert: a stable counting sort, which
/// keeps the order of (token, slot).
pub fn grouped(expert_indices: &[u32], slots: usize, experts: usize) -> Grouped {
    assert!(expert_indices.len().is_multiple_of(slots), "expert indices of whole tokens");
    assert!(u32::try_from(expert_indices.len()).is_ok(), "rows are counted in 32 bits");
    let mut segments = vec![0; experts + 1];
    for &expert in expert_indices {
        segments[expert as usize + 1] += 1;
    }
    for expert in 0..experts {
        segments[expert + 1] += segments[expert];
    }
    let mut next = segments.clone();
    let (mut tokens, mut places) = (vec![0; expert_indices.len()], vec![0; expert_indices.len()]);
    for (pair, &expert) in expert_indices.iter().enumerate() {
        let row = next[expert as usize];
        next[expert as usize] += 1;
        tokens[row] = (pair / slots) as u32;
        places[pair] = row as u32;
    }
    Grouped { segments, tokens, places }
}

impl Grouped {
    /// Rows of each expert.
    pub fn counts(&self) -> Vec<usize> {
        self.segments.windows(2).map(|segment| segment[1] - segment[0]).collect()
    }

    /// Where rows of data start among the grouped rows, given where they start among the tokens:
    /// inside each expert's segment, the rows whose token belongs to a different row of data than
    /// the previous one, and the segment boundaries. Sums over tokens use them.
    pub fn row_starts(&self, row_starts: &[usize]) -> Vec<usize> {
        let mut starts = vec![0];
        for segment in self.segments.windows(2) {
            let mut data_row = 0;
            for row in segment[0]..segment[1] {
                let token = self.tokens[row] as usize;
                let before = data_row;
                while row_starts[data_row + 1] <= token {
                    data_row += 1;
                }
                if row > segment[0] && data_row != before {
                    starts.push(row);
                }
            }
            if segment[1] > segment[0] {
                starts.push(segment[1]);
            }
        }
        starts
    }
}

/// Number of pairs per row of data and expert, `[rows, experts]`: integers, so any split of the
/// rows gives the same result.
pub fn expert_counts(expert_indices: &[u32], slots: usize, experts: usize, row_starts: &[usize]) -> Vec<u32> {
    let mut counts = vec![0; (row_starts.len() - 1) * experts];
    for (row, range) in row_starts.windows(2).enumerate() {
        for &expert in &expert_indices[range[0] * slots..range[1] * slots] {
            counts[row * experts + expert as usize] += 1;
        }
    }
    counts
}

/// The experts of each token.
pub struct RouterChoose<'a, M: Memory> {
    pub indices: &'a mut U32<M>,
    pub logits: &'a F32<M>,
    pub bias: Option<&'a F32<M>>,
    pub p: Router,
}

impl<M: Memory> Op<M> for RouterChoose<'_, M> {
    const NAME: &'static str = "router_choose";

    fn check(&self) {
        let p = &self.p;
        p.check();
        let (logits, slots) = (p.tokens * p.experts, p.tokens * p.chosen);
        lengths(Self::NAME, &[("indices", self.indices.len(), slots), ("logits", self.logits.len(), logits)]);
        assert!(self.bias.is_none() || p.scoring == Scoring::Sigmoid, "only sigmoid scores have a bias");
        if let Some(bias) = self.bias {
            lengths(Self::NAME, &[("bias", bias.len(), p.experts)]);
        }
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::U32(self.indices)]
    }
}

/// The weights of the chosen experts.
pub struct RouterWeights<'a, M: Memory> {
    pub weights: &'a mut F32<M>,
    pub logits: &'a F32<M>,
    pub indices: &'a U32<M>,
    pub p: Router,
}

impl<M: Memory> Op<M> for RouterWeights<'_, M> {
    const NAME: &'static str = "router_weights";

    fn check(&self) {
        let p = &self.p;
        p.check();
        let (logits, slots) = (p.tokens * p.experts, p.tokens * p.chosen);
        lengths(
            Self::NAME,
            &[
                ("weights", self.weights.len(), slots),
                ("logits", self.logits.len(), logits),
                ("indices", self.indices.len(), slots),
            ],
        );
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.weights)]
    }
}

/// Gradient of the logits.
pub struct RouterBackward<'a, M: Memory> {
    pub dlogits: &'a mut F32<M>,
    pub dweights: &'a F32<M>,
    pub logits: &'a F32<M>,
    pub indices: &'a U32<M>,
    pub p: Router,
}

impl<M: Memory> Op<M> for RouterBackward<'_, M> {
    const NAME: &'static str = "router_backward";

    fn check(&self) {
        let p = &self.p;
        p.check();
        let (logits, slots) = (p.tokens * p.experts, p.tokens * p.chosen);
        lengths(
            Self::NAME,
            &[
                ("dlogits", self.dlogits.len(), logits),
                ("dweights", self.dweights.len(), slots),
                ("logits", self.logits.len(), logits),
                ("indices", self.indices.len(), slots),
            ],
        );
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dlogits)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows of data (tokens 0..3 and 3..5), two slots, four experts of which one is never
    /// chosen.
    const CHOICES: [u32; 10] = [3, 0, 0, 1, 3, 1, 1, 0, 0, 3];

    #[test]
    fn pairs_are_in_the_order_of_experts() {
        let grouped = grouped(&CHOICES, 2, 4);
        assert_eq!(grouped.segments, [0, 4, 7, 7, 10]);
        assert_eq!(grouped.counts(), [4, 3, 0, 3]);
        assert_eq!(grouped.tokens, [0, 1, 3, 4, 1, 2, 3, 0, 2, 4]);
        assert_eq!(grouped.places, [7, 0, 1, 4, 8, 5, 6, 2, 3, 9]);
    }

    #[test]
    fn rows_of_data_start_inside_segments() {
        let grouped = grouped(&CHOICES, 2, 4);
        assert_eq!(grouped.row_starts(&[0, 3, 5]), [0, 2, 4, 6, 7, 9, 10]);
        // Empty rows of data, also at the ends, change nothing.
        assert_eq!(grouped.row_starts(&[0, 0, 3, 3, 5, 5]), grouped.row_starts(&[0, 3, 5]));
        // One row: only the segment boundaries.
        assert_eq!(grouped.row_starts(&[0, 5]), [0, 4, 7, 10]);
        let none = super::grouped(&[], 2, 4);
        assert_eq!((none.segments.clone(), none.row_starts(&[0, 0])), (vec![0; 5], vec![0]));
    }

    /// A stable sort by expert is the definition.
    #[test]
    fn counting_sort_equals_a_stable_sort() {
        let (tokens, slots, experts) = (257, 3, 19);
        let expert_indices: Vec<u32> =
            (0..tokens * slots).map(|pair| (pair as u32).wrapping_mul(0x9e37_79b9) >> 7).map(|x| x % experts).collect();
        let grouped = grouped(&expert_indices, slots, experts as usize);
        let mut order: Vec<usize> = (0..expert_indices.len()).collect();
        order.sort_by_key(|&pair| expert_indices[pair]);
        for (row, pair) in order.into_iter().enumerate() {
            assert_eq!((grouped.places[pair] as usize, grouped.tokens[row] as usize), (row, pair / slots));
            let segment = &grouped.segments[expert_indices[pair] as usize..][..2];
            assert!((segment[0]..segment[1]).contains(&row));
        }
    }

    #[test]
    fn counts_of_rows_add_up() {
        let counts = expert_counts(&CHOICES, 2, 4, &[0, 3, 3, 5]);
        assert_eq!(counts, [2, 2, 0, 2, 0, 0, 0, 0, 2, 1, 0, 1]);
    }
}
