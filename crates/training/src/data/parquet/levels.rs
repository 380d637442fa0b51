//! Integers in Parquet's two packed forms: runs and bit-packed groups of small numbers (levels,
//! dictionary indices, truth values), and differences in blocks. Both are read one by one, so that
//! a run of a billion costs no memory.

/// Reads `width` bits at bit `at`, lowest first; `None` beyond the end.
fn bits(bytes: &[u8], at: usize, width: u32) -> Option<u64> {
    let mut value = 0_u64;
    let mut done = 0;
    while done < width {
        let place = at + done as usize;
        let byte = u64::from(*bytes.get(place / 8)?);
        let offset = (place % 8) as u32;
        let count = (8 - offset).min(width - done);
        value |= (byte >> offset & ((1 << count) - 1)) << done;
        done += count;
    }
    Some(value)
}

/// An unsigned number of 7 bits a byte; `None` if it does not end.
fn varint(bytes: &[u8], at: &mut usize) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.get(*at)?;
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn zigzag(bytes: &[u8], at: &mut usize) -> Option<i64> {
    let value = varint(bytes, at)?;
    Some((value >> 1) as i64 ^ -((value & 1) as i64))
}

/// Runs and bit-packed groups. Positions count in the bytes that every call is given.
#[derive(Clone, Debug)]
pub(super) struct Hybrid {
    at: usize,
    end: usize,
    width: u32,
    run: Run,
}

#[derive(Clone, Copy, Debug)]
enum Run {
    Repeated { value: u32, left: u64 },
    Packed { bit: usize, left: u64 },
}

impl Hybrid {
    pub(super) fn new(range: std::ops::Range<usize>, width: u32) -> Self {
        Self { at: range.start, end: range.end, width, run: Run::Repeated { value: 0, left: 0 } }
    }

    pub(super) fn next(&mut self, bytes: &[u8]) -> Option<u32> {
        loop {
            match &mut self.run {
                Run::Repeated { value, left: left @ 1.. } => {
                    *left -= 1;
                    return Some(*value);
                }
                Run::Packed { bit, left: left @ 1.. } => {
                    *left -= 1;
                    let value = bits(&bytes[..self.end], *bit, self.width)?;
                    *bit += self.width as usize;
                    return Some(value as u32);
                }
                _ => self.run = self.header(bytes)?,
            }
        }
    }

    /// The next run. A run of no numbers is passed over; its header moved the position.
    fn header(&mut self, bytes: &[u8]) -> Option<Run> {
        let bytes = &bytes[..self.end];
        let header = varint(bytes, &mut self.at)?;
        if header & 1 == 0 {
            let length = self.width.div_ceil(8) as usize;
            let stored = bytes.get(self.at..self.at + length)?;
            self.at += length;
            let value = stored.iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte));
            return Some(Run::Repeated { value, left: header >> 1 });
        }
        let groups = header >> 1;
        let length = usize::try_from(groups.checked_mul(u64::from(self.width))?).ok()?;
        let bit = self.at.checked_mul(8)?;
        // The last group may be cut off behind the last number.
        self.at = self.at.checked_add(length)?.min(self.end);
        Some(Run::Packed { bit, left: groups.checked_mul(8)? })
    }
}

/// BOUND: numbers in a block of differences. Writers take 128 or 256.
const BLOCK_MAX: u64 = 1 << 16;

/// Numbers stored as differences in blocks.
#[derive(Clone, Debug)]
pub(super) struct Deltas {
    at: usize,
    end: usize,
    /// Numbers of a part of a block.
    part_length: u64,
    parts: usize,
    /// Numbers that are left, the first one included.
    left: u64,
    value: i64,
    is_first: bool,
    minimum: i64,
    /// Where the widths of the block are, and which part comes next.
    widths: usize,
    part: usize,
    bit: usize,
    width: u32,
    part_left: u64,
}

impl Deltas {
    pub(super) fn new(bytes: &[u8], range: std::ops::Range<usize>) -> Option<Self> {
        let (mut at, end) = (range.start, range.end);
        let bytes = &bytes[..end];
        let block = varint(bytes, &mut at)?;
        let parts = varint(bytes, &mut at)?;
        let left = varint(bytes, &mut at)?;
        let value = zigzag(bytes, &mut at)?;
        if parts == 0 || block > BLOCK_MAX || !block.is_multiple_of(8 * parts) || block == 0 {
            return None;
        }
        Some(Self {
            at,
            end,
            part_length: block / parts,
            parts: usize::try_from(parts).ok()?,
            left,
            value,
            is_first: true,
            minimum: 0,
            widths: 0,
            part: usize::try_from(parts).ok()?,
            bit: 0,
            width: 0,
            part_left: 0,
        })
    }

