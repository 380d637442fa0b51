//! Digests (`docs/numerics.md`, "Tensor digest") of buffers: their elements as little-endian bytes,
//! in order.
//!
//! Contributions of blocks of 4,096 bytes are added modulo 2⁶⁴, so threads may take blocks in any
//! order. The op produces sums; the caller downloads and finishes them later, so the op never waits
//! for the device.

use crate::backend::{Length, Memory, U32};
use crate::op::{Op, Output, lengths};
use isobit_numerics::digest::{self, Digest};

/// 32-bit words in the sums of a tensor.
pub const SUM_WORDS: usize = 4;

/// The digest of a tensor of `bytes` bytes from its sums.
pub fn finish(&[a, b, c, d]: &[u32; SUM_WORDS], bytes: usize) -> Digest {
    let number = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    digest::finish([number(a, b), number(c, d)], bytes as u64)
}

/// The words of a tensor's sums.
pub(crate) fn words([first, second]: [u64; 2]) -> [u32; SUM_WORDS] {
    let [a, b] = [first, second].map(|sum| [sum as u32, (sum >> 32) as u32]);
    [a[0], a[1], b[0], b[1]]
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

impl<M: Memory> Clone for AnyBuffer<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M: Memory> Copy for AnyBuffer<'_, M> {}

/// The sums of many digests.
pub struct DigestSums<'a, M: Memory> {
    /// For each tensor two 64-bit sums, low word first.
    pub sums: &'a mut U32<M>,
    pub tensors: &'a [AnyBuffer<'a, M>],
}

impl<M: Memory> Op<M> for DigestSums<'_, M> {
    const NAME: &'static str = "digest";

    fn check(&self) {
        lengths(Self::NAME, &[("sums", self.sums.len(), SUM_WORDS * self.tensors.len())]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::U32(self.sums)]
    }
}
