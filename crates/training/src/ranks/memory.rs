//! Memory of a rank, for plans: what `update.rs` and `sharded.rs` hold on the host, in the order in
//! which they hold it, beside the device's buffers at that time.
//!
//! BOUND: when messages arrive and leave is up to the other ranks. The worst case is counted: all
//! others are done before this rank has computed its last group, and nobody takes what it sends.

use super::shards::pieces_of;
use super::update::groups_of;
use crate::engine::{Engine, Stored};
use crate::groups::{Groups, middle};
use crate::step::{StepError, StepSettings};
use isobit_kernels::Device;
use isobit_kernels::plan::{CountedBuffer, Counting, MemoryLayout};
use std::cmp::Reverse;
use std::ops::Range;

/// A rank among those that share the groups of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub rank: usize,
    pub ranks: usize,
    pub groups: Groups,
    /// Whether ranks hold the optimizer in shards.
    pub is_sharded: bool,
    /// With shards, which of its nodes the rank computes: it has sent those before it.
    pub node: usize,
}

/// What one rank does with a node of the tree, if it does not send shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Visited {
    /// Own gradients that exist at once.
    at_once: usize,
    /// Gradients that come from other ranks.
    arriving: usize,
    /// Gradients that go to other ranks.
    leaving: usize,
    /// Whether its sum ends here.
    is_here: bool,
}

impl Visited {
    /// Gradients that have left when the last group is computed: the last to leave follows it.
    fn sent_before(self) -> usize {
        self.leaving.saturating_sub(usize::from(!self.is_here))
    }
}

impl Place {
    /// The rank that needs the most memory is one of these, at one of these nodes: the first rank,
    /// which saves, the one that holds most while it computes, or the one with the most gradients
    /// on its device. `among` names the ranks in question; all if there is none.
    pub fn most_demanding(self, among: &[usize]) -> Vec<Self> {
        let all: Vec<usize> = if among.is_empty() { (0..self.ranks).collect() } else { among.to_vec() };
        let places: Vec<Self> = all.iter().flat_map(|rank| Self { rank: *rank, ..self }.at_nodes()).collect();
        // Of equal ones the first rank, and its last node: what it has sent stays after that.
        let most = |demand: fn(Self) -> usize| {
            places.iter().copied().max_by_key(|place| (demand(*place), Reverse(place.rank), place.node))
        };
        let mut chosen: Vec<Self> = places.first().copied().into_iter().collect();
        chosen.extend(most(Self::held));
        chosen.extend(most(Self::gradients_at_once));
        chosen.sort_unstable_by_key(|place| (place.rank, place.node));
        chosen.dedup();
        chosen
    }

    /// This rank at each of its nodes.
    fn at_nodes(self) -> impl Iterator<Item = Self> {
        let nodes = if self.is_sharded { self.nodes().len().max(1) } else { 1 };
        (0..nodes).map(move |node| Self { node, ..self })
    }

    /// What it holds while it computes its last group, counted in shards of a gradient, or in whole
    /// gradients where there are no shards.
    fn held(self) -> usize {
        if self.is_sharded {
            return self.ranks * (self.gradients_at_once() + self.node) + self.nodes_of_others();
        }
        let visited = self.visited();
        self.gradients_at_once() + visited.arriving + visited.sent_before()
    }

    pub fn is_first(self) -> bool {
        self.rank == 0
    }

    /// The largest of this rank's groups; at least a row, since a plan has to compute one.
    pub fn group_rows(self) -> usize {
        let own = groups_of(self.rank, self.ranks, self.groups.groups);
        own.map(|group| self.groups.rows_of(group).len()).max().unwrap_or(0).max(1)
    }

    /// Most gradients of its own that exist on this rank at once; with shards, for one node.
    pub fn gradients_at_once(self) -> usize {
        let most = if self.is_sharded {
            self.nodes().get(self.node).map_or(0, |node| self.groups.gradients_of_node(node.clone()))
        } else {
            self.visited().at_once
        };
        most.max(1)
    }

    /// The largest nodes of the tree whose groups are all this rank's. Those without rows are left
    /// out.
    fn nodes(self) -> Vec<Range<usize>> {
        fn visit(place: &Place, node: Range<usize>, own: &Range<usize>, all: &mut Vec<Range<usize>>) {
            if node.end <= own.start || own.end <= node.start || place.groups.is_empty(&node) {
                return;
            }
            match middle(&node).filter(|_| node.start < own.start || own.end < node.end) {
                Some(middle) => {
                    visit(place, node.start..middle, own, all);
                    visit(place, middle..node.end, own, all);
                }
                None => all.push(node),
            }
        }
        let (own, mut all) = (groups_of(self.rank, self.ranks, self.groups.groups), Vec::new());
        visit(&self, 0..self.groups.groups, &own, &mut all);
        all
    }

