//! Packing: several examples in one row, each its own document. Best fit decreasing: the longest
//! example first, into the row with the least sufficient room, the oldest among equals. Examples
//! stay whole.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

/// Rows as lists of example indices. `lengths` are at most `capacity`; the result depends on
/// nothing else.
pub(super) fn pack(lengths: &[usize], capacity: usize) -> Vec<Vec<usize>> {
    let mut examples: Vec<usize> = (0..lengths.len()).collect();
    // The sort is stable: examples of equal length keep their order.
    examples.sort_by_key(|&example| Reverse(lengths[example]));
    let mut rows: Vec<Vec<usize>> = Vec::new();
    let mut rows_by_room: BTreeMap<usize, VecDeque<usize>> = BTreeMap::new();
    for example in examples {
        let length = lengths[example];
        assert!(length <= capacity, "examples are truncated before they are packed");
        let best = rows_by_room.range(length..).next().map(|(&room, _)| room);
        let (row, room) = if let Some(room) = best {
            (take(&mut rows_by_room, room), room)
        } else {
            rows.push(Vec::new());
            (rows.len() - 1, capacity)
        };
        rows[row].push(example);
        if room > length {
            rows_by_room.entry(room - length).or_default().push_back(row);
        }
    }
    rows
}

fn take(rows_by_room: &mut BTreeMap<usize, VecDeque<usize>>, room: usize) -> usize {
    let waiting = rows_by_room.get_mut(&room).expect("the room was found in the map");
    let row = waiting.pop_front().expect("queues in the map are not empty");
    if waiting.is_empty() {
        rows_by_room.remove(&room);
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_fit_decreasing() {
        assert_eq!(pack(&[3, 8, 2, 5, 4, 2], 10), [vec![1, 2], vec![3, 4], vec![0, 5]]);
        // 6 and 6 leave two rows with room 4; the older one gets the 4, then 3 and 1 share the
        // other.
        assert_eq!(pack(&[6, 6, 1, 3, 4], 10), [vec![0, 4], vec![1, 3, 2]]);
        assert_eq!(pack(&[5, 5, 5, 5], 5), [[0], [1], [2], [3]]);
        assert!(pack(&[], 5).is_empty());
    }

    #[test]
    fn nothing_is_lost_and_nothing_overflows() {
        let lengths: Vec<usize> = (0..500).map(|index| 1 + (index * 7919) % 97).collect();
        let rows = pack(&lengths, 100);
        let mut seen: Vec<usize> = rows.concat();
        seen.sort_unstable();
        assert_eq!(seen, (0..500).collect::<Vec<_>>());
        let mut total = 0;
        for row in &rows {
            let used: usize = row.iter().map(|&example| lengths[example]).sum();
            assert!(used <= 100);
            total += used;
        }
        // More than 95% full.
        assert!(rows.len() * 95 <= total, "{} rows for {total} tokens", rows.len());
    }
}
