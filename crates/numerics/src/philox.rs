//! Counter-based random numbers: Philox4x32-10, addressed by purpose, never by caller or time.
//!
//! A number is identified by (seed, purpose, step, row, tensor, element). Seed and purpose make the
//! key, the rest is the counter, so any thread or device can produce any element independently.

const MULTIPLIER_0: u32 = 0xd251_1f53;
const MULTIPLIER_1: u32 = 0xcd9e_8d57;
const WEYL_0: u32 = 0x9e37_79b9;
const WEYL_1: u32 = 0xbb67_ae85;

/// 2⁻²⁴.
const UNIT: f32 = f32::from_bits((127 - 24) << 23);

/// What random numbers are drawn for. The codes are part of the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Purpose {
    Dropout = 1,
    AdapterInit = 2,
    RowOrder = 3,
    Sampling = 4,
    TestData = 5,
}

/// The finaliser of splitmix64: a bijection of 64 bits that fixes zero.
#[inline(always)]
pub const fn mix64(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The 64-bit key of one stream, low word first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub [u32; 2]);

impl Key {
    /// `mix64(mix64(seed) + purpose)`.
    #[inline(always)]
    pub const fn new(seed: u64, purpose: Purpose) -> Self {
        let key = mix64(mix64(seed).wrapping_add(purpose as u64));
        Self([key as u32, (key >> 32) as u32])
    }
}

/// Philox4x32 with ten rounds.
#[inline(always)]
pub const fn philox4x32(counter: [u32; 4], key: Key) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key.0;
    let mut round = 0;
    while round < 10 {
        let p0 = MULTIPLIER_0 as u64 * c0 as u64;
        let p1 = MULTIPLIER_1 as u64 * c2 as u64;
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(WEYL_0);
        k1 = k1.wrapping_add(WEYL_1);
        round += 1;
    }
    [c0, c1, c2, c3]
}

/// The words of elements `4·block .. 4·block + 4`.
#[inline(always)]
pub const fn block(key: Key, step: u32, row: u32, tensor: u32, block: u32) -> [u32; 4] {
    philox4x32([block, row, tensor, step], key)
}

/// The word of one element: word `element % 4` of block `element / 4`.
#[inline(always)]
pub const fn word(key: Key, step: u32, row: u32, tensor: u32, element: u64) -> u32 {
    // BOUND: the block index is one counter word, so a row of a tensor holds at most 2³⁴ elements.
    debug_assert!(element < 1 << 34, "an element index needs at most 34 bits");
    block(key, step, row, tensor, (element / 4) as u32)[(element % 4) as usize]
}

/// Uniform in [0, 1): the upper 24 bits of the word times 2⁻²⁴, exact.
#[inline(always)]
pub fn uniform(word: u32) -> f32 {
    (word >> 8) as i32 as f32 * UNIT
}

/// The threshold of [`keep`] for a dropout probability in [0, 1): `p·2³²` rounded half to even, in
/// float64.
///
/// # Panics
/// If `probability` is outside [0, 1); the configuration is checked earlier.
pub fn dropout_threshold(probability: f64) -> u32 {
    assert!((0.0..1.0).contains(&probability), "dropout probability {probability} is outside [0, 1)");
    // BOUND: the largest float64 below one would round up to 2³²; the conversion keeps it at 2³²
    // − 1.
    libm::rint(probability * 4294967296.0) as u32
}

/// Whether dropout keeps the element with this word.
#[inline(always)]
pub const fn keep(word: u32, threshold: u32) -> bool {
    word >= threshold
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_random123() {
        let cases = [
            ([0; 4], [0; 2], [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]),
            (
                [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
                [0xa4093822, 0x299f31d0],
                [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1],
            ),
        ];
        for (counter, key, want) in cases {
            assert_eq!(philox4x32(counter, Key(key)), want);
        }
    }

    #[test]
    fn every_part_of_the_name_matters() {
        let key = Key::new(1, Purpose::Dropout);
        let base = word(key, 2, 3, 4, 5);
        assert_eq!(base, block(key, 2, 3, 4, 1)[1]);
        assert_ne!(base, word(key, 3, 3, 4, 5));
        assert_ne!(base, word(key, 2, 4, 4, 5));
        assert_ne!(base, word(key, 2, 3, 5, 5));
        assert_ne!(base, word(key, 2, 3, 4, 6));
        assert_ne!(base, word(Key::new(2, Purpose::Dropout), 2, 3, 4, 5));
        assert_ne!(base, word(Key::new(1, Purpose::Sampling), 2, 3, 4, 5));
    }

    #[test]
    fn keys_are_the_documented_ones() {
        let keys = [0, 1, u64::MAX].map(|seed| Key::new(seed, Purpose::AdapterInit).0);
        assert_eq!(keys, [[0x3a2b_148a, 0xdbd2_3897], [0x2974_aeeb, 0xef30_b01c], [0xd7f0_9386, 0x806e_b2d2]]);
    }

    #[test]
    fn uniform_and_keep_edges() {
        assert_eq!(uniform(0), 0.0);
        assert_eq!(uniform(0xff), 0.0);
        assert_eq!(uniform(u32::MAX), 1.0 - f32::EPSILON / 2.0);
        assert_eq!(dropout_threshold(0.0), 0);
        assert_eq!(dropout_threshold(0.5), 1 << 31);
        assert_eq!(dropout_threshold(0.1), 429496730);
        assert_eq!(dropout_threshold(1.0 - f64::EPSILON / 2.0), u32::MAX);
        assert!(keep(0, 0) && keep(5, 5) && !keep(4, 5));
    }
}
