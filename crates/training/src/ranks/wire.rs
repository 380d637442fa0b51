//! How messages are built: a kind, a body, and a checksum over both. Numbers are little-endian.

use super::Message;
use isobit_kernels::buffer::{bytes_of, room};
use isobit_numerics::digest::Digest;
use std::sync::Arc;

/// What a message is about. A rank that expects another kind has lost its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// A rank's answer, for rank 0.
    Answer = 1,
    /// What rank 0 decided.
    Decision,
    /// Gradients of a node of the tree, or the values of tensors.
    Tensors,
    /// A failure instead of any of these.
    Failure,
    /// Asks a rank whom it waits for.
    Question,
    /// The rank it waits for.
    Waiting,
}

impl Kind {
    const ALL: [Self; 6] = [Self::Answer, Self::Decision, Self::Tensors, Self::Failure, Self::Question, Self::Waiting];
}

const CHECK_BYTES: usize = 16;

/// A message with this body, written by `fill`.
pub(super) fn message(kind: Kind, fill: impl FnOnce(&mut Vec<u8>)) -> Message {
    long_message(kind, 0, fill)
}

/// A message with this body of `length` bytes, written by `fill`.
pub(super) fn long_message(kind: Kind, length: usize, fill: impl FnOnce(&mut Vec<u8>)) -> Message {
    let mut bytes = room(CHECK_BYTES + 1 + length);
    bytes.extend([0; CHECK_BYTES]);
    bytes.push(kind as u8);
    fill(&mut bytes);
    let check = checksum(&bytes);
    bytes[..CHECK_BYTES].copy_from_slice(&check);
    Arc::new(bytes)
}

/// The tensor digest: messages are damaged by accident, and it runs at the speed of memory.
fn checksum(bytes: &[u8]) -> [u8; CHECK_BYTES] {
    let Digest([first, second]) = Digest::of_bytes(&bytes[CHECK_BYTES..]);
    (u128::from(first) << 64 | u128::from(second)).to_le_bytes()
}

/// Kind and body of a message.
pub(super) fn opened(bytes: &[u8]) -> Result<(Kind, &[u8]), String> {
    let (Some(kind), true) = (bytes.get(CHECK_BYTES), bytes.len() > CHECK_BYTES) else {
        return Err(format!("it has only {} bytes", bytes.len()));
    };
    if checksum(bytes) != bytes[..CHECK_BYTES] {
        return Err("its checksum does not match".to_string());
    }
    let kind = Kind::ALL.into_iter().find(|known| *known as u8 == *kind);
    kind.map(|kind| (kind, &bytes[CHECK_BYTES + 1..])).ok_or_else(|| "its kind is unknown".to_string())
}

pub(super) fn floats(values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_floats(&mut bytes, values);
    bytes
}

pub(super) fn put_floats(bytes: &mut Vec<u8>, values: &[f32]) {
    if cfg!(target_endian = "little") {
        bytes.extend_from_slice(bytes_of(values));
    } else {
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
}

/// Reads the parts of a body one after another.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or_else(|| "it is too short".to_string())?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn number(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.bytes(8)?.try_into().expect("eight bytes")))
    }

    pub(super) fn floats(&mut self, count: usize) -> Result<Vec<f32>, String> {
        let bytes = self.bytes(count.saturating_mul(4))?;
        let mut floats = room(count);
        floats.extend(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        Ok(floats)
    }

    /// The floats that are left, which nothing follows.
    pub(super) fn last_floats(&mut self) -> Result<Vec<f32>, String> {
        let floats = self.floats(self.0.len() / 4)?;
        self.end().map(|()| floats)
    }

    pub(super) fn end(&self) -> Result<(), String> {
        if self.0.is_empty() { Ok(()) } else { Err(format!("{} bytes are left over", self.0.len())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_changed_bit_is_noticed() {
        let sent = message(Kind::Answer, |bytes| put_floats(bytes, &[1.0, -0.0, f32::NAN]));
        let (kind, body) = opened(&sent).expect("whole");
        assert_eq!(kind, Kind::Answer);
        let read: Vec<u32> = Reader(body).floats(3).expect("three").into_iter().map(f32::to_bits).collect();
        assert_eq!(read, [1.0, -0.0, f32::NAN].map(f32::to_bits));
        for bit in 0..8 * sent.len() {
            let mut changed = sent.to_vec();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(opened(&changed).is_err(), "bit {bit}");
        }
        for length in 0..sent.len() {
            assert!(opened(&sent[..length]).is_err(), "{length} bytes");
        }
    }
}
