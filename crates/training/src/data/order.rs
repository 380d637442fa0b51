//! The order of rows in an epoch: a Fisher-Yates shuffle with counter-based random numbers. A pure
//! function of seed, epoch and number of rows, so a resumed run needs no shuffler state.

use isobit_numerics::philox::{Key, Purpose, block};

/// The training order of rows: entry `k` is the index of the `k`-th row.
///
/// For `i` from `count − 1` down to 1 entry `i` changes places with entry `⌊u·(i + 1) / 2⁶⁴⌋`,
/// where `u` is the 64-bit number (word 0 low, word 1 high) of the Philox block with counter (`i`
/// low, `i` high, epoch high, epoch low) and the key of (seed, row order).
pub fn order(seed: u64, epoch: u64, count: usize) -> Vec<usize> {
    let key = Key::new(seed, Purpose::RowOrder);
    let mut rows: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        let index = last as u64;
        let words = block(key, epoch as u32, (index >> 32) as u32, (epoch >> 32) as u32, index as u32);
        let random = u64::from(words[0]) | u64::from(words[1]) << 32;
        let other = (u128::from(random) * u128::from(index + 1)) >> 64;
        rows.swap(last, other as usize);
    }
    rows
}

/// The order of one epoch at a time, computed when the epoch changes and not at every update: eight
/// bytes per row. Any epoch can be requested next, so a resumed run finds its own.
#[derive(Clone, Debug)]
pub struct EpochOrder {
    seed: u64,
    count: usize,
    /// The epoch and its order; None before the first request.
    current: Option<(u64, Vec<usize>)>,
}

impl EpochOrder {
    pub fn new(seed: u64, count: usize) -> Self {
        Self { seed, count, current: None }
    }

    /// The result of [`order`] for this epoch.
    pub fn of(&mut self, epoch: u64) -> &[usize] {
        if self.current.as_ref().is_none_or(|(current, _)| *current != epoch) {
            // The old order is dropped first: two are never held.
            self.current = None;
        }
        let (_, rows) = self.current.get_or_insert_with(|| (epoch, order(self.seed, epoch, self.count)));
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_permutation_named_by_seed_and_epoch() {
        let mut sorted = order(42, 3, 1000);
        assert_eq!(sorted, order(42, 3, 1000));
        assert_ne!(sorted, order(42, 4, 1000));
        assert_ne!(sorted, order(43, 3, 1000));
        assert_ne!(sorted, order(42, 3 + (1 << 32), 1000));
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
        assert_eq!((order(1, 1, 0), order(1, 1, 1)), (vec![], vec![0]));
    }

    #[test]
    fn the_bits_are_pinned() {
        // Produced by a second implementation in another language.
        assert_eq!(order(42, 0, 10), [0, 7, 6, 3, 1, 5, 2, 8, 4, 9]);
        assert_eq!(order(42, (1 << 40) + 1, 10), [2, 5, 3, 0, 7, 1, 6, 9, 8, 4]);
    }

    #[test]
    fn an_order_that_is_held_is_that_of_its_epoch() {
        let mut held = EpochOrder::new(42, 10);
        for epoch in [0, 0, 1, (1 << 40) + 1, 0] {
            assert_eq!(held.of(epoch), order(42, epoch, 10), "{epoch}");
        }
        assert_eq!(EpochOrder::new(42, 0).of(3), [0usize; 0]);
    }

    #[test]
    fn every_place_is_equally_likely() {
        let mut counts = [[0u32; 5]; 5];
        for seed in 0..20_000 {
            for (place, row) in order(seed, 0, 5).into_iter().enumerate() {
                counts[place][row] += 1;
            }
        }
        // Mean 4000, standard deviation 57: within six of them.
        assert!(counts.iter().flatten().all(|count| (3660..4340).contains(count)), "{counts:?}");
    }
}
