//! Random numbers for the torture: SplitMix64, a function of the seed, the kind and the case, so
//! that every case can be repeated alone.

pub(crate) struct Random(u64);

impl Random {
    /// The numbers of one case.
    pub(crate) fn of(seed: u64, kind: &str, case: usize) -> Self {
        let mut random = Self(seed);
        for byte in kind.bytes() {
            random.0 = random.next() ^ u64::from(byte);
        }
        random.0 = random.next() ^ case as u64;
        random
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `limit`; 0 if `limit` is 0.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// True once in `times`.
    pub(crate) fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn pick<'a, T>(&mut self, among: &'a [T]) -> &'a T {
        &among[self.below(among.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_a_function_of_its_names() {
        let first = |seed, kind, case| Random::of(seed, kind, case).next();
        assert_eq!(first(1, "files", 7), first(1, "files", 7));
        assert_ne!(first(1, "files", 7), first(1, "files", 8));
        assert_ne!(first(1, "files", 7), first(2, "files", 7));
        assert_ne!(first(1, "files", 7), first(1, "kills", 7));
        let mut random = Random::of(1, "", 0);
        assert!((0..1000).all(|_| random.below(3) < 3));
        assert_eq!(random.below(0), 0);
    }
}
