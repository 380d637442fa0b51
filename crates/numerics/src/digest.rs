//! The tensor digest: 128 bits from integer arithmetic alone, the same for every order and
//! partition of the work.
//!
//! It detects differing bits between devices, recomputations and resumed runs at memory speed. It
//! is NOT cryptographic: the keys are public, and anyone can construct a collision. Files and
//! receipts use BLAKE3.
//!
//! The bytes are read as little-endian 32-bit words, the last one padded with zeros, in blocks of
//! 1024 words, the last one padded with zeros. A block becomes two sums of products (NH, with two
//! overlapping keys); these and the block's index are mixed into two 64-bit numbers, the numbers of
//! all blocks are added, and the byte length is mixed in at the end.

use core::fmt;
use core::str::FromStr;

use crate::philox::{Key, mix64, philox4x32};

/// Words of one block.
pub const BLOCK_WORDS: usize = 1024;
/// Bytes of one block.
pub const BLOCK_BYTES: usize = 4 * BLOCK_WORDS;

/// "ISOB", "DGST" in ASCII.
const KEY: Key = Key([0x4953_4f42, 0x4447_5354]);
/// The second sum reads the key words at this offset.
const KEY_SHIFT: usize = 4;
const PAIRS: usize = BLOCK_WORDS / 2;
const KEY_PAIRS: usize = PAIRS + KEY_SHIFT / 2;

/// Key words of even and of odd index, zero-extended, so that the loop needs no shuffles. Word `j`
/// is word `j % 4` of Philox at counter `[j / 4, 0, 0, 0]`.
struct KeyTable {
    even: [u64; KEY_PAIRS],
    odd: [u64; KEY_PAIRS],
}

static KEYS: KeyTable = {
    let mut table = KeyTable { even: [0; KEY_PAIRS], odd: [0; KEY_PAIRS] };
    let mut pair = 0;
    while pair < KEY_PAIRS {
        let words = philox4x32([(pair / 2) as u32, 0, 0, 0], KEY);
        table.even[pair] = words[2 * (pair % 2)] as u64;
        table.odd[pair] = words[2 * (pair % 2) + 1] as u64;
        pair += 1;
    }
    table
};

/// The digest of a tensor or of any bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u64; 2]);

impl Digest {
    /// Digest of bytes.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        finish(blocks(bytes, 0), bytes.len() as u64)
    }

    /// Digest of the little-endian bytes of float32 numbers.
    pub fn of_f32(values: &[f32]) -> Self {
        finish(blocks_of_f32(values, 0), 4 * values.len() as u64)
    }
}

/// [`blocks`] of the little-endian bytes of float32 numbers.
pub fn blocks_of_f32(values: &[f32], first: u64) -> [u64; 2] {
    if cfg!(target_endian = "little") {
        // SAFETY: float32 has no padding and bytes have no alignment; length and lifetime are those
        // of the slice.
        let bytes = unsafe { core::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
        return blocks(bytes, first);
    }
    let mut sum = [0; 2];
    for (index, chunk) in (first..).zip(values.chunks(BLOCK_WORDS)) {
        let mut words = [0; BLOCK_WORDS];
        for (word, value) in words.iter_mut().zip(chunk) {
            *word = value.to_bits();
        }
        sum = combine(sum, block(&words, index));
    }
    sum
}

/// Sum of the contributions of all blocks of `bytes`, the first of which has index `first`. Every
/// part of a tensor except the last consists of whole blocks.
#[inline(always)]
pub fn blocks(bytes: &[u8], first: u64) -> [u64; 2] {
    let (whole, rest) = bytes.as_chunks::<BLOCK_BYTES>();
    let mut sum = [0; 2];
    let mut index = first;
    for chunk in whole {
        let pairs = chunk.as_chunks::<8>().0;
        sum = combine(sum, mix(products(|i| u64::from_le_bytes(pairs[i])), index));
        index += 1;
    }
    if !rest.is_empty() {
        let mut padded = [0; BLOCK_BYTES];
        padded[..rest.len()].copy_from_slice(rest);
        let pairs = padded.as_chunks::<8>().0;
        sum = combine(sum, mix(products(|i| u64::from_le_bytes(pairs[i])), index));
    }
    sum
}

/// Contribution of one block of words: the definition that devices mirror.
#[inline(always)]
pub fn block(words: &[u32; BLOCK_WORDS], index: u64) -> [u64; 2] {
    mix(products(|i| u64::from(words[2 * i]) | u64::from(words[2 * i + 1]) << 32), index)
}

/// Adds the contributions of disjoint sets of blocks.
#[inline(always)]
pub const fn combine(a: [u64; 2], b: [u64; 2]) -> [u64; 2] {
    [a[0].wrapping_add(b[0]), a[1].wrapping_add(b[1])]
}

/// Digest from the sum over all blocks and the length in bytes.
#[inline(always)]
pub const fn finish(sum: [u64; 2], byte_length: u64) -> Digest {
    let first = mix64(sum[0] ^ mix64(byte_length.wrapping_add(1)));
    let second = mix64(sum[1].wrapping_add(first));
    Digest([first, second])
}

/// `h0` and `h1`: `Σ (w[2i] + k[2i]) · (w[2i+1] + k[2i+1])` with the inner sums modulo 2³² and the
/// outer one modulo 2⁶⁴, and the same with `k` shifted by four words. `pair(i)` holds `w[2i]` in
/// its low half and `w[2i+1]` in its high half.
#[inline(always)]
fn products(pair: impl Fn(usize) -> u64) -> [u64; 2] {
    const LOW: u64 = 0xffff_ffff;
    let [mut h0, mut h1] = [0u64; 2];
    for i in 0..PAIRS {
        let even = pair(i);
        let odd = even >> 32;
        // Masked 64-bit sums replace 32-bit ones, so the compiler sees a 32 × 32 → 64 bit product
        // in every lane.
        let product = |k: usize| (even.wrapping_add(KEYS.even[k]) & LOW) * (odd.wrapping_add(KEYS.odd[k]) & LOW);
        h0 = h0.wrapping_add(product(i));
        h1 = h1.wrapping_add(product(i + KEY_SHIFT / 2));
    }
    [h0, h1]
}

/// A bijection of the two sums for every index.
#[inline(always)]
const fn mix(h: [u64; 2], index: u64) -> [u64; 2] {
    let a = mix64(h[0].wrapping_add(mix64(index.wrapping_add(1))));
    let b = mix64(h[1].wrapping_add(a));
    [mix64(a.wrapping_add(b)), b]
}

impl fmt::Display for Digest {
    /// 32 hexadecimal digits, first word first, most significant digit first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.0[0], self.0[1])
    }
}

