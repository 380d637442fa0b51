//! Gradient groups (`docs/numerics.md`, "Gradients over a step"): the rows of an update are divided
//! into logical groups, and the gradients of the groups are added in a fixed binary tree.
//!
//! The division and the tree depend on the number of rows and groups alone, never on who computes
//! which group. Groups are visited in ascending order, which is also the order of the tree: at most
//! ⌈log₂ G⌉ + 1 gradients exist at once.

use std::ops::Range;

/// The division of an update's rows into groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    pub rows: usize,
    pub groups: usize,
}

impl Groups {
    pub fn new(rows: usize, groups: usize) -> Self {
        assert!(groups > 0, "an update has at least one group");
        Self { rows, groups }
    }

    /// Rows of a group: `⌊g·R/G⌋ .. ⌊(g+1)·R/G⌋`.
    pub fn rows_of(self, group: usize) -> Range<usize> {
        let start = |group: usize| (group as u128 * self.rows as u128 / self.groups as u128) as usize;
        start(group)..start(group + 1)
    }

    /// Combines what `leaf` returns for every group that has rows. Empty groups are skipped: adding
    /// +0 would change −0.
    pub fn reduce<T, E>(
        self,
        leaf: &mut impl FnMut(usize, Range<usize>) -> Result<T, E>,
        add: &mut impl FnMut(T, T) -> Result<T, E>,
    ) -> Result<Option<T>, E> {
        self.reduce_node(0..self.groups, leaf, add)
    }

    /// The same for a node of the tree.
    pub fn reduce_node<T, E>(
        self,
        groups: Range<usize>,
        leaf: &mut impl FnMut(usize, Range<usize>) -> Result<T, E>,
        add: &mut impl FnMut(T, T) -> Result<T, E>,
    ) -> Result<Option<T>, E> {
        if self.is_empty(&groups) {
            return Ok(None);
        }
        let Some(middle) = middle(&groups) else {
            return leaf(groups.start, self.rows_of(groups.start)).map(Some);
        };
        let left = self.reduce_node(groups.start..middle, leaf, add)?;
        let right = self.reduce_node(middle..groups.end, leaf, add)?;
        Ok(match (left, right) {
            (Some(left), Some(right)) => Some(add(left, right)?),
            (left, right) => left.or(right),
        })
    }

    /// Most gradients that exist at once while one process reduces all groups.
    pub fn gradients_at_once(self) -> usize {
        self.gradients_of_node(0..self.groups)
    }

    /// The same for a node of the tree.
    pub fn gradients_of_node(self, node: Range<usize>) -> usize {
        match middle(&node) {
            _ if self.is_empty(&node) => 0,
            None => 1,
            Some(middle) => {
                let left = self.gradients_of_node(node.start..middle);
                left.max(usize::from(left > 0) + self.gradients_of_node(middle..node.end))
            }
        }
    }

    /// Whether none of these groups has a row.
    pub fn is_empty(self, groups: &Range<usize>) -> bool {
        self.rows_of(groups.start).start == self.rows_of(groups.end - 1).end
    }
}

/// Where a node of the tree is divided: its left half holds the largest power of two below its
/// number of groups. None for a single group.
pub fn middle(groups: &Range<usize>) -> Option<usize> {
    (groups.len() > 1).then(|| groups.start + groups.len().next_power_of_two() / 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    /// The tree as text.
    fn tree(rows: usize, groups: usize) -> String {
        let mut leaf = |group: usize, _: Range<usize>| Ok::<_, Infallible>(group.to_string());
        let mut add = |a, b| Ok(format!("({a}+{b})"));
        let Ok(tree) = Groups::new(rows, groups).reduce(&mut leaf, &mut add);
        tree.unwrap_or_default()
    }

    #[test]
    fn trees() {
        assert_eq!(tree(8, 1), "0");
        assert_eq!(tree(8, 2), "(0+1)");
        assert_eq!(tree(8, 3), "((0+1)+2)");
        assert_eq!(tree(8, 4), "((0+1)+(2+3))");
        assert_eq!(tree(8, 5), "(((0+1)+(2+3))+4)");
        assert_eq!(tree(8, 7), "(((0+1)+(2+3))+((4+5)+6))");
        assert_eq!(tree(8, 8), "(((0+1)+(2+3))+((4+5)+(6+7)))");
    }

    #[test]
    fn empty_groups_are_skipped() {
        assert_eq!(tree(0, 4), "");
        // Rows 0, 1, 2 fall into groups 2, 5 and 7.
        assert_eq!(tree(3, 8), "(2+(5+7))");
        assert_eq!(tree(1, 5), "4");
        assert_eq!(tree(1, 1), "0");
    }

    #[test]
    fn every_row_is_in_one_group() {
        for rows in 0..20 {
            for count in 1..20 {
                let groups = Groups::new(rows, count);
                let mut next = 0;
                for group in 0..count {
                    let of_group = groups.rows_of(group);
                    assert_eq!(of_group.start, next);
                    assert_eq!(groups.is_empty(&(group..group + 1)), of_group.is_empty());
                    next = of_group.end;
                }
                assert_eq!(next, rows);
            }
        }
    }

    #[test]
    fn few_gradients_exist_at_once() {
        for (rows, count) in (1..200).flat_map(|n| [(n, n), (7, n), (n, 5), (3 * n, n)]) {
            let (live, most) = (std::cell::Cell::new(0_usize), std::cell::Cell::new(0));
            let mut leaf = |_, _| {
                live.set(live.get() + 1);
                most.set(most.get().max(live.get()));
                Ok::<_, Infallible>(())
            };
            let mut add = |(), ()| {
                live.set(live.get() - 1);
                Ok(())
            };
            let groups = Groups::new(rows, count);
            let Ok(_) = groups.reduce(&mut leaf, &mut add);
            let bound = count.next_power_of_two().trailing_zeros() as usize + 1;
            assert!(most.get() <= bound, "{rows} rows in {count} groups: {} at once", most.get());
            assert_eq!(most.get(), groups.gradients_at_once(), "{rows} rows in {count} groups");
        }
    }
}
