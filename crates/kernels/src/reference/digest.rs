//! Digest of a buffer, the definition (`docs/numerics.md`, "Tensor digest"): the bytes are spelled out, so that the order of
//! bytes in memory does not matter.

use crate::Element;
use isobit_numerics::digest::Digest;

pub(super) fn apply<T: Element>(x: &[T]) -> Digest {
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.bits().to_le_bytes().into_iter().take(size_of::<T>())).collect();
    Digest::of_bytes(&bytes)
}