    /// How many numbers are left.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    pub(super) fn next(&mut self, bytes: &[u8]) -> Option<i64> {
        self.left = self.left.checked_sub(1)?;
        if std::mem::take(&mut self.is_first) {
            return Some(self.value);
        }
        while self.part_left == 0 {
            self.next_part(bytes)?;
        }
        let difference = bits(&bytes[..self.end], self.bit, self.width)?;
        self.bit += self.width as usize;
        self.part_left -= 1;
        // The definition of the format: sums wrap.
        self.value = self.value.wrapping_add(self.minimum).wrapping_add(difference.cast_signed());
        Some(self.value)
    }

    fn next_part(&mut self, bytes: &[u8]) -> Option<()> {
        let bytes = &bytes[..self.end];
        if self.part == self.parts {
            self.minimum = zigzag(bytes, &mut self.at)?;
            self.widths = self.at;
            self.at = self.at.checked_add(self.parts)?;
            self.part = 0;
        }
        self.width = u32::from(*bytes.get(self.widths + self.part)?);
        if self.width > 64 {
            return None;
        }
        self.part += 1;
        self.bit = self.at.checked_mul(8)?;
        self.at = self.at.checked_add(self.part_length as usize * self.width as usize / 8)?;
        self.part_left = self.part_length;
        Some(())
    }

    /// Where the bytes of all numbers end.
    pub(super) fn end(&self, bytes: &[u8]) -> Option<usize> {
        let mut walk = self.clone();
        let mut left = walk.left.saturating_sub(1);
        while left > 0 {
            walk.next_part(bytes)?;
            left = left.saturating_sub(walk.part_length);
        }
        // Parts behind the last number have a width but no bytes.
        (walk.at <= self.end).then_some(walk.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(bytes: &[u8], width: u32, count: usize) -> Vec<Option<u32>> {
        let mut hybrid = Hybrid::new(0..bytes.len(), width);
        (0..count).map(|_| hybrid.next(bytes)).collect()
    }

    #[test]
    fn runs_and_groups() {
        // Five times 3, then the eight numbers 0 to 7 in three bits each.
        let bytes = [10, 3, 3, 0b1000_1000, 0b1100_0110, 0b1111_1010];
        let wanted = [3, 3, 3, 3, 3, 0, 1, 2, 3, 4, 5, 6, 7].map(Some);
        assert_eq!(all(&bytes, 3, 13), wanted);
        assert_eq!(all(&bytes, 3, 14)[13], None);
        // A run of no numbers, then one of two bytes a number.
        assert_eq!(all(&[0, 0, 0, 2, 0x34, 0x12], 16, 2), [Some(0x1234), None]);
        // Numbers of no bits.
        assert_eq!(all(&[6], 0, 4), [Some(0), Some(0), Some(0), None]);
        assert_eq!(all(&[0xff; 12], 7, 1), [None]);
        assert_eq!(all(&[], 1, 1), [None]);
    }

    #[test]
    fn differences() {
        // 7, 5, 3, 1, 2, 3, 4, 5: the example of the format's specification, in a block of 128.
        let mut bytes = vec![128, 1, 4, 8, 14, 3, 2, 0, 0, 0];
        bytes.extend([0b1100_0000, 0b0011_1111, 0, 0, 0, 0, 0, 0]);
        let mut deltas = Deltas::new(&bytes, 0..bytes.len()).expect("a header");
        assert_eq!(deltas.end(&bytes), Some(18));
        let values: Vec<_> = (0..9).map(|_| deltas.next(&bytes)).collect();
        assert_eq!(values[..8], [7, 5, 3, 1, 2, 3, 4, 5].map(Some));
        assert_eq!(values[8], None);
        // Sizes that make no sense.
        for header in [[0, 4, 8, 0], [128, 0, 8, 0], [100, 4, 8, 0], [255, 255, 255, 127]] {
            assert!(Deltas::new(&header, 0..4).is_none(), "{header:?}");
        }
    }
}
