//! Digest (`docs/numerics.md`, "Tensor digest") of a buffer: its elements as little-endian bytes,
//! in order.
//!
//! Contributions of blocks of 4,096 bytes are added modulo 2⁶⁴, so threads may take blocks in any
//! order. The op produces sums; the caller downloads and finishes them later, so the op never waits
//! for the device.

use crate::backend::{Length, Memory, U32};
use crate::op::{Op, Output, lengths};
use isobit_numerics::digest::{self, BLOCK_BYTES, Digest};

/// Maximum pairs of sums per digest.
pub const PAIRS_MAX: usize = 1024;

/// 32-bit words in the sums of a tensor of `bytes` bytes.
pub fn sums_length(bytes: usize) -> usize {
    4 * bytes.div_ceil(BLOCK_BYTES).clamp(1, PAIRS_MAX)
}

/// The digest of a tensor of `bytes` bytes from its sums.
pub fn finish(sums: &[u32], bytes: usize) -> Digest {
    let number = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let pairs = sums.as_chunks::<4>().0.iter().map(|&[a, b, c, d]| [number(a, b), number(c, d)]);
    digest::finish(pairs.fold([0; 2], digest::combine), bytes as u64)
}

/// Writes one pair as the words of `sums`; the other pairs are zero.
pub(crate) fn write_pair(sums: &mut [u32], [first, second]: [u64; 2]) {
    sums.fill(0);
    let words = [first, second].map(|sum| [sum as u32, (sum >> 32) as u32]);
    sums[..4].copy_from_slice(words.as_flattened());
}

/// A buffer of any element type.
pub enum AnyBuffer<'a, M: Memory> {
    F32(&'a M::Buffer<f32>),
    Bf16(&'a M::Buffer<half::bf16>),
    F16(&'a M::Buffer<half::f16>),
    U32(&'a M::Buffer<u32>),
    U8(&'a M::Buffer<u8>),
}

impl<M: Memory> AnyBuffer<'_, M> {
    pub fn bytes(&self) -> usize {
        match self {
            Self::F32(x) => x.len() * size_of::<f32>(),
            Self::Bf16(x) => x.len() * size_of::<half::bf16>(),
            Self::F16(x) => x.len() * size_of::<half::f16>(),
            Self::U32(x) => x.len() * size_of::<u32>(),
            Self::U8(x) => x.len(),
        }
    }
}

/// The partial sums of a digest.
pub struct DigestSums<'a, M: Memory> {
    /// Pairs of 64-bit sums, low word first; their sum is the digest's. A backend fills what it
    /// needs and zeroes the rest.
    pub sums: &'a mut U32<M>,
    pub x: AnyBuffer<'a, M>,
}

impl<M: Memory> Op<M> for DigestSums<'_, M> {
    const NAME: &'static str = "digest";

    fn check(&self) {
        lengths(Self::NAME, &[("sums", self.sums.len(), sums_length(self.x.bytes()))]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::U32(self.sums)]
    }
}