    /// Nodes of all other ranks: each sends this one its part.
    fn nodes_of_others(self) -> usize {
        let others = (0..self.ranks).filter(|rank| *rank != self.rank);
        others.map(|rank| Self { rank, ..self }.nodes().len()).sum()
    }

    /// The tree as this rank goes through it.
    fn visited(self) -> Visited {
        let own = groups_of(self.rank, self.ranks, self.groups.groups);
        self.visit(0..self.groups.groups, &own)
    }

    fn visit(&self, node: Range<usize>, own: &Range<usize>) -> Visited {
        if node.end <= own.start || own.end <= node.start || self.groups.is_empty(&node) {
            return Visited::default();
        }
        let Some(middle) = middle(&node) else {
            return Visited { at_once: 1, is_here: true, ..Visited::default() };
        };
        let halves = [node.start..middle, middle..node.end];
        let [has_left, has_right] = [&halves[0], &halves[1]].map(|half| !self.groups.is_empty(half));
        let [left, right] = halves.map(|half| self.visit(half, own));
        let at_once = left.at_once.max(usize::from(left.is_here) + right.at_once);
        let arrives = left.is_here && has_right && !right.is_here;
        let leaves = has_left && !left.is_here && right.is_here;
        Visited {
            at_once,
            arriving: left.arriving + right.arriving + usize::from(arrives),
            leaving: left.leaving + right.leaving + usize::from(leaves),
            is_here: if has_left { left.is_here } else { right.is_here },
        }
    }

    /// Ranks whose broadcasts this one passes on.
    fn passed_on(self) -> usize {
        let passes = |root: &usize| {
            let place = (self.rank + self.ranks - root) % self.ranks;
            place > 0 && place.is_multiple_of(2) && place + 1 < self.ranks
        };
        (0..self.ranks).filter(passes).count()
    }
}

/// Bytes that a rank holds and moves in an update.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchange {
    place: Place,
    /// Of the values of all tensors.
    values: usize,
    /// Of a gradient before the two parts of a tied table are added.
    gradient: usize,
    /// This rank's part of them.
    values_part: usize,
    gradient_part: usize,
    /// Of the largest tensor in that.
    largest_piece: usize,
}

impl Exchange {
    /// For tensors of these `lengths`; if `is_tied`, the first is the tied table.
    pub(crate) fn new(place: Place, lengths: &[usize], is_tied: bool) -> Self {
        const EACH: usize = size_of::<f32>();
        let table = lengths.first().copied().filter(|_| is_tied).unwrap_or(0);
        let values = lengths.iter().sum::<usize>();
        let pieces = pieces_of(lengths, place.ranks, place.rank);
        let length = |of_table: bool| -> usize {
            let counted = pieces.iter().filter(|piece| !of_table || (is_tied && piece.tensor == 0));
            counted.map(|piece| piece.range.len()).sum()
        };
        let largest = pieces.iter().map(|piece| piece.range.len()).max().unwrap_or(0);
        Self {
            place,
            values: values * EACH,
            gradient: (values + table) * EACH,
            values_part: length(false) * EACH,
            gradient_part: (length(false) + length(true)) * EACH,
            largest_piece: largest * EACH,
        }
    }

    /// Values and moments of this rank's shard, which it always holds.
    pub(crate) fn shard<L: MemoryLayout>(&self, backend: &Counting<L>) -> CountedBuffer<u8> {
        backend.beside(self.shard_bytes())
    }

    fn shard_bytes(&self) -> usize {
        if self.place.is_sharded { 3 * self.values_part } else { 0 }
    }

    /// While a checkpoint is written, beside the run: the first rank holds what it writes, which
    /// takes the place of the messages it is made of; from others moments are on their way.
    pub(crate) fn save_bytes(&self) -> usize {
        if self.place.is_first() {
            3 * self.values
        } else if self.place.is_sharded {
            2 * self.values_part
        } else {
            0
        }
    }

    /// While a checkpoint is read back: its shard, and all that the first rank sends, if nobody
    /// takes it.
    pub(crate) fn resume_bytes(&self) -> usize {
        self.shard_bytes() + 3 * self.values
    }

    /// What may have arrived while this rank computes its last group, and what it has sent before.
    pub(crate) fn while_computing<L: MemoryLayout>(&self, backend: &Counting<L>) -> [CountedBuffer<u8>; 2] {
        let place = self.place;
        let (arrived, sent) = if place.is_sharded {
            (place.nodes_of_others() * self.gradient_part, place.node * self.gradient)
        } else {
            let visited = place.visited();
            (visited.arriving * self.gradient, visited.sent_before() * self.gradient)
        };
        [backend.beside(arrived), backend.beside(sent)]
    }

