//! Seeded choices where hardware is free. Seed 0 is plain: no choice is moved.

/// A hash of two numbers, equal on every machine.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// `0 .. count` in the order of a seed; in order for seed 0.
pub(crate) fn order(seed: u64, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    if seed != 0 {
        for last in (1..count).rev() {
            order.swap(last, mix(seed, last as u64) as usize % (last + 1));
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_a_permutation() {
        assert_eq!(order(0, 5), [0, 1, 2, 3, 4]);
        let mut moved = order(1, 100);
        assert_ne!(moved, order(0, 100));
        assert_ne!(moved, order(2, 100));
        moved.sort_unstable();
        assert_eq!(moved, order(0, 100));
    }
}