/// Text that is not 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotADigest;

impl fmt::Display for NotADigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tensor digest is 32 hexadecimal digits")
    }
}

impl core::error::Error for NotADigest {}

impl FromStr for Digest {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Self, NotADigest> {
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(NotADigest);
        }
        let value = u128::from_str_radix(text, 16).map_err(|_| NotADigest)?;
        Ok(Self([(value >> 64) as u64, value as u64]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(length: usize) -> Vec<u8> {
        (0..length).map(|i| mix64(i as u64 + 1) as u8).collect()
    }

    /// The definition, word by word.
    fn definition(bytes: &[u8]) -> Digest {
        let key = |j: usize| philox4x32([(j / 4) as u32, 0, 0, 0], KEY)[j % 4];
        let mut sum = [0; 2];
        for (index, chunk) in bytes.chunks(BLOCK_BYTES).enumerate() {
            let word = |j: usize| {
                let byte = |n: usize| u32::from(chunk.get(4 * j + n).copied().unwrap_or(0)) << (8 * n);
                byte(0) | byte(1) | byte(2) | byte(3)
            };
            let nh = |shift: usize| {
                (0..PAIRS).fold(0u64, |sum, i| {
                    let even = word(2 * i).wrapping_add(key(2 * i + shift));
                    let odd = word(2 * i + 1).wrapping_add(key(2 * i + 1 + shift));
                    sum.wrapping_add(u64::from(even) * u64::from(odd))
                })
            };
            sum = combine(sum, mix([nh(0), nh(4)], index as u64));
        }
        finish(sum, bytes.len() as u64)
    }

    #[test]
    fn equals_its_definition() {
        for length in [0, 1, 3, 4, 5, 8, 4095, 4096, 4097, 12_289] {
            let bytes = sample(length);
            assert_eq!(Digest::of_bytes(&bytes), definition(&bytes), "{length} bytes");
        }
        let mut words = [0; BLOCK_WORDS];
        let bytes = sample(BLOCK_BYTES);
        for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*chunk);
        }
        assert_eq!(block(&words, 9), blocks(&bytes, 9));
    }

    #[test]
    fn known_answers() {
        let cases = [
            (0, "7ab40e090f363a7d71cac37448049ce4"),
            (1, "bb34472167558857e03f99127ad2bfb5"),
            (5000, "1b210a3aa5a8ec093caf3e42a58d731e"),
        ];
        for (length, want) in cases {
            assert_eq!(Digest::of_bytes(&sample(length)).to_string(), want, "{length} bytes");
        }
        assert_eq!(Digest::of_f32(&[1.0, -2.5, f32::NAN]).to_string(), "6b4f27f9539186896a47e0f226b6d1f9");
    }

    #[test]
    fn every_bit_and_every_place_matters() {
        let mut bytes = sample(4500);
        let whole = Digest::of_bytes(&bytes);
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let changed = Digest::of_bytes(&bytes);
            assert!(changed.0[0] != whole.0[0] && changed.0[1] != whole.0[1], "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let values: Vec<f32> = (0..1500u16).map(f32::from).collect();
        let straight = Digest::of_f32(&values);
        for (a, b) in [(0, 1), (0, 2), (3, 1027), (0, 1024), (511, 1023), (1498, 1499)] {
            let mut swapped = values.clone();
            swapped.swap(a, b);
            assert_ne!(Digest::of_f32(&swapped), straight, "words {a} and {b}");
        }
    }

    #[test]
    fn parts_may_come_in_any_order() {
        let bytes = sample(5 * BLOCK_BYTES + 77);
        let whole = Digest::of_bytes(&bytes);
        for cut in 0..=5 {
            let (head, tail) = bytes.split_at(cut * BLOCK_BYTES);
            let sum = combine(blocks(tail, cut as u64), blocks(head, 0));
            assert_eq!(finish(sum, bytes.len() as u64), whole);
        }
    }

    #[test]
    fn length_matters() {
        let digests: Vec<Digest> = (0..5000).map(|length| Digest::of_bytes(&vec![0; length])).collect();
        let distinct: std::collections::BTreeSet<Digest> = digests.iter().copied().collect();
        assert_eq!(distinct.len(), digests.len());
    }

    #[test]
    fn text_form() {
        let digest = Digest([0x0123_4567_89ab_cdef, 1]);
        assert_eq!(digest.to_string(), "0123456789abcdef0000000000000001");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        for bad in ["", "0123", "+123456789abcdef0000000000000001", "0123456789abcdef000000000000000g"] {
            assert_eq!(bad.parse::<Digest>(), Err(NotADigest));
        }
    }
}