    /// From the gradients of this rank's last node on.
    pub(crate) fn update<L: MemoryLayout, E: Engine>(
        &self,
        backend: &Counting<L>,
        engine: &mut E,
        gradients: E::Gradients,
        waiting: [CountedBuffer<u8>; 2],
        (number, settings): (u64, &StepSettings),
    ) -> Result<(), StepError> {
        if self.place.is_sharded {
            self.sharded(backend, engine, gradients, waiting)
        } else {
            self.whole(backend, engine, gradients, waiting, (number, settings))
        }
    }

    /// `sharded::step`
    fn sharded<L: MemoryLayout, E: Engine>(
        &self,
        backend: &Counting<L>,
        engine: &mut E,
        gradients: E::Gradients,
        [arrived, sent]: [CountedBuffer<u8>; 2],
    ) -> Result<(), StepError> {
        let downloaded = backend.beside(self.gradient);
        drop(gradients);
        // Messages for the other ranks, and the part that this one keeps.
        let packed = backend.beside(self.gradient);
        drop(downloaded);
        let unpacked = backend.beside(self.largest_piece);
        drop((unpacked, packed, sent, arrived));
        let shard = backend.beside(self.gradient_part);
        drop(backend.beside(self.values_part));
        // The new weights of this rank on their way to others, those of others on their way through
        // it, and all of them as pieces and then as whole tensors.
        let sent = backend.beside(self.values_part);
        let others = self.values - self.values_part;
        let passed_on = self.place.passed_on() * self.values.div_ceil(self.place.ranks);
        let passed_on = backend.beside(passed_on.min(others));
        let whole = backend.beside(self.values);
        let piece = backend.beside(self.largest_piece);
        // Slices of the old values are dropped.
        for tensor in 0..engine.tensors().len() {
            engine.write(tensor, Stored::Value, Vec::new())?;
        }
        drop((whole, piece, sent, passed_on));
        engine.digests()?;
        drop(shard);
        Ok(())
    }

    /// `update::step`
    fn whole<L: MemoryLayout, E: Engine>(
        &self,
        backend: &Counting<L>,
        engine: &mut E,
        mut gradients: E::Gradients,
        [arrived, sent]: [CountedBuffer<u8>; 2],
        (number, settings): (u64, &StepSettings),
    ) -> Result<(), StepError> {
        let Visited { arriving, is_here, .. } = self.place.visited();
        if arriving > 0 {
            // A gradient of another rank: its message becomes tensors, and these are uploaded.
            let tensors = backend.beside(self.gradient);
            let uploaded = backend.lasting_zeros::<f32>(self.gradient / size_of::<f32>());
            drop((tensors, uploaded));
        }
        drop(arrived);
        if !is_here {
            // To the rank that adds it; the sum comes back and takes its place.
            let tensors = backend.beside(self.gradient);
            drop((backend.beside(self.gradient), tensors));
        }
        drop(sent);
        engine.combine(&mut gradients)?;
        let [tensors, messages] = [(); 2].map(|()| backend.beside(self.values));
        drop(tensors);
        engine.clip_and_apply(&mut gradients, number, 0.0, settings)?;
        drop(messages);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(rank: usize, ranks: usize, groups: usize) -> Place {
        Place { rank, ranks, groups: Groups::new(2 * groups, groups), is_sharded: true, node: 0 }
    }

    #[test]
    fn nodes_are_what_ranks_have_to_themselves() {
        // Ranks, groups; nodes of each rank.
        for (ranks, groups, expected) in [
            (1, 1, vec![vec![0..1]]),
            (2, 2, vec![vec![0..1], vec![1..2]]),
            (2, 8, vec![vec![0..4], vec![4..8]]),
            (2, 3, vec![vec![0..1], vec![1..2, 2..3]]),
            (2, 5, vec![vec![0..2], vec![2..4, 4..5]]),
            (3, 8, vec![vec![0..2], vec![2..4, 4..5], vec![5..6, 6..8]]),
        ] {
            let nodes: Vec<_> = (0..ranks).map(|rank| place(rank, ranks, groups).nodes()).collect();
            assert_eq!(nodes, expected, "{ranks} ranks, {groups} groups");
            let all: usize = nodes.iter().map(Vec::len).sum();
            assert_eq!(place(0, ranks, groups).nodes_of_others(), all - nodes[0].len());
        }
        let few_rows = Place { groups: Groups::new(1, 4), ..place(0, 2, 4) };
        assert!(few_rows.nodes().is_empty(), "the row is in the last group");
        assert_eq!((few_rows.group_rows(), few_rows.gradients_at_once()), (1, 1));
    }

    #[test]
    fn a_rank_holds_the_gradients_of_its_own_groups() {
        // Ranks, groups; of each rank the gradients that exist at once, with shards and without.
        for (ranks, groups, expected) in [
            (1, 8, vec![(4, 4)]),
            (2, 8, vec![(3, 3), (3, 3)]),
            (4, 8, vec![(2, 2); 4]),
            (8, 8, vec![(1, 1); 8]),
            (2, 5, vec![(2, 2), (2, 2)]),
            (2, 7, vec![(2, 2), (1, 2)]),
            (3, 4, vec![(1, 1), (1, 1), (2, 2)]),
        ] {
            let at_once = |rank, is_sharded| Place { is_sharded, ..place(rank, ranks, groups) }.gradients_at_once();
            let of_ranks: Vec<_> = (0..ranks).map(|rank| (at_once(rank, true), at_once(rank, false))).collect();
            assert_eq!(of_ranks, expected, "{ranks} ranks, {groups} groups");
        }
    }

    #[test]
    fn what_leaves_one_rank_arrives_at_another() {
        for groups in 1..20 {
            for ranks in 1..=groups {
                let of_ranks: Vec<_> = (0..ranks).map(|rank| place(rank, ranks, groups).visited()).collect();
                let arriving: usize = of_ranks.iter().map(|visited| visited.arriving).sum();
                let leaving: usize = of_ranks.iter().map(|visited| visited.leaving).sum();
                assert_eq!(arriving, leaving, "{ranks} ranks, {groups} groups");
                let here: Vec<usize> = (0..ranks).filter(|rank| of_ranks[*rank].is_here).collect();
                assert_eq!(here, [0], "{ranks} ranks, {groups} groups");
            }
        }
        assert_eq!([2, 4, 8].map(|ranks| place(0, ranks, 8).visited().arriving), [1, 2, 3]);
    }

    #[test]
    fn no_rank_demands_more_than_those_named() {
        let cases = (1..20).flat_map(|groups| (1..=groups).map(move |ranks| (ranks, groups)));
        for ((ranks, groups), is_sharded) in cases.flat_map(|case| [(case, true), (case, false)]) {
            let first = Place { is_sharded, ..place(0, ranks, groups) };
            let all: Vec<Place> = (0..ranks).flat_map(|rank| Place { rank, ..first }.at_nodes()).collect();
            let named = first.most_demanding(&[]);
            for demand in [Place::held, Place::gradients_at_once] {
                let most = |places: &[Place]| places.iter().map(|place| demand(*place)).max();
                assert_eq!(most(&named), most(&all), "{ranks} ranks, {groups} groups, shards: {is_sharded}");
            }
            assert!(named[0].is_first() && named.len() <= 3, "{named:?}");
        }
    }

    #[test]
    fn what_a_rank_holds() {
        let of = |rank, ranks, groups, is_sharded| Place { is_sharded, ..place(rank, ranks, groups) };
        let held = |ranks, groups, is_sharded| -> Vec<usize> {
            (0..ranks).map(|rank| of(rank, ranks, groups, is_sharded).held()).collect()
        };
        // Gradients: of the rank itself, arriving, sent before.
        assert_eq!(held(2, 2, false), [1 + 1, 1]);
        assert_eq!(held(3, 8, false), [2 + 2, 2 + 2 + 1, 2 + 1]);
        // Shards.
        assert_eq!(held(2, 2, true), [2 + 1, 2 + 1]);
        let nodes: Vec<usize> = of(1, 2, 5, true).most_demanding(&[1]).iter().map(|place| place.node).collect();
        assert_eq!(nodes, [0, 1], "groups 2 and 3, and group 4 while these are on their way");
    }

    #[test]
    fn broadcasts_go_through_ranks_with_others_behind_them() {
        let of_ranks = |ranks| (0..ranks).map(|rank| place(rank, ranks, ranks).passed_on()).collect::<Vec<_>>();
        assert_eq!(of_ranks(2), [0, 0]);
        assert_eq!(of_ranks(3), [0; 3]);
        assert_eq!(of_ranks(4), [1; 4]);
        assert_eq!(of_ranks(8), [3; 8]);
    }

    #[test]
    fn a_rank_holds_its_part_of_a_tied_table_twice() {
        const BLOCK: usize = isobit_kernels::op::sum_squares::BLOCK;
        let of = |rank, is_tied| Exchange::new(place(rank, 2, 2), &[BLOCK, 3 * BLOCK], is_tied);
        let tied = of(0, true);
        assert_eq!([tied.values, tied.gradient].map(|bytes| bytes / 4 / BLOCK), [4, 5]);
        assert_eq!([tied.values_part, tied.gradient_part].map(|bytes| bytes / 4 / BLOCK), [2, 3]);
        assert_eq!((of(1, true).gradient_part, of(0, false).gradient), (8 * BLOCK, 16 * BLOCK));
        assert_eq!((tied.save_bytes(), of(1, true).save_bytes()), (3 * tied.values, tied.values));
    }
}
